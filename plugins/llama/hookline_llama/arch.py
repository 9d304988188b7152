"""What this plugin serves, and its answers to the engine's questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.hookspecs import Architecture, hookimpl

if TYPE_CHECKING:
    from hookline.batch_processor import BatchProcessor
    from hookline.config import EngineConfig
    from hookline.container import ContainerMap
    from hookline.parallel import Parallel
    from hookline.weight_adapter import WeightAdapter
    from hookline_llama.config import LlamaConfig
    from hookline_llama.model import LlamaModel

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
_LLAMA_70B = _LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@hookimpl
def hookline_architectures() -> tuple[Architecture, ...]:
    """Llama and Mistral: one decoder, of which Mistral may slide its window."""
    return (
        Architecture(
            name="LlamaForCausalLM",
            example_repositories=("meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
            weight_formats=("safetensors", "gguf"),
            gguf_name="llama",
            tool_parser="hermes",
            structured_output_backend="xgrammar",
            reference_shapes={"llama-8b": _LLAMA_8B, "llama-70b": _LLAMA_70B},
            stability="stable",
        ),
        Architecture(
            name="MistralForCausalLM",
            example_repositories=("mistralai/Mistral-7B-Instruct-v0.3",),
            structured_output_backend="xgrammar",
            stability="stable",
        ),
    )


@hookimpl
def hookline_read_config(hf_config: Mapping[str, Any]) -> LlamaConfig:
    from hookline_llama.config import read_config

    return read_config(hf_config)


@hookimpl
def hookline_build_model(config: LlamaConfig, engine_config: EngineConfig, parallel: Parallel) -> LlamaModel:
    from hookline_llama.model import LlamaModel

    return LlamaModel(config, engine_config, parallel)


@hookimpl
def hookline_build_containers(model: LlamaModel) -> ContainerMap:
    from hookline_llama.container import build_containers

    return build_containers(model)


@hookimpl
def hookline_weight_adapter(config: LlamaConfig, weights_format: str) -> WeightAdapter:
    from hookline_llama.weight_adapter import build_adapter

    return build_adapter(config, weights_format)


@hookimpl
def hookline_batch_processor(config: LlamaConfig, engine_config: EngineConfig) -> BatchProcessor:
    from hookline.batch_processor import BatchProcessor

    return BatchProcessor(config, engine_config, rope_lengths=config.rope.depends_on_length)
