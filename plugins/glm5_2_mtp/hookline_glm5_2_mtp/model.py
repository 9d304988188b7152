"""The decoder of GLM-5.2 and DeepSeek-V3.2.

Each layer: h = h + attention(norm(h)); h = h + experts(norm(h)) + shared(norm(h)), or an MLP in place of both. The
addition and the norm that follows it run as one operation, so `hidden` below is what a layer adds and `residual` is the
stream that it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hookline import parallel as sharding
from hookline.config import EngineConfig
from hookline.layers.decoder import last_norm
from hookline.layers.mlp import gated_mlp
from hookline.layers.moe import shared_expert
from hookline.layers.rotary import Rotary
from hookline.model import CacheSpec, ForwardBatch, MoETransformerModel
from hookline.parallel import Parallel
from hookline.parameters import DecoderWeights
from hookline_glm5_2_mtp.attention import LatentAttention
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
from hookline_glm5_2_mtp.container import (
    DenseLayer,
    DraftLayer,
    IndexedDenseLayer,
    IndexedSparseLayer,
    LatentLayer,
    SparseLayer,
)
from hookline_kernels.embedding import embedding
from hookline_kernels.linear import linear
from hookline_kernels.rms_norm import rms_norm

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class GlmMoeDsaModel(MoETransformerModel):
    """The target; `mtp.py` has the model with its draft.

    Attributes:
        has_draft: whether the draft's layer is loaded.
        draft: that layer.
    """

    has_draft = False
    weights: DecoderWeights
    layers: list[LatentLayer]
    draft: DraftLayer | None

    def __init__(self, config: GlmMoeDsaConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        super().__init__(config, engine_config, parallel)
        self.config = config
        self.index_places = config.index_places
        self.rotary = Rotary(config.rope, self.device)
        self.attention = LatentAttention(
            config=config,
            num_heads=self.heads.num_heads,
            latent_group="target_latent",
            index_group="target_index",
        )

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Index keys are kept for layers with an indexer alone."""
        c = self.config
        latent, key = (("latent", (c.latent_width,)),), (("key", (c.index_head_dim,)),)
        return (
            CacheSpec("target_latent", c.num_layers, latent, self.dtype),
            CacheSpec("target_index", sum(c.full_index), key, self.dtype),
        )

    def checkpoint_shapes(self) -> Shapes:
        c = self.config
        yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
        for index in range(c.num_layers):
            for name, shape in self._layer_shapes(c.full_index[index], c.sparse[index]):
                yield f"model.layers.{index}.{name}", shape
        yield "model.norm.weight", (c.hidden_size,)
        if not c.tied_embeddings:
            yield "lm_head.weight", (c.vocab_size, c.hidden_size)

    def _layer_shapes(self, full: bool, sparse: bool) -> Shapes:
        c = self.config
        yield "input_layernorm.weight", (c.hidden_size,)
        yield "self_attn.q_a_proj.weight", (c.q_lora_rank, c.hidden_size)
        yield "self_attn.q_a_layernorm.weight", (c.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (c.num_heads * c.head_dim, c.q_lora_rank)
        yield "self_attn.kv_a_proj_with_mqa.weight", (c.latent_width, c.hidden_size)
        yield "self_attn.kv_a_layernorm.weight", (c.kv_lora_rank,)
        yield "self_attn.kv_b_proj.weight", (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        yield "self_attn.o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim)
        if full:
            yield "self_attn.indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            yield "self_attn.indexer.wk.weight", (c.index_head_dim, c.hidden_size)
            yield "self_attn.indexer.k_norm.weight", (c.index_head_dim,)
            yield "self_attn.indexer.k_norm.bias", (c.index_head_dim,)
            yield "self_attn.indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size)
        yield "post_attention_layernorm.weight", (c.hidden_size,)
        mlps = {"mlp": c.intermediate_size}
        if sparse:
            yield "mlp.gate.weight", (c.n_experts, c.hidden_size)
            yield "mlp.gate.e_score_correction_bias", (c.n_experts,)
            mlps = {f"mlp.experts.{expert}": c.expert_intermediate_size for expert in range(c.n_experts)}
            mlps["mlp.shared_experts"] = c.shared_intermediate_size
        for name, width in mlps.items():
            yield f"{name}.gate_proj.weight", (width, c.hidden_size)
            yield f"{name}.up_proj.weight", (width, c.hidden_size)
            yield f"{name}.down_proj.weight", (c.hidden_size, width)

    def longest_context(self) -> int:
        return self.config.rope.longest_context(self.config.max_position_embeddings)

    def prefix_salt(self, prompt_length: int) -> bytes:
        return self.config.rope.prefix_salt(prompt_length)

    def transform_latent_param(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Matrices [*, M] joined by rows, whole on every rank."""
        return self._matrix(torch.cat(list(params)))

    def transform_query_param(self, param: torch.Tensor, index_param: torch.Tensor | None) -> torch.Tensor:
        """[H * (N + R), Q], this rank's heads, and behind them the indexer's [I * D, Q], whole on every rank."""
        own = self._own_heads(param, self.config.head_dim).flatten(0, 1)
        return self._matrix(own if index_param is None else torch.cat([own, index_param]))

    def transform_latent_key_param(self, param: torch.Tensor) -> torch.Tensor:
        """The key rows of [H * (N + V), L], this rank's heads: [H, N, L]."""
        c = self.config
        return self.place(self._own_heads(param, c.qk_nope_head_dim + c.v_head_dim)[:, : c.qk_nope_head_dim])

    def transform_latent_value_param(self, param: torch.Tensor) -> torch.Tensor:
        """The value rows of [H * (N + V), L], this rank's heads: [H, V, L]."""
        c = self.config
        return self.place(self._own_heads(param, c.qk_nope_head_dim + c.v_head_dim)[:, c.qk_nope_head_dim :])

    def transform_attn_out_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """[M, H * V], the columns of this rank's heads."""
        c = self.config
        cut = sharding.shard_attn_out(param, c.num_heads, c.num_kv_heads, c.v_head_dim, self.parallel)
        return None if cut is None else self._matrix(cut)

    def transform_fp32_param(self, param: torch.Tensor) -> torch.Tensor:
        """In fp32, whole on every rank."""
        return param.to(device=self.device, dtype=torch.float32).contiguous()

    def _own_heads(self, param: torch.Tensor, size: int) -> torch.Tensor:
        """Rows [H * size, ...] of this rank's heads, [own H, size, ...]."""
        return param.view(-1, size, *param.shape[1:]).narrow(0, self.heads.first_head, self.heads.num_heads)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        eps = self.config.norm_eps
        rotary, positions = self.rotary(batch.positions, batch.rope_lengths), None
        residual = embedding(batch.token_ids, self.weights.word_emb, self.dtype)
        hidden = rms_norm(residual, self.layers[0].attn_norm, eps)
        for index, layer in enumerate(self.layers):
            hidden, positions = self.attention(
                layer, hidden, rotary, batch, positions, latent_place=index, index_place=self.index_places[index]
            )
            hidden, residual = rms_norm(hidden, layer.mlp_norm, eps, residual)
            hidden = self.feed_forward(index, layer, hidden, batch)
            if index + 1 < len(self.layers):
                hidden, residual = rms_norm(hidden, self.layers[index + 1].attn_norm, eps, residual)
        return last_norm(hidden, residual, self.weights.final_norm, eps, batch.logits_rows)

    def feed_forward(self, index: int, layer: LatentLayer, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What experts or MLP of layer number `index` make of `hidden` [T, M]."""
        activation = self.config.activation
        if isinstance(layer, DenseLayer | IndexedDenseLayer):
            return gated_mlp(hidden, layer.mlp_1, layer.mlp_2, activation)
        if not isinstance(layer, SparseLayer | IndexedSparseLayer):
            raise TypeError(f"layer {index} is a {type(layer).__name__}, which has neither an MLP nor experts")
        routed = self.moe(index, hidden, layer.moe_gate, layer.moe_mlp_1, layer.moe_mlp_2, batch, layer.moe_bias)
        return routed + shared_expert(hidden, layer.shared_mlp_1, layer.shared_mlp_2, activation)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weights.word_unembed, wide=True)
