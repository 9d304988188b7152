"""The Qwen2-MoE decoder.

Each layer: h = h + attention(norm(h)); h = h + experts(norm(h)) + sigmoid(g norm(h)) * shared(norm(h)), or an MLP in
place of both. The addition and the norm that follows it run as one operation, so `hidden` below is what a layer adds
and `residual` is the stream that it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hookline.config import EngineConfig
from hookline.layers.attention import Attention
from hookline.layers.decoder import last_norm
from hookline.layers.mlp import gated_mlp
from hookline.layers.moe import shared_expert
from hookline.layers.rotary import Rotary
from hookline.model import CacheSpec, ForwardBatch, MoETransformerModel
from hookline.parallel import Parallel
from hookline.parameters import DecoderWeights
from hookline_kernels.embedding import embedding
from hookline_kernels.linear import linear
from hookline_kernels.rms_norm import rms_norm
from hookline_qwen2_moe.config import Qwen2MoeConfig
from hookline_qwen2_moe.container import DenseLayer, Qwen2MoeLayer, SparseLayer


class Qwen2MoeModel(MoETransformerModel):
    """Layers with experts and layers without, with a window and without."""

    weights: DecoderWeights
    layers: list[SparseLayer | DenseLayer]

    def __init__(self, config: Qwen2MoeConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        super().__init__(config, engine_config, parallel)
        self.config = config
        self.rotary = Rotary(config.rope, self.device)
        self.attentions = [Attention(scale=config.head_dim**-0.5, window=window) for window in config.windows]

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        entry = (self.heads.num_kv_heads, self.config.head_dim)
        return (CacheSpec("kv", self.config.num_layers, (("k", entry), ("v", entry)), self.dtype),)

    def checkpoint_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self.config
        yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
        for index in range(c.num_layers):
            for name, shape in self._layer_shapes(c.sparse[index]):
                yield f"model.layers.{index}.{name}", shape
        yield "model.norm.weight", (c.hidden_size,)
        if not c.tied_embeddings:
            yield "lm_head.weight", (c.vocab_size, c.hidden_size)

    def _layer_shapes(self, sparse: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"self_attn.{name}.weight", (rows, c.hidden_size)
            if c.qkv_bias:
                yield f"self_attn.{name}.bias", (rows,)
        yield "self_attn.o_proj.weight", (c.hidden_size, q)
        yield "input_layernorm.weight", (c.hidden_size,)
        yield "post_attention_layernorm.weight", (c.hidden_size,)
        mlps = {"mlp": c.intermediate_size}
        if sparse:
            yield "mlp.gate.weight", (c.n_experts, c.hidden_size)
            yield "mlp.shared_expert_gate.weight", (1, c.hidden_size)
            mlps = {f"mlp.experts.{expert}": c.expert_intermediate_size for expert in range(c.n_experts)}
            mlps["mlp.shared_expert"] = c.shared_intermediate_size
        for name, width in mlps.items():
            yield f"{name}.gate_proj.weight", (width, c.hidden_size)
            yield f"{name}.up_proj.weight", (width, c.hidden_size)
            yield f"{name}.down_proj.weight", (c.hidden_size, width)

    def longest_context(self) -> int:
        return self.config.rope.longest_context(self.config.max_position_embeddings)

    def prefix_salt(self, prompt_length: int) -> bytes:
        return self.config.rope.prefix_salt(prompt_length)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        eps = self.config.norm_eps
        rotary = self.rotary(batch.positions, batch.rope_lengths)
        residual = embedding(batch.token_ids, self.weights.word_emb, self.dtype)
        hidden = rms_norm(residual, self.layers[0].attn_norm, eps)
        for index, layer in enumerate(self.layers):
            hidden = self._attend(index, layer, hidden, rotary, batch)
            hidden, residual = rms_norm(hidden, layer.mlp_norm, eps, residual)
            hidden = self._feed_forward(index, layer, hidden, batch)
            if index + 1 < len(self.layers):
                hidden, residual = rms_norm(hidden, self.layers[index + 1].attn_norm, eps, residual)
        return last_norm(hidden, residual, self.weights.final_norm, eps, batch.logits_rows)

    def _attend(
        self,
        index: int,
        layer: Qwen2MoeLayer,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        qkv = linear(hidden, layer.qkv_w, layer.qkv_b).view(len(hidden), -1, self.config.head_dim)
        return linear(self.attentions[index].with_rotary(index, qkv, rotary, batch), layer.attn_out_w)

    def _feed_forward(
        self, index: int, layer: SparseLayer | DenseLayer, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        activation = self.config.activation
        if isinstance(layer, DenseLayer):
            return gated_mlp(hidden, layer.mlp_1, layer.mlp_2, activation)
        routed = self.moe(index, hidden, layer.moe_gate, layer.moe_mlp_1, layer.moe_mlp_2, batch)
        return routed + shared_expert(hidden, layer.shared_mlp_1, layer.shared_mlp_2, activation, layer.shared_gate)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weights.word_unembed, wide=True)
