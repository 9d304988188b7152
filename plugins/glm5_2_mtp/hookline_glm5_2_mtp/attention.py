"""Latent attention over positions that a lightning indexer chooses.

    a = x A^T                      latents: of queries, of keys and values, the shared rotary key, the index key
    q[h] = norm(a_q) B[h]^T        nope part and rotary part
    c = norm(a_kv)                 what the cache holds, with the rotated key beside it
    score = scale * (q_nope[h] K[h] . c[s] + rotate(q_rope[h]) . k_rope[s])           s in the row's list, s <= own
    y = O concat_h(V[h] sum_s softmax(score)[s] c[s])

K[h] is taken to the query and V[h] to the sum (the absorbed form), so that all heads read one cache entry a position.
The list has the `index_topk` positions with the largest sum_i w[i] relu(index_q[i] . index_key[s]); while a request has
no more positions than that, all of them. Layers without an indexer use the list of the nearest one before.

Shape letters: see container.py. Sources: DeepSeek-V2 (latent attention), DeepSeek-V3.2 (indexer).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hookline.model import ForwardBatch
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
from hookline_glm5_2_mtp.container import IndexedLayer, LatentLayer
from hookline_kernels.cache_write import cache_write
from hookline_kernels.indexer import index_topk
from hookline_kernels.latent_attention import latent_attention
from hookline_kernels.linear import linear
from hookline_kernels.rms_norm import rms_norm
from hookline_kernels.rotary import apply_rotary

RotaryAngles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention of the target's layers, or of the draft's.

    Attributes:
        num_heads: of this rank.
        latent_group, index_group: cache groups with the entries `latent` [blocks, S, L + R] and `key` [blocks, S, D].
        needs_list: whether a list is made where no request has more positions than it holds; attention itself needs
            none there. A draft does, whose later steps attend to what the first saw.
    """

    config: GlmMoeDsaConfig
    num_heads: int
    latent_group: str
    index_group: str
    needs_list: bool = False

    def __call__(
        self,
        layer: LatentLayer,
        x: torch.Tensor,
        rotary: RotaryAngles,
        batch: ForwardBatch,
        positions: torch.Tensor | None,
        *,
        latent_place: int,
        index_place: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What attention adds to `x` [T, M], [T, M], and the list that it used. Fills the caches for every token.

        Args:
            x: after the layer's norm.
            rotary: cos and sin, each [T, R/2].
            positions: [T, K] int32, the list of an earlier layer or step; None sees all positions up to each token's
                own. A layer whose indexer runs makes its own.
            latent_place, index_place: the layer's number in each cache group; without the latter no indexer runs and
                no index key is written.
        """
        c, dtype = self.config, x.dtype
        runs_indexer = index_place is not None
        latents = linear(x, self._rows(layer.latent_w, c.q_lora_rank + c.latent_width, runs_indexer))
        q_latent, kv_latent, rope_key, index_key = latents.split_with_sizes(
            (c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, c.index_head_dim * runs_indexer), dim=1
        )
        q_latent = rms_norm(q_latent, layer.q_norm, c.latent_norm_eps)
        width = self.num_heads * c.head_dim
        queries = linear(q_latent, self._rows(layer.query_w, width, runs_indexer))
        q = queries[:, :width].view(len(x), self.num_heads, c.head_dim)
        apply_rotary(q[..., c.qk_nope_head_dim :], rope_key.unsqueeze(1), *rotary, interleaved=c.rope_interleave)
        entry = torch.cat((rms_norm(kv_latent, layer.kv_norm, c.latent_norm_eps), rope_key), dim=1)
        cache = batch.cache[self.latent_group][latent_place]["latent"]
        cache_write((entry,), (cache,), batch.slots)
        if index_place is not None and isinstance(layer, IndexedLayer):
            index_q = queries[:, width:].view(len(x), c.index_n_heads, c.index_head_dim)
            key = F.layer_norm(
                index_key.float(), (c.index_head_dim,), layer.index_norm_w, layer.index_norm_b, c.latent_norm_eps
            )
            positions = self._select(layer, x, index_q, key.to(dtype), rotary, batch, index_place)
        sums = latent_attention(
            self._absorbed(q, layer.key_w),
            cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            c.softmax_scale,
            c.kv_lora_rank,
            positions=positions,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
        values = x.new_empty((len(x), self.num_heads, c.v_head_dim))
        torch.bmm(sums.transpose(0, 1), layer.value_w.transpose(1, 2), out=values.transpose(0, 1))
        return linear(values.flatten(1), layer.attn_out_w), positions

    def _rows(self, weight: torch.Tensor, count: int, whole: bool) -> torch.Tensor:
        """The weight, or its first rows where the indexer's, which come last, are not wanted."""
        return weight if whole else weight[:count]

    def _absorbed(self, q: torch.Tensor, key_w: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, N + R] as they meet cache entries, [T, H, L + R]."""
        c = self.config
        query = q.new_empty((*q.shape[:2], c.latent_width))
        nope, rope = q.split_with_sizes((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=2)
        torch.bmm(nope.transpose(0, 1), key_w, out=query[..., : c.kv_lora_rank].transpose(0, 1))
        query[..., c.kv_lora_rank :] = rope
        return query

    def _select(
        self,
        layer: IndexedLayer,
        x: torch.Tensor,
        index_q: torch.Tensor,
        index_key: torch.Tensor,
        rotary: RotaryAngles,
        batch: ForwardBatch,
        place: int,
    ) -> torch.Tensor | None:
        """Writes the index keys [T, D], and makes the list [T, K] of what each token attends to."""
        c = self.config
        # The rotary part of an indexer's head is in front, where attention has it behind.
        apply_rotary(index_q, index_key.unsqueeze(1), *rotary, interleaved=c.indexer_rope_interleave)
        cache = batch.cache[self.index_group][place]["key"]
        cache_write((index_key,), (cache,), batch.slots)
        if batch.max_context_len <= c.index_topk and not self.needs_list:
            return None
        weights = linear(x, layer.index_weights_w, wide=True).mul_((c.index_n_heads * c.index_head_dim) ** -0.5)
        return index_topk(
            index_q,
            weights,
            cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            c.index_topk,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
