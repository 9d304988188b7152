"""The frozen config of a Mixtral checkpoint, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.layers.rotary import RopeConfig, read_rope
from hookline.model import (
    MoETransformerConfig,
    read_activation,
    read_count,
    read_experts,
    read_flag,
    read_transformer_fields,
)
from hookline_kernels.moe_routing import RoutingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(MoETransformerConfig):
    """Beside the shapes: rotary settings, window, and whether the head is the embedding."""

    rope: RopeConfig
    window: int | None
    tied_embeddings: bool


def read_config(hf_config: Mapping[str, Any]) -> MixtralConfig:
    """Raises ModelConfigError, naming the field, where the config is unsound or asks for what is not supported."""
    fields = read_transformer_fields(hf_config)
    n_experts, top_k = read_experts(hf_config, "num_local_experts", "num_experts_per_tok")
    window = hf_config.get("sliding_window")
    return MixtralConfig(
        **fields,
        n_experts=n_experts,
        routing=RoutingRule(top_k=top_k, scoring="softmax", renormalize=True),
        activation=read_activation(hf_config),
        expert_intermediate_size=fields["intermediate_size"],
        rope=read_rope(hf_config, fields["head_dim"], default_theta=1e6),
        window=None if window is None else read_count(hf_config, "sliding_window"),
        tied_embeddings=read_flag(hf_config, "tie_word_embeddings"),
    )
