"""Which tensors a Qwen2-MoE layer is made of, and under which checkpoint names they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.container import ContainerMap, LayerContainer
from hookline.parameters import (
    AttentionOutputParameter,
    DecoderWeights,
    GatedMLPParameter,
    MLP2Parameter,
    MoEGatingWeightParameter,
    NormParameter,
    UnfusedMoEGatedMLPParameter,
    UnfusedMoEMLP2Parameter,
    UnfusedQKVParameter,
)

if TYPE_CHECKING:
    from hookline_qwen2_moe.model import Qwen2MoeModel


class Qwen2MoeLayer(LayerContainer):
    """What all decoder layers have."""

    attn_norm: NormParameter
    qkv_w: UnfusedQKVParameter
    qkv_b: UnfusedQKVParameter | None
    attn_out_w: AttentionOutputParameter
    mlp_norm: NormParameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.q_proj.weight": "qkv_w.q_params",
        "self_attn.k_proj.weight": "qkv_w.k_params",
        "self_attn.v_proj.weight": "qkv_w.v_params",
        "self_attn.q_proj.bias": "qkv_b.q_params",
        "self_attn.k_proj.bias": "qkv_b.k_params",
        "self_attn.v_proj.bias": "qkv_b.v_params",
        "self_attn.o_proj.weight": "attn_out_w.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
    }
    PRESENT_IF = {"qkv_b": "qkv_bias"}


class DenseLayer(Qwen2MoeLayer):
    """A layer with one MLP."""

    mlp_1: GatedMLPParameter
    mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
    }


class SparseLayer(Qwen2MoeLayer):
    """A layer with experts, and one that every token passes."""

    moe_gate: MoEGatingWeightParameter
    moe_mlp_1: UnfusedMoEGatedMLPParameter
    moe_mlp_2: UnfusedMoEMLP2Parameter
    shared_gate: MoEGatingWeightParameter
    shared_mlp_1: GatedMLPParameter
    shared_mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate.weight": "moe_gate.params",
        "mlp.experts.*.gate_proj.weight": "moe_mlp_1.gating_experts",
        "mlp.experts.*.up_proj.weight": "moe_mlp_1.up_experts",
        "mlp.experts.*.down_proj.weight": "moe_mlp_2.experts",
        "mlp.shared_expert_gate.weight": "shared_gate.params",
        "mlp.shared_expert.gate_proj.weight": "shared_mlp_1.gate_params",
        "mlp.shared_expert.up_proj.weight": "shared_mlp_1.up_params",
        "mlp.shared_expert.down_proj.weight": "shared_mlp_2.params",
    }


def build_containers(model: Qwen2MoeModel) -> ContainerMap:
    """Empty containers for `model`, bound to the checkpoint's prefixes; the model keeps them for `forward`."""
    model.layers = [SparseLayer(model) if sparse else DenseLayer(model) for sparse in model.config.sparse]
    model.weights = DecoderWeights(model)
    containers = ContainerMap()
    containers.set_transformer_params("model.layers", model.layers)
    containers.set_non_transformer_params(model.weights)
    containers.set_unmapped_params("model.layers.*.self_attn.rotary_emb.inv_freq")
    return containers
