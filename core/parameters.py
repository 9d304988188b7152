"""The common parameters that architectures share, each a template that hands the model a canonical layout, and the
container of what nearly every decoder has outside its layers.

QKV rows are all of Q, then K, then V; a gated MLP has its gate rows first and its up rows second, never interleaved;
experts lie along the first dimension. Each template serves weights and, with the last dimension left out, biases.

Shape letters: H query heads, K key-value heads, D head size, M model size, F feed-forward size, E experts,
V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hookline.errors import ContainerError
from hookline.layer_container import LayerContainer
from hookline.parameter_base import Parameter, ParamList, model_fact


class WeightTransforms(Protocol):
    """What the templates ask of a model: shard a canonical tensor, put it into the layer's own layout, on the device.

    None means that this rank holds nothing of it, such as a bias that rank 0 adds.
    """

    def transform_embedding_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_unembed_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_norm_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_qkv_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_attn_out_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_mlp_1_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_mlp_2_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_moe_gate_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_moe_mlp_1_param(self, param: torch.Tensor) -> torch.Tensor | None: ...
    def transform_moe_mlp_2_param(self, param: torch.Tensor) -> torch.Tensor | None: ...


class _Template(Parameter):
    model: WeightTransforms

    def _fact(self, name: str) -> int:
        return int(model_fact(self.model, name, self.label))

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise ContainerError(message, hint="The checkpoint's shapes and its config disagree.")

    def _same(self, **tensors: torch.Tensor) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._check(len(set(shapes.values())) <= 1, f"shapes must be equal, but are {shapes}")

    def _stacked(self, experts: tuple[torch.Tensor, ...], name: str) -> torch.Tensor:
        self._same(**{f"{name}[{i}]": expert for i, expert in enumerate(experts)})
        return torch.stack(experts)


class FusedQKVParameter(_Template):
    """`params`: [(H + 2K) * D, M], rows already all of Q, K, V."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_qkv_param(self.params)


class UnfusedQKVParameter(_Template):
    """`q_params`: [H * D, M]; `k_params`, `v_params`: [K * D, M]."""

    q_params: torch.Tensor
    k_params: torch.Tensor
    v_params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        parts = {"q_params": self.q_params, "k_params": self.k_params, "v_params": self.v_params}
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        self._check(
            len({shape[1:] for shape in shapes.values()}) == 1 and shapes["k_params"] == shapes["v_params"],
            f"k and v must be of one shape, and q may differ in its rows only, but shapes are {shapes}",
        )
        return self.model.transform_qkv_param(torch.cat(list(parts.values())))


class MegatronQKVParameter(_Template):
    """`params`: [H * 3 * D, M], each head's rows of q, k, v in turn (BLOOM, GPT-NeoX)."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        rows, heads = self.params.shape[0], self._fact("num_heads")
        self._check(rows % (3 * heads) == 0, f"{rows} rows do not hold q, k and v of {heads} heads")
        by_head = self.params.reshape(heads, 3, rows // (3 * heads), *self.params.shape[1:])
        return self.model.transform_qkv_param(by_head.transpose(0, 1).reshape(self.params.shape))


class GQAMegatronQKVParameter(_Template):
    """`params`: [K * (H/K + 2) * D, M], each key-value head's query heads, then its k, then its v (Falcon 40B)."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        heads, kv_heads = self._fact("num_heads"), self._fact("num_kv_heads")
        rows, rest = self.params.shape[0], self.params.shape[1:]
        self._check(
            heads % kv_heads == 0 and rows % (heads + 2 * kv_heads) == 0,
            f"{rows} rows do not hold {heads} query heads in {kv_heads} equal groups with a k and a v each",
        )
        grouped = self.params.reshape(kv_heads, heads // kv_heads + 2, rows // (heads + 2 * kv_heads), *rest)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return self.model.transform_qkv_param(torch.cat([part.reshape(-1, *rest) for part in parts]))


class AttentionOutputParameter(_Template):
    """`params`: [M, H * D]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_attn_out_param(self.params)


class MLP1Parameter(_Template):
    """`params`: [F, M]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_mlp_1_param(self.params)


class MLP2Parameter(_Template):
    """`params`: [M, F]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_mlp_2_param(self.params)


class GatedMLPParameter(_Template):
    """`gate_params`, `up_params`: [F, M] each; final rows are [gate; up]."""

    gate_params: torch.Tensor
    up_params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        self._same(gate_params=self.gate_params, up_params=self.up_params)
        return self.model.transform_mlp_1_param(torch.cat([self.gate_params, self.up_params]))


class FusedGatedMLPParameter(_Template):
    """`params`: [2F, M], gate rows first (Phi3)."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        rows = self.params.shape[0]
        self._check(rows % 2 == 0, f"{rows} rows cannot be halved into gate and up")
        return self.model.transform_mlp_1_param(self.params)


class NormParameter(_Template):
    """`params`: [M], or [D] for norms of queries and keys."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_norm_param(self.params)


class EmbeddingParameter(_Template):
    """`params`: [V, M]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_embedding_param(self.params)


class UnembedParameter(_Template):
    """`params`: [V, M]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_unembed_param(self.params)


class InvFreqParameter(_Template):
    """`params`: [D/2], inverse rotary frequencies, kept in fp32 and never sharded."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.params.float()


class MoEGatingWeightParameter(_Template):
    """`params`: [E, M], the router, or [E], the correction bias of its choice."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_moe_gate_param(self.params)


class UnfusedMoEMLP1Parameter(_Template):
    """`experts`: E of [F, M]; final [E, F, M]. None where there are no experts."""

    experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_moe_mlp_1_param(self._stacked(self.experts, "experts")) if self.experts else None


class UnfusedMoEMLP2Parameter(_Template):
    """`experts`: E of [M, F]; final [E, M, F]. None where there are no experts."""

    experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_moe_mlp_2_param(self._stacked(self.experts, "experts")) if self.experts else None


class UnfusedMoEGatedMLPParameter(_Template):
    """`gating_experts`, `up_experts`: E of [F, M] each; final [E, 2F, M]. None where there are no experts."""

    gating_experts = ParamList("n_experts")
    up_experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        if not self.gating_experts:
            return None
        gates, ups = self._stacked(self.gating_experts, "gating_experts"), self._stacked(self.up_experts, "up_experts")
        self._same(gating_experts=gates, up_experts=ups)
        return self.model.transform_moe_mlp_1_param(torch.cat([gates, ups], dim=1))


class FusedMoEGatedMLPParameter(_Template):
    """`params`: [E, 2F, M], each expert's gate rows first."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        rows = self.params.shape[1]
        self._check(rows % 2 == 0, f"{rows} rows of each expert cannot be halved into gate and up")
        return self.model.transform_moe_mlp_1_param(self.params)


class TransposedFusedMoEGatedMLPParameter(_Template):
    """`params`: [E, M, 2F], each expert's gate columns first; final [E, 2F, M]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        columns = self.params.shape[-1]
        self._check(columns % 2 == 0, f"{columns} columns of each expert cannot be halved into gate and up")
        return self.model.transform_moe_mlp_1_param(_expert_rows(self.params))


class FusedMoEMLP2Parameter(_Template):
    """`params`: [E, M, F]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_moe_mlp_2_param(self.params)


class TransposedFusedMoEMLP2Parameter(_Template):
    """`params`: [E, F, M]; final [E, M, F]."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.model.transform_moe_mlp_2_param(_expert_rows(self.params))


def _expert_rows(params: torch.Tensor) -> torch.Tensor:
    """[E, in, out] as [E, out, in]; biases [E, out] as they are."""
    return params.transpose(1, 2).contiguous() if params.dim() == 3 else params


class DecoderWeights(LayerContainer):
    """Embedding, last norm and output head, under the names that most checkpoints have. A tied head is the embedding.

    The model's config says `tied_embeddings`.
    """

    word_emb: EmbeddingParameter
    final_norm: NormParameter
    word_unembed: UnembedParameter

    PARAM_MAPPING = {
        "model.embed_tokens.weight": "word_emb.params",
        "model.norm.weight": "final_norm.params",
        "lm_head.weight": "word_unembed.params",
    }
    TIED = {"word_unembed": "word_emb"}
    PRESENT_IF = {"word_unembed": "not tied_embeddings"}
