"""Causal attention over the paged cache, for a batch of decodes and prefill chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hookline.model import ForwardBatch
from hookline_kernels.attention_decode import attention_decode
from hookline_kernels.attention_prefill import attention_prefill
from hookline_kernels.cache_write import cache_write
from hookline_kernels.rotary_cache import rotary_cache_write


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention of one kind of layer.

    Attributes:
        scale: on the scores, before the soft cap and the softmax.
        window: a token sees itself and the window - 1 tokens before; None sees all.
        soft_cap: scores become cap * tanh(score / cap); None leaves them.
        group: the cache group that holds `k` and `v` [blocks, S, K, D] of these layers.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    group: str = "kv"

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Writes `k` and `v` [T, K, D] to the cache of `layer`, and attends with `q` [T, H, D]: [T, H * D]."""
        cache = batch.cache[self.group][layer]
        cache_write((k, v), (cache["k"], cache["v"]), batch.slots)
        return self._attend(q, cache, batch)

    def with_rotary(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Attention from a fused projection `qkv` [T, H + 2K, D]: turns queries and keys, writes the cache, attends.

        Answers as a call does, [T, H * D], and changes `qkv`. One kernel turns and writes, where `apply_rotary` and a
        call take two or three; for models that do nothing to queries and keys between projection and rotary embedding.

        Args:
            rotary: cos and sin [T, R/2] fp32.
            interleaved: whether a pair is two neighbours instead of one element of each half.
        """
        cache = batch.cache[self.group][layer]
        num_heads = qkv.shape[1] - 2 * cache["k"].shape[2]
        q = rotary_cache_write(qkv, *rotary, cache["k"], cache["v"], batch.slots, num_heads, interleaved)
        return self._attend(q, cache, batch)

    def _attend(self, q: torch.Tensor, cache: Mapping[str, torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        split = batch.num_decodes
        if split:
            attention_decode(
                q[:split],
                cache["k"],
                cache["v"],
                batch.block_tables[:split],
                batch.context_lens[:split],
                self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                max_context_len=batch.max_context_len,
                out=out[:split],
            )
        if split < batch.num_requests:
            attention_prefill(
                q[split:],
                cache["k"],
                cache["v"],
                batch.block_tables[split:],
                batch.query_starts[split:] - split,
                batch.context_lens[split:],
                self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                max_query_len=batch.max_query_len,
                max_context_len=batch.max_context_len,
                out=out[split:],
            )
        return out.flatten(1)
