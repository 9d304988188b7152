"""The frozen config of a GLM-5.2 or DeepSeek-V3.2 checkpoint, from its `config.json`."""

from __future__ import annotations

import math
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

# Eps of the norms of the latents and of the index keys: the reference implementation's own, not `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6
_UNSOUND = "The checkpoint's config.json is not sound for this architecture."
_PATTERN = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmMoeDsaConfig(MoETransformerConfig):
    """Beside the shapes: latent sizes, the indexer, and what each layer has.

    `head_dim` is that of queries and keys, nope and rope part together; the field of that name in `config.json`
    means nothing. Queries, keys and values have as many heads, and one latent of all is what the cache holds.

    Attributes:
        q_lora_rank: size of the queries' latent.
        kv_lora_rank: L, size of the keys' and values' latent.
        qk_nope_head_dim, qk_rope_head_dim: of a query's or key's head, the part without rotary embedding, and R.
        v_head_dim: of a value's head.
        softmax_scale: on the attention's scores.
        latent_norm_eps: of the norms of both latents and of the index keys.
        rope_interleave, indexer_rope_interleave: whether a rotary pair is two neighbours, in attention and indexer.
        index_n_heads, index_head_dim, index_topk: of the lightning indexer.
        full_index: of each layer, whether it has an indexer; the others take the list of the one before.
        sparse: of each layer, whether it has experts or one MLP.
        num_mtp_layers: layers for drafts behind the last one, of which the first is used.
        share_mtp_index: whether later drafts of a step take the first one's list.
        weight_block_size: rows and columns that share a scale, in checkpoints with FP8 blocks.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    latent_norm_eps: float = LATENT_NORM_EPS
    rope: RopeConfig
    rope_interleave: bool
    indexer_rope_interleave: bool
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    full_index: tuple[bool, ...]
    sparse: tuple[bool, ...]
    tied_embeddings: bool
    num_mtp_layers: int
    share_mtp_index: bool
    weight_block_size: tuple[int, int]

    @property
    def latent_width(self) -> int:
        """Numbers that a token's cache entry has in each layer, L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_places(self) -> tuple[int | None, ...]:
        """Of each layer its place in the cache of index keys, which holds layers with an indexer alone."""
        return tuple(sum(self.full_index[:layer]) if full else None for layer, full in enumerate(self.full_index))


def read_config(hf_config: Mapping[str, Any]) -> GlmMoeDsaConfig:
    """Raises ModelConfigError, naming the field, where the config is unsound or asks for what is not supported."""
    nope, rope_size = read_count(hf_config, "qk_nope_head_dim"), read_count(hf_config, "qk_rope_head_dim")
    heads = {"head_dim": nope + rope_size, "num_key_value_heads": hf_config.get("num_attention_heads")}
    fields = read_transformer_fields({**hf_config, **heads})
    num_layers = fields["num_layers"]
    expert_size = read_count(hf_config, "moe_intermediate_size")
    index_head_dim = read_count(hf_config, "index_head_dim")
    if index_head_dim < rope_size:
        raise ModelConfigError(
            f"index_head_dim is {index_head_dim}, less than qk_rope_head_dim, {rope_size}", hint=_UNSOUND
        )
    if read_flag(hf_config, "attention_bias"):
        raise ModelConfigError("attention_bias is true", hint="Attention with biases is not supported.")
    return GlmMoeDsaConfig(
        **fields,
        n_experts=read_experts(hf_config, "n_routed_experts", "num_experts_per_tok")[0],
        routing=_routing(hf_config),
        activation=read_activation(hf_config),
        expert_intermediate_size=expert_size,
        shared_intermediate_size=expert_size * read_count(hf_config, "n_shared_experts", 1, limit=2**10),
        q_lora_rank=read_count(hf_config, "q_lora_rank"),
        kv_lora_rank=read_count(hf_config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_size,
        v_head_dim=read_count(hf_config, "v_head_dim"),
        rope=read_rope(hf_config, rope_size),  # before the next, which relies on what this checks
        softmax_scale=(nope + rope_size) ** -0.5 * _yarn_scale(hf_config),
        rope_interleave=hf_config.get("rope_interleave") is None or read_flag(hf_config, "rope_interleave"),
        indexer_rope_interleave=read_flag(hf_config, "indexer_rope_interleave"),
        index_n_heads=read_count(hf_config, "index_n_heads"),
        index_head_dim=index_head_dim,
        index_topk=read_count(hf_config, "index_topk"),
        full_index=_full_index(hf_config, num_layers),
        sparse=_sparse(hf_config, num_layers),
        tied_embeddings=read_flag(hf_config, "tie_word_embeddings"),
        num_mtp_layers=_whole(hf_config, "num_nextn_predict_layers", 0, 0, 64),
        share_mtp_index=read_flag(hf_config, "index_share_for_mtp_iteration"),
        weight_block_size=_block_size(hf_config),
    )


def _whole(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        raise ModelConfigError(
            f"{name} is {str(value)[:80]}; expected a whole number from {low} to {high}", hint=_UNSOUND
        )
    return value


def _routing(hf_config: Mapping[str, Any]) -> RoutingRule:
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if hf_config.get(name, known) != known:
            raise ModelConfigError(
                f"{name} is {str(hf_config[name])[:80]!r}; {known} is known",
                hint="The model would give wrong text with another one, so it is refused.",
            )
    n_experts, top_k = read_experts(hf_config, "n_routed_experts", "num_experts_per_tok")
    groups, top_groups = read_count(hf_config, "n_group", 1), read_count(hf_config, "topk_group", 1)
    if n_experts % groups or top_groups > groups or top_k > n_experts // groups * top_groups:
        raise ModelConfigError(
            f"n_group is {groups} and topk_group {top_groups}, for {top_k} of {n_experts} experts",
            hint="Experts must fall into equal groups, and the chosen groups must hold the experts of a token.",
        )
    scale = hf_config.get("routed_scaling_factor")
    scale = 1.0 if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ModelConfigError(f"routed_scaling_factor is {str(scale)[:80]}", hint="It must be a positive number.")
    renormalize = hf_config.get("norm_topk_prob") is None or read_flag(hf_config, "norm_topk_prob")
    return RoutingRule(
        top_k=top_k,
        scoring="sigmoid",
        renormalize=renormalize,
        scale=float(scale),
        num_groups=groups,
        top_groups=top_groups,
    )


def _yarn_scale(hf_config: Mapping[str, Any]) -> float:
    """YaRN's factor on the scores, m * m; m of `mscale_all_dim`, which cos and sin do not carry."""
    params = dict(hf_config.get("rope_scaling") or {}) | dict(hf_config.get("rope_parameters") or {})
    factor, all_dim = params.get("factor") or 1.0, params.get("mscale_all_dim")
    if params.get("rope_type", params.get("type", "default")) == "default" or not all_dim or factor <= 1:
        return 1.0
    return float(0.1 * all_dim * math.log(factor) + 1.0) ** 2


def _full_index(hf_config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """`indexer_types` decides; without it `index_topk_pattern`; without both the rule of frequency and offset."""
    name = "indexer_types" if hf_config.get("indexer_types") else "index_topk_pattern"
    types = hf_config.get(name)
    if types is None:
        # Both have large bounds: a frequency over the number of layers leaves one indexer for all.
        frequency = _whole(hf_config, "index_topk_freq", 1, 1, 2**31)
        offset = _whole(hf_config, "index_skip_topk_offset", 2, 0, 2**31)
        full = tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers))
        name = "index_skip_topk_offset"
    elif (
        isinstance(types, list | str)
        and len(types) == num_layers
        and all(isinstance(one, str) and one in _PATTERN for one in types)
    ):
        full = tuple(_PATTERN[one] == "full" for one in types)
    else:
        raise ModelConfigError(
            f"{name} is {str(types)[:80]}; expected full or shared (F or S) for each of {num_layers} layers",
            hint=_UNSOUND,
        )
    if not full[0]:
        raise ModelConfigError(
            f"{name} makes layer 0 a shared one",
            hint="The first layer must have an indexer of its own: there is none before it.",
        )
    return full


def _sparse(hf_config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types`; without it the layers from `first_k_dense_replace` on, by `moe_layer_freq`."""
    types = hf_config.get("mlp_layer_types")
    if types is None:
        first = _whole(hf_config, "first_k_dense_replace", 3, 0, 10_000)
        step = read_count(hf_config, "moe_layer_freq", 1)
        return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(one not in ("dense", "sparse") for one in types):
        raise ModelConfigError(
            f"mlp_layer_types is {str(types)[:80]}; expected dense or sparse for each of {num_layers} layers",
            hint=_UNSOUND,
        )
    return tuple(one == "sparse" for one in types)


def _block_size(hf_config: Mapping[str, Any]) -> tuple[int, int]:
    """Of FP8 blocks; whether a checkpoint has any is told by its tensors alone."""
    holder = hf_config.get("quantization_config")
    size = holder.get("weight_block_size") if isinstance(holder, Mapping) else None
    if size is None:
        return 128, 128
    if not isinstance(size, list | tuple) or len(size) != 2 or any(type(one) is not int or one < 1 for one in size):
        raise ModelConfigError(
            f"quantization_config.weight_block_size is {str(size)[:80]}; expected two whole numbers", hint=_UNSOUND
        )
    return size[0], size[1]
