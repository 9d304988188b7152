"""Latent attention over positions that a lightning indexer chooses.

    a = x A^T                      latents: of queries, of keys and values, the shared rotary key, the index key
    q[h] = norm(a_q) B[h]^T        nope part and rotary part
    c = norm(a_kv)                 what the cache holds, with the rotated key beside it
    score = scale * (q_nope[h] K[h] . c[s] + rotate(q_rope[h]) . k_rope[s])           s in the row's list, s <= own
    y = O concat_h(V[h] sum_s softmax(score)[s] c[s])

K[h] is taken to the query and V[h] to the sum (the absorbed form), so that all heads read one cache entry a position;
`unabsorbed.py` has the other form, for long prefill chunks without a list.
The list has the `index_topk` positions with the largest sum_i w[i] relu(index_q[i] . index_key[s]); while a request has
no more positions than that, all of them. Layers without an indexer use the list of the nearest one before.

Shape letters: see container.py. Sources: DeepSeek-V2 (latent attention), DeepSeek-V3.2 (indexer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hookline.model import ForwardBatch
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
from hookline_glm5_2_mtp.container import IndexedLayer, LatentLayer
from hookline_glm5_2_mtp.unabsorbed import prefers_unabsorbed, unabsorbed_attention
from hookline_kernels.indexer import index_topk
from hookline_kernels.latent_attention import latent_attention
from hookline_kernels.latent_inputs import IndexKeys, turn_queries, write_entries
from hookline_kernels.linear import linear

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
        c, index, makes_list = self.config, None, False
        cache = batch.cache[self.latent_group][latent_place]["latent"]
        if index_place is not None and isinstance(layer, IndexedLayer):
            keys = batch.cache[self.index_group][index_place]["key"]
            index = IndexKeys(layer.index_norm_w, layer.index_norm_b, keys, c.indexer_rope_interleave)
            makes_list, positions = self.needs_list or batch.max_context_len > c.index_topk, None
        latents = linear(x, self._rows(layer.latent_w, c.q_lora_rank + c.latent_width, index is not None))
        norms = layer.q_norm, layer.kv_norm, c.latent_norm_eps
        q_latent = write_entries(latents, *norms, *rotary, cache, batch.slots, c.rope_interleave, index)
        width = self.num_heads * c.head_dim
        queries = linear(q_latent, self._rows(layer.query_w, width, index is not None))
        q = queries[:, :width].view(len(x), self.num_heads, c.head_dim)
        # The rotary part of an indexer's head is in front, where attention has it behind.
        index_q = queries[:, width:].view(len(x), c.index_n_heads, c.index_head_dim) if makes_list else None
        listed = makes_list or positions is not None
        whole = listed or not prefers_unabsorbed(c, self.num_heads, batch, cache.shape[1])
        query = q.new_empty((len(x) if whole else batch.num_decodes, self.num_heads, c.latent_width))
        rope, into = q[..., c.qk_nope_head_dim :], query[..., c.kv_lora_rank :]
        turn_queries(rope, into, index_q, *rotary, c.rope_interleave, c.indexer_rope_interleave)
        if index is not None and index_q is not None and isinstance(layer, IndexedLayer):
            positions = self._select(layer, x, index_q, index.cache, batch)
        values = self._attend(layer, q, query, cache, batch, positions)
        return linear(values.flatten(1), layer.attn_out_w), positions

    def _rows(self, weight: torch.Tensor, count: int, whole: bool) -> torch.Tensor:
        """The weight, or its first rows where the indexer's, which come last, are not wanted."""
        return weight if whole else weight[:count]

    def _attend(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        query: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """What queries [T, H, N + R] attend to, [T, H, V].

        Args:
            query: [A, H, L + R], where the first A tokens, all or the decodes, are taken to the absorbed form; it has
                their rotary part. The others, in chunks, are attended to without that form.
        """
        ones = len(query)
        if ones == len(q):
            return self._attend_absorbed(layer, q, query, cache, batch, positions)
        chunks = unabsorbed_attention(self.config, q, layer.key_w, layer.value_w, cache, batch)
        if ones == 0:
            return chunks
        decodes = replace(
            batch,
            block_tables=batch.block_tables[:ones],
            query_starts=batch.query_starts[: ones + 1],
            context_lens=batch.context_lens[:ones],
            max_query_len=1,
        )
        return torch.cat((self._attend_absorbed(layer, q[:ones], query, cache, decodes, None), chunks))

    def _attend_absorbed(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        query: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        c = self.config
        nope, latent = q[..., : c.qk_nope_head_dim], query[..., : c.kv_lora_rank]
        torch.bmm(nope.transpose(0, 1), layer.key_w, out=latent.transpose(0, 1))
        sums = latent_attention(
            query,
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
        values = q.new_empty((*q.shape[:2], c.v_head_dim))
        torch.bmm(sums.transpose(0, 1), layer.value_w.transpose(1, 2), out=values.transpose(0, 1))
        return values

    def _select(
        self, layer: IndexedLayer, x: torch.Tensor, index_q: torch.Tensor, keys: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """The list [T, K] of what each token attends to, by its turned index queries [T, I, D]."""
        # As they come: a scale of all weights, which the models have here, does not change which scores are largest.
        weights = linear(x, layer.index_weights_w, wide=True)
        return index_topk(
            index_q,
            weights,
            keys,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            self.config.index_topk,
            max_query_len=batch.max_query_len,
            max_context_len=batch.max_context_len,
        )
