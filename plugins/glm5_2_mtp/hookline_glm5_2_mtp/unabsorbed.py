"""The unabsorbed form of latent attention, for prefill chunks that attend to all positions up to their own.

    k[s, h] = [K[h] c[s], k_rope[s]]      v[s, h] = V[h] c[s]
    out[t, h] = sum_s softmax(scale q[t, h] . k[s, h])[s] v[s, h]       s <= p(t)

Each head has keys and values of its own here, made once from every latent of the context. A pair of query and key then
costs 2 (N + R) multiply-adds a head, in place of 2 L + R; at GLM-5.2's sizes 512 in place of 1088. Against that every
position of the context is expanded, where the absorbed form takes K and V to the rows alone, at the same price each.

Shape letters: see container.py. Source: DeepSeek-V2.
"""

from __future__ import annotations

import torch

from hookline.model import ForwardBatch
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
from hookline_kernels.attention_prefill import attention_prefill

# Rows of the longest chunk from which the form is thought of: fewer leave the tiles of its products and of its
# attention half empty, and would not pay for the launches that expand.
LEAST_ROWS = 128


def multiply_adds(c: GlmMoeDsaConfig, rows: int, requests: int, context: int) -> tuple[int, int]:
    """Multiply-adds of a head in the absorbed and in the unabsorbed form.

    Args:
        rows: of all chunks; of each one as many as of the others, as far as the host knows.
        context: positions that are expanded of each request.
    """
    pairs = rows * context - rows * (rows // requests - 1) // 2
    each = (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    absorbed = rows * each + pairs * (c.latent_width + c.kv_lora_rank)
    return absorbed, requests * context * each + pairs * 2 * c.head_dim


def most_held(c: GlmMoeDsaConfig, heads: int, rows: int, requests: int, context: int) -> tuple[int, int]:
    """Numbers that attention holds at a time beside the queries, in the absorbed and in the unabsorbed form."""
    expanded = requests * context
    absorbed = rows * heads * (c.latent_width + c.kv_lora_rank + c.v_head_dim)
    # The latents are gone before there is a result.
    return absorbed, expanded * heads * 2 * c.head_dim + max(expanded * c.latent_width, rows * heads * c.head_dim)


def prefers_unabsorbed(c: GlmMoeDsaConfig, heads: int, batch: ForwardBatch, block_size: int) -> bool:
    """Whether the chunks of `batch`, all but its decodes, are better attended to in this form.

    It must take fewer multiply-adds, and no more memory than the absorbed form takes for as many rows: so a step at its
    largest is what it is without this form. Contexts much longer than the chunks fail by both. What is decided on is
    known on the host, and a step that is captured, of few rows a request, never takes it.
    """
    if batch.max_query_len < LEAST_ROWS or c.v_head_dim > c.head_dim:
        return False
    rows, requests = len(batch.token_ids) - batch.num_decodes, batch.num_requests - batch.num_decodes
    context = -(-batch.max_context_len // block_size) * block_size
    absorbed, unabsorbed = multiply_adds(c, rows, requests, context)
    held, would_hold = most_held(c, heads, rows, requests, context)
    return unabsorbed < absorbed and would_hold <= held


def unabsorbed_attention(
    c: GlmMoeDsaConfig,
    q: torch.Tensor,
    key_w: torch.Tensor,
    value_w: torch.Tensor,
    cache: torch.Tensor,
    batch: ForwardBatch,
) -> torch.Tensor:
    """Attention of the chunks of `batch`, all but its decodes: [T - decodes, H, V].

    The latents of the requests' contexts are read from the cache and expanded to a cache of keys and one of values,
    both [requests * blocks, S, H, N + R], where each request's blocks follow each other.

    Args:
        q: [T, H, N + R] of the whole batch, rotated.
        key_w, value_w: [H, N, L] and [H, V, L].
        cache: contiguous [blocks, S, L + R], this step's entries included.
    """
    first, block_size = batch.num_decodes, cache.shape[1]
    tables = batch.block_tables[first:, : -(-batch.max_context_len // block_size)]
    keys, values = _keys_and_values(c, cache.index_select(0, tables.flatten()), key_w, value_w)
    own = torch.arange(tables.numel(), dtype=torch.int32, device=q.device)
    out = attention_prefill(
        q[first:],
        keys,
        values,
        own.view_as(tables),
        batch.query_starts[first:] - first,
        batch.context_lens[first:],
        c.softmax_scale,
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
    )
    return out[..., : c.v_head_dim]


def _keys_and_values(
    c: GlmMoeDsaConfig, entries: torch.Tensor, key_w: torch.Tensor, value_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of entries [blocks, S, L + R], each [blocks, S, H, N + R]: attention has one size for both."""
    latents, rope = entries.split_with_sizes((c.kv_lora_rank, c.qk_rope_head_dim), dim=2)
    keys = entries.new_empty((*entries.shape[:2], len(key_w), c.head_dim))
    values = torch.empty_like(keys)
    _expand(latents, key_w, keys)
    keys[..., c.qk_nope_head_dim :] = rope.unsqueeze(2)
    _expand(latents, value_w, values)
    values[..., c.v_head_dim :] = 0.0
    return keys, values


def _expand(latents: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Latents [blocks, S, L] times each head's weight [H, W, L], into `out` [blocks, S, H, W or more]."""
    heads, width, _ = weight.shape
    into = out.flatten(0, 1)[..., :width].transpose(0, 1)
    torch.bmm(latents.flatten(0, 1).expand(heads, -1, -1), weight.transpose(1, 2), out=into)
