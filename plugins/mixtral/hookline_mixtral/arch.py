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
    from hookline_mixtral.config import MixtralConfig
    from hookline_mixtral.model import MixtralModel

_MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "dtype": "bfloat16",
}


@hookimpl
def hookline_architectures() -> tuple[Architecture, ...]:
    """Mixtral."""
    return (
        Architecture(
            name="MixtralForCausalLM",
            example_repositories=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
            structured_output_backend="xgrammar",
            reference_shapes={"mixtral-8x7b": _MIXTRAL_8X7B},
        ),
    )


@hookimpl
def hookline_read_config(hf_config: Mapping[str, Any]) -> MixtralConfig:
    from hookline_mixtral.config import read_config

    return read_config(hf_config)


@hookimpl
def hookline_build_model(config: MixtralConfig, engine_config: EngineConfig, parallel: Parallel) -> MixtralModel:
    from hookline_mixtral.model import MixtralModel

    return MixtralModel(config, engine_config, parallel)


@hookimpl
def hookline_build_containers(model: MixtralModel) -> ContainerMap:
    from hookline_mixtral.container import build_containers

    return build_containers(model)


@hookimpl
def hookline_weight_adapter(config: MixtralConfig, weights_format: str) -> WeightAdapter:
    from hookline.weight_adapter import FusedExpertsAdapter

    return FusedExpertsAdapter("block_sparse_moe", gate="w1", up="w3", down="w2")


@hookimpl
def hookline_batch_processor(config: MixtralConfig, engine_config: EngineConfig) -> BatchProcessor:
    from hookline.batch_processor import BatchProcessor

    return BatchProcessor(config, engine_config, rope_lengths=config.rope.depends_on_length)
