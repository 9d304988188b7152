"""The frozen config of a Qwen2-MoE checkpoint, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.errors import ModelConfigError
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

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(MoETransformerConfig):
    """Beside the shapes: rotary settings, biases, and what each layer has.

    Attributes:
        windows: of each layer, the tokens that one sees with itself; None sees all.
        sparse: of each layer, whether it has experts or one MLP.
    """

    rope: RopeConfig
    qkv_bias: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]


def read_config(hf_config: Mapping[str, Any]) -> Qwen2MoeConfig:
    """Raises ModelConfigError, naming the field, where the config is unsound or asks for what is not supported."""
    fields = read_transformer_fields(hf_config)
    n_experts, top_k = read_experts(hf_config, "num_experts", "num_experts_per_tok")
    renormalize = read_flag(hf_config, "norm_topk_prob")
    return Qwen2MoeConfig(
        **fields,
        n_experts=n_experts,
        routing=RoutingRule(top_k=top_k, scoring="softmax", renormalize=renormalize),
        activation=read_activation(hf_config),
        expert_intermediate_size=read_count(hf_config, "moe_intermediate_size"),
        shared_intermediate_size=read_count(hf_config, "shared_expert_intermediate_size"),
        rope=read_rope(hf_config, fields["head_dim"]),
        qkv_bias=hf_config.get("qkv_bias") is None or read_flag(hf_config, "qkv_bias"),
        tied_embeddings=read_flag(hf_config, "tie_word_embeddings"),
        windows=_windows(hf_config, fields["num_layers"]),
        sparse=_sparse(hf_config, fields["num_layers"]),
    )


def _windows(hf_config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Where no `layer_types` say it, every second layer slides its window, up to `max_window_layers`."""
    if not read_flag(hf_config, "use_sliding_window"):
        return (None,) * num_layers
    types = hf_config.get("layer_types")
    if types is None:
        last = read_count(hf_config, "max_window_layers", 28)
        types = [_LAYER_TYPES[index % 2 == 0 and index < last] for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ModelConfigError(
            f"layer_types is {str(types)[:80]}; expected {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers",
            hint="The checkpoint's config.json is not sound for this architecture.",
        )
    window = read_count(hf_config, "sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _sparse(hf_config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    step, dense = read_count(hf_config, "decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ModelConfigError(
            f"mlp_only_layers is {str(dense)[:80]}; expected a list of layer numbers",
            hint="The checkpoint's config.json is not sound for this architecture.",
        )
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
