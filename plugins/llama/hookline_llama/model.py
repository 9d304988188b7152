"""The Llama decoder.

Each layer: h = h + attention(norm(h)); h = h + mlp(norm(h)). The addition and the norm that follows it run as one
operation, so `hidden` below is what a layer adds and `residual` is the stream that it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hookline.config import EngineConfig
from hookline.layers.attention import Attention
from hookline.layers.decoder import last_norm
from hookline.layers.mlp import gated_mlp
from hookline.layers.rotary import Rotary
from hookline.model import CacheSpec, ForwardBatch, TransformerModel
from hookline.parallel import Parallel
from hookline.parameters import DecoderWeights
from hookline_kernels.embedding import embedding
from hookline_kernels.linear import linear
from hookline_kernels.rms_norm import rms_norm
from hookline_llama.config import LlamaConfig
from hookline_llama.container import LlamaLayer


class LlamaModel(TransformerModel):
    """Llama, and Mistral with its window."""

    weights: DecoderWeights
    layers: list[LlamaLayer]

    def __init__(self, config: LlamaConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        super().__init__(config, engine_config, parallel)
        self.config = config
        self.rotary = Rotary(config.rope, self.device)
        self.attention = Attention(scale=config.head_dim**-0.5, window=config.window)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        entry = (self.heads.num_kv_heads, self.config.head_dim)
        return (CacheSpec("kv", self.config.num_layers, (("k", entry), ("v", entry)), self.dtype),)

    def checkpoint_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = {"q_proj": (q, c.hidden_size), "k_proj": (kv, c.hidden_size), "v_proj": (kv, c.hidden_size)}
        attention["o_proj"] = (c.hidden_size, q)
        up = (c.intermediate_size, c.hidden_size)
        mlp = {"gate_proj": up, "up_proj": up, "down_proj": (c.hidden_size, c.intermediate_size)}
        yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
        for index in range(c.num_layers):
            layer = f"model.layers.{index}"
            for block, matrices, bias in (("self_attn", attention, c.attention_bias), ("mlp", mlp, c.mlp_bias)):
                for name, shape in matrices.items():
                    yield f"{layer}.{block}.{name}.weight", shape
                    if bias:
                        yield f"{layer}.{block}.{name}.bias", shape[:1]
            yield f"{layer}.input_layernorm.weight", (c.hidden_size,)
            yield f"{layer}.post_attention_layernorm.weight", (c.hidden_size,)
        yield "model.norm.weight", (c.hidden_size,)
        if not c.tied_embeddings:
            yield "lm_head.weight", (c.vocab_size, c.hidden_size)

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
            hidden = gated_mlp(
                hidden, layer.mlp_1_w, layer.mlp_2_w, self.config.activation, layer.mlp_1_b, layer.mlp_2_b
            )
            if index + 1 < len(self.layers):
                hidden, residual = rms_norm(hidden, self.layers[index + 1].attn_norm, eps, residual)
        return last_norm(hidden, residual, self.weights.final_norm, eps, batch.logits_rows)

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        qkv = linear(hidden, layer.qkv_w, layer.qkv_b).view(len(hidden), -1, self.config.head_dim)
        return linear(self.attention.with_rotary(index, qkv, rotary, batch), layer.attn_out_w, layer.attn_out_b)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weights.word_unembed, wide=True)
