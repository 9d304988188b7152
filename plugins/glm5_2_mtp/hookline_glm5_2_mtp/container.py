"""Which tensors a GLM-5.2 layer is made of, and under which checkpoint names they come.

Layers come in four kinds: with an indexer of their own or without, with experts or with one MLP. The draft is one layer
more, with both. Shape letters as in core/parameters.py, with L the latent of keys and values, Q that of queries, R the
rotary part of a head, N the other part, and V the size of a value's head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hookline.container import ContainerMap, LayerContainer, Parameter
from hookline.parameters import (
    AttentionOutputParameter,
    DecoderWeights,
    GatedMLPParameter,
    MLP2Parameter,
    MoEGatingWeightParameter,
    NormParameter,
    UnfusedMoEGatedMLPParameter,
    UnfusedMoEMLP2Parameter,
)

if TYPE_CHECKING:
    from hookline_glm5_2_mtp.model import GlmMoeDsaModel


class LatentParameter(Parameter):
    """`q_params` [Q, M] and `kv_params` [L + R, M]: all latents of a token, in one product."""

    model: GlmMoeDsaModel
    q_params: torch.Tensor
    kv_params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_latent_param([self.q_params, self.kv_params])


class IndexedLatentParameter(LatentParameter):
    """The same, and behind it the index key of the token, `index_params` [D, M]."""

    index_params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_latent_param([self.q_params, self.kv_params, self.index_params])


class QueryParameter(Parameter):
    """`params` [H * (N + R), Q]: queries from their latent."""

    model: GlmMoeDsaModel
    params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_query_param(self.params, None)


class IndexedQueryParameter(QueryParameter):
    """The same, and behind it the indexer's queries, `index_params` [I * D, Q]."""

    index_params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_query_param(self.params, self.index_params)


class KeyParameter(Parameter):
    """`params` [H * (N + V), L], of which the key rows [H, N, L] are kept."""

    model: GlmMoeDsaModel
    params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_latent_key_param(self.params)


class ValueParameter(Parameter):
    """`params` [H * (N + V), L], of which the value rows [H, V, L] are kept."""

    model: GlmMoeDsaModel
    params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_latent_value_param(self.params)


class IndexWeightParameter(MoEGatingWeightParameter):
    """`params` [I, M]: the weight of each indexer head. Its product is in fp32, as a router's is."""


class JoinParameter(Parameter):
    """`params` [M, 2M]: from a draft's embedding and hidden state, the embedding first, to its layer's input."""

    model: GlmMoeDsaModel
    params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_latent_param([self.params])


class IndexNormParameter(Parameter):
    """`params` [D], weight or bias of the norm of index keys, which is computed in fp32."""

    model: GlmMoeDsaModel
    params: torch.Tensor

    def finalize(self) -> torch.Tensor:
        return self.model.transform_fp32_param(self.params)


class LatentLayer(LayerContainer):
    """What all layers have."""

    attn_norm: NormParameter
    latent_w: LatentParameter
    q_norm: NormParameter
    kv_norm: NormParameter
    query_w: QueryParameter
    key_w: KeyParameter
    value_w: ValueParameter
    attn_out_w: AttentionOutputParameter
    mlp_norm: NormParameter

    PARAM_MAPPING = {
        "input_layernorm.weight": "attn_norm.params",
        "self_attn.q_a_proj.weight": "latent_w.q_params",
        "self_attn.kv_a_proj_with_mqa.weight": "latent_w.kv_params",
        "self_attn.q_a_layernorm.weight": "q_norm.params",
        "self_attn.kv_a_layernorm.weight": "kv_norm.params",
        "self_attn.q_b_proj.weight": "query_w.params",
        "self_attn.kv_b_proj.weight": ["key_w.params", "value_w.params"],
        "self_attn.o_proj.weight": "attn_out_w.params",
        "post_attention_layernorm.weight": "mlp_norm.params",
    }


class IndexedLayer(LatentLayer):
    """A layer with an indexer."""

    latent_w: IndexedLatentParameter
    query_w: IndexedQueryParameter
    index_norm_w: IndexNormParameter
    index_norm_b: IndexNormParameter
    index_weights_w: IndexWeightParameter

    PARAM_MAPPING = {
        "self_attn.q_a_proj.weight": "latent_w.q_params",
        "self_attn.kv_a_proj_with_mqa.weight": "latent_w.kv_params",
        "self_attn.indexer.wk.weight": "latent_w.index_params",
        "self_attn.q_b_proj.weight": "query_w.params",
        "self_attn.indexer.wq_b.weight": "query_w.index_params",
        "self_attn.indexer.k_norm.weight": "index_norm_w.params",
        "self_attn.indexer.k_norm.bias": "index_norm_b.params",
        "self_attn.indexer.weights_proj.weight": "index_weights_w.params",
    }


class _Dense(LayerContainer):
    mlp_1: GatedMLPParameter
    mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate_proj.weight": "mlp_1.gate_params",
        "mlp.up_proj.weight": "mlp_1.up_params",
        "mlp.down_proj.weight": "mlp_2.params",
    }


class _Sparse(LayerContainer):
    moe_gate: MoEGatingWeightParameter
    moe_bias: MoEGatingWeightParameter
    moe_mlp_1: UnfusedMoEGatedMLPParameter
    moe_mlp_2: UnfusedMoEMLP2Parameter
    shared_mlp_1: GatedMLPParameter
    shared_mlp_2: MLP2Parameter

    PARAM_MAPPING = {
        "mlp.gate.weight": "moe_gate.params",
        "mlp.gate.e_score_correction_bias": "moe_bias.params",
        "mlp.experts.*.gate_proj.weight": "moe_mlp_1.gating_experts",
        "mlp.experts.*.up_proj.weight": "moe_mlp_1.up_experts",
        "mlp.experts.*.down_proj.weight": "moe_mlp_2.experts",
        "mlp.shared_experts.gate_proj.weight": "shared_mlp_1.gate_params",
        "mlp.shared_experts.up_proj.weight": "shared_mlp_1.up_params",
        "mlp.shared_experts.down_proj.weight": "shared_mlp_2.params",
    }


class DenseLayer(LatentLayer, _Dense):
    """One MLP, no indexer."""


class SparseLayer(LatentLayer, _Sparse):
    """Experts, no indexer."""


class IndexedDenseLayer(IndexedLayer, _Dense):
    """One MLP and an indexer."""


class IndexedSparseLayer(IndexedLayer, _Sparse):
    """Experts and an indexer."""


class DraftLayer(IndexedSparseLayer):
    """The layer that proposes tokens: a decoder layer on the joined embedding and hidden state.

    A checkpoint without `shared_head.norm` has the target's last norm there; the parameter is None then.
    """

    embedding_norm: NormParameter
    hidden_norm: NormParameter
    join_w: JoinParameter
    final_norm: NormParameter | None

    PARAM_MAPPING = {
        "enorm.weight": "embedding_norm.params",
        "hnorm.weight": "hidden_norm.params",
        "eh_proj.weight": "join_w.params",
        "shared_head.norm.weight": "final_norm.params",
    }


# By whether a layer has an indexer, and whether it has experts.
LAYERS: dict[tuple[bool, bool], type[LatentLayer]] = {
    (False, False): DenseLayer,
    (False, True): SparseLayer,
    (True, False): IndexedDenseLayer,
    (True, True): IndexedSparseLayer,
}


def build_containers(model: GlmMoeDsaModel) -> ContainerMap:
    """Empty containers for `model`, bound to the checkpoint's prefixes; the model keeps them for `forward`.

    The draft's layer has the number behind the last one. Without speculation it is left out, with all its tensors.
    """
    config = model.config
    kinds = zip(config.full_index, config.sparse, strict=True)
    model.layers = [LAYERS[kind](model) for kind in kinds]
    model.weights = DecoderWeights(model)
    model.draft = DraftLayer(model) if model.has_draft else None
    containers = ContainerMap()
    containers.set_transformer_params("model.layers", [*model.layers, *([model.draft] if model.draft else [])])
    containers.set_non_transformer_params(model.weights)
    left_out = range(config.num_layers + model.has_draft, config.num_layers + config.num_mtp_layers)
    containers.set_unmapped_params(
        ["model.layers.*.self_attn.rotary_emb.inv_freq", *(f"model.layers.{layer}" for layer in left_out)]
    )
    return containers
