"""Which tensors a Llama layer is made of, and under which checkpoint names they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.container import ContainerMap, LayerContainer
from hookline.parameters import (
    AttentionOutputParameter,
    DecoderWeights,
    GatedMLPParameter,
    MLP2Parameter,
    NormParameter,
    UnfusedQKVParameter,
)

if TYPE_CHECKING:
    from hookline_llama.model import LlamaModel


class LlamaLayer(LayerContainer):
    """One decoder layer; the biases are there where the config says so."""

    attn_norm: NormParameter
    qkv_w: UnfusedQKVParameter
    qkv_b: UnfusedQKVParameter | None
    attn_out_w: AttentionOutputParameter
    attn_out_b: AttentionOutputParameter | None
    mlp_norm: NormParameter
    mlp_1_w: GatedMLPParameter
    mlp_1_b: GatedMLPParameter | None
    mlp_2_w: MLP2Parameter
    mlp_2_b: MLP2Parameter | None

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.q_proj.weight": "qkv_w.q_params",
        "self_attn.k_proj.weight": "qkv_w.k_params",
        "self_attn.v_proj.weight": "qkv_w.v_params",
        "self_attn.q_proj.bias": "qkv_b.q_params",
        "self_attn.k_proj.bias": "qkv_b.k_params",
        "self_attn.v_proj.bias": "qkv_b.v_params",
        "self_attn.o_proj.weight": "attn_out_w.params",
        "self_attn.o_proj.bias": "attn_out_b.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
        "mlp.gate_proj.weight": "mlp_1_w.gate_params",
        "mlp.up_proj.weight": "mlp_1_w.up_params",
        "mlp.gate_proj.bias": "mlp_1_b.gate_params",
        "mlp.up_proj.bias": "mlp_1_b.up_params",
        "mlp.down_proj.weight": "mlp_2_w.params",
        "mlp.down_proj.bias": "mlp_2_b.params",
    }
    PRESENT_IF = {
        "qkv_b": "attention_bias",
        "attn_out_b": "attention_bias",
        "mlp_1_b": "mlp_bias",
        "mlp_2_b": "mlp_bias",
    }


def build_containers(model: LlamaModel) -> ContainerMap:
    """Empty containers for `model`, bound to the checkpoint's prefixes; the model keeps them for `forward`."""
    model.layers = [LlamaLayer(model) for _ in range(model.config.num_layers)]
    model.weights = DecoderWeights(model)
    containers = ContainerMap()
    containers.set_transformer_params("model.layers", model.layers)
    containers.set_non_transformer_params(model.weights)
    containers.set_unmapped_params("model.layers.*.self_attn.rotary_emb.inv_freq")
    return containers
