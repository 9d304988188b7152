"""Which tensors a Mixtral layer is made of, and under which checkpoint names they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.container import ContainerMap, LayerContainer
from hookline.parameters import (
    AttentionOutputParameter,
    DecoderWeights,
    MoEGatingWeightParameter,
    NormParameter,
    UnfusedMoEGatedMLPParameter,
    UnfusedMoEMLP2Parameter,
    UnfusedQKVParameter,
)

if TYPE_CHECKING:
    from hookline_mixtral.model import MixtralModel


class MixtralLayer(LayerContainer):
    """One decoder layer. An expert's w1 is its gate, w3 its up and w2 its down matrix."""

    attn_norm: NormParameter
    qkv_w: UnfusedQKVParameter
    attn_out_w: AttentionOutputParameter
    mlp_norm: NormParameter
    moe_gate: MoEGatingWeightParameter
    moe_mlp_1: UnfusedMoEGatedMLPParameter
    moe_mlp_2: UnfusedMoEMLP2Parameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.q_proj.weight": "qkv_w.q_params",
        "self_attn.k_proj.weight": "qkv_w.k_params",
        "self_attn.v_proj.weight": "qkv_w.v_params",
        "self_attn.o_proj.weight": "attn_out_w.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
        "block_sparse_moe.gate.weight": "moe_gate.params",
        "block_sparse_moe.experts.*.w1.weight": "moe_mlp_1.gating_experts",
        "block_sparse_moe.experts.*.w3.weight": "moe_mlp_1.up_experts",
        "block_sparse_moe.experts.*.w2.weight": "moe_mlp_2.experts",
    }


def build_containers(model: MixtralModel) -> ContainerMap:
    """Empty containers for `model`, bound to the checkpoint's prefixes; the model keeps them for `forward`."""
    model.layers = [MixtralLayer(model) for _ in range(model.config.num_layers)]
    model.weights = DecoderWeights(model)
    containers = ContainerMap()
    containers.set_transformer_params("model.layers", model.layers)
    containers.set_non_transformer_params(model.weights)
    containers.set_unmapped_params("model.layers.*.self_attn.rotary_emb.inv_freq")
    return containers
