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
    from hookline_qwen2_moe.config import Qwen2MoeConfig
    from hookline_qwen2_moe.model import Qwen2MoeModel

_QWEN_MOE_A2_7B = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}


@hookimpl
def hookline_architectures() -> tuple[Architecture, ...]:
    """Qwen2-MoE."""
    return (
        Architecture(
            name="Qwen2MoeForCausalLM",
            example_repositories=("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen2-57B-A14B-Instruct"),
            tool_parser="hermes",
            structured_output_backend="xgrammar",
            reference_shapes={"qwen1.5-moe-a2.7b": _QWEN_MOE_A2_7B},
        ),
    )


@hookimpl
def hookline_read_config(hf_config: Mapping[str, Any]) -> Qwen2MoeConfig:
    from hookline_qwen2_moe.config import read_config

    return read_config(hf_config)


@hookimpl
def hookline_build_model(config: Qwen2MoeConfig, engine_config: EngineConfig, parallel: Parallel) -> Qwen2MoeModel:
    from hookline_qwen2_moe.model import Qwen2MoeModel

    return Qwen2MoeModel(config, engine_config, parallel)


@hookimpl
def hookline_build_containers(model: Qwen2MoeModel) -> ContainerMap:
    from hookline_qwen2_moe.container import build_containers

    return build_containers(model)


@hookimpl
def hookline_weight_adapter(config: Qwen2MoeConfig, weights_format: str) -> WeightAdapter:
    from hookline.weight_adapter import FusedExpertsAdapter

    return FusedExpertsAdapter("mlp", gate="gate_proj", up="up_proj", down="down_proj")


@hookimpl
def hookline_batch_processor(config: Qwen2MoeConfig, engine_config: EngineConfig) -> BatchProcessor:
    from hookline.batch_processor import BatchProcessor

    return BatchProcessor(config, engine_config, rope_lengths=config.rope.depends_on_length)
