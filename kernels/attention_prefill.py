"""Paged prefill attention: the new tokens of each request against its cached prefix and themselves.

    s[i, j] = scale * q[i] . k[j]               (with a soft cap c: s <- c tanh(s / c))
    out[i] = sum_j softmax(s[i])[j] v[j]        over positions j <= p(i), and with a window p(i) - j < window

Row i of a request with n rows and a context of c tokens stands at position p(i) = c - n + i: the rows are the end of
the context, whose keys and values are already in the cache.

Shapes: q, out [T, H, D]; k_cache, v_cache [blocks, S, K, D]; block_tables [B, N] int32; query_starts [B + 1] int32;
context_lens [B] int32. Query head h reads key-value head h // G with G = H / K. Softmax is fp32. Cache entries outside
of a request's context never matter, whatever they hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hookline_kernels.attention_prefill_triton import attention_prefill_triton
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not
from hookline_kernels.paged_context import PagedAttention, check_attention, check_values, read_context

# Rows of a request that the CPU attends with at a time: few enough to skip most of what causality and window hide, many
# enough for its matrix products.
CPU_ROWS = 256


def attention_prefill_reference(call: PagedAttention, query_starts: torch.Tensor, max_query_len: int) -> None:
    """The formula in plain torch, a request at a time, in fp32."""
    if call.q.is_cpu:
        check_values("attention_prefill", call, query_starts)
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, _, out, _ = call
    block_size, kv_heads = k_cache.shape[1:3]
    starts = query_starts.tolist()
    for request, context in enumerate(context_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        key_positions = torch.arange(context, device=q.device)
        slots = block_tables[request].long()[key_positions // block_size] * block_size + key_positions % block_size
        keys, values = (cache.flatten(0, 1)[slots].float() for cache in (k_cache, v_cache))
        queries = q[rows].float().reshape(-1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
        distance = key_positions[context - queries.shape[0] :, None] - key_positions
        scores = torch.einsum("tkgd,lkd->kgtl", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("kgtl,lkd->tkgd", weights, values).flatten(1, 2)


def attention_prefill_torch(call: PagedAttention, query_starts: torch.Tensor, max_query_len: int) -> None:
    """For the CPU: a request at a time, and unless its prompt is whole, some rows of it at a time."""
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, _, out, _ = call
    check_values("attention_prefill", call, query_starts)
    starts: list[int] = query_starts.tolist()
    for request, context in enumerate(context_lens.tolist()):
        first_row, count = starts[request], starts[request + 1] - starts[request]
        if count == 0:
            continue
        computed = context - count
        lowest = max(0, computed - window + 1) if window else 0
        keys, values = read_context((k_cache, v_cache), block_tables[request].tolist(), lowest, context)
        if keys.dtype != q.dtype:
            keys, values = keys.to(q.dtype), values.to(q.dtype)
        whole = computed == 0 and soft_cap is None and (window is None or count <= window)
        step = count if whole else CPU_ROWS
        for row in range(0, count, step):
            end_row = min(count, row + step)
            begin = max(0, computed + row - window + 1) if window else 0
            seen = slice(begin - lowest, computed + end_row - lowest)
            rows = slice(first_row + row, first_row + end_row)
            queries = q[rows].transpose(0, 1).unsqueeze(0)
            result = _attend(queries, keys[:, :, seen], values[:, :, seen], scale, window, soft_cap, whole)
            out[rows] = result.squeeze(0).transpose(0, 1)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    whole: bool,
) -> torch.Tensor:
    """queries [1, H, rows, D], the last positions of keys and values [1, K, L, D]."""
    rows, context = queries.shape[2], keys.shape[2]
    if whole:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    visible = torch.ones(rows, context, dtype=torch.bool).tril_(context - rows)
    if window is not None:
        visible.triu_(context - rows - window + 1)
    if soft_cap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
    grouped = queries.float().reshape(1, keys.shape[1], -1, rows, queries.shape[3])
    scores = torch.matmul(grouped, keys.float().unsqueeze(2).transpose(3, 4))
    scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).masked_fill_(~visible, -torch.inf)
    return torch.matmul(scores.softmax(-1), values.float().unsqueeze(2)).flatten(1, 2)


def attention_prefill_native(call: PagedAttention, query_starts: torch.Tensor, max_query_len: int) -> None:
    """For the CPU: a few hundred positions at a time are read from the cache for all rows that a thread has."""
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, max_context_len, out, _ = call
    block_size, kv_heads = k_cache.shape[1:3]
    sizes = (ctypes.c_int64 * 12)(
        *(context_lens.shape[0], q.shape[1], kv_heads, q.shape[2], block_size, q.stride(0), q.stride(1)),
        *(block_tables.stride(0), max_context_len, window or 0, k_cache.shape[0], q.shape[0]),
    )
    pointers = (x.data_ptr() for x in (q, k_cache, v_cache, block_tables, query_starts, context_lens, out))
    if native(q.dtype).attention_prefill(*pointers, sizes, scale, soft_cap or 0.0, torch.get_num_threads()):
        check_values("attention_prefill", call, query_starts)
        raise MemoryError("attention_prefill: no memory for the sums of a few hundred rows in fp32")


PrefillQuery = tuple[torch.Tensor, torch.Tensor]


def _native_takes(query: PrefillQuery) -> str | None:
    q, k_cache = query
    if q.shape[2] % LANES or k_cache.dtype != q.dtype:
        return f"it takes head sizes of a multiple of {LANES} and a cache of the queries' type"
    return why_not(q)


AttentionPrefill = Callable[[PagedAttention, torch.Tensor, int], None]

IMPLEMENTATIONS: tuple[Implementation[PrefillQuery, AttentionPrefill], ...] = (
    Implementation("native", _native_takes, attention_prefill_native),
    Implementation("torch", on_cpu, attention_prefill_torch),
    Implementation("triton", by_triton, attention_prefill_triton),
    Implementation("reference", anywhere, attention_prefill_reference),
)


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention of all rows of all requests, causal to the end of each context.

    Args:
        q: [T, H, D], D contiguous; may be a strided view.
        k_cache, v_cache: contiguous [blocks, S, K, D], this step's entries included.
        block_tables: [B, N] int32; entries past a request's blocks may name any block of the cache.
        query_starts: contiguous [B + 1] int32, first row of each request; the last entry is T.
        context_lens: contiguous [B] int32, at least each request's number of rows.
        scale: of the scores, positive, usually D ** -0.5.
        window: how many of the last positions a row sees, its own included.
        soft_cap: bound of the scores.
        max_query_len, max_context_len: at least the largest number of rows and the longest context.
        out: contiguous [T, H, D] to write into; made when absent.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit; on the CPU also query_starts that do not rise
            from 0 to T, a context below a request's rows or above max_context_len, or a block that the cache does not
            have.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    call = PagedAttention(
        q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, max_context_len, out
    )
    check_attention("attention_prefill", call)
    if query_starts.dtype != torch.int32:
        raise TypeError(f"attention_prefill: query_starts must be int32, got {query_starts.dtype}")
    if query_starts.shape != (context_lens.shape[0] + 1,):
        raise ValueError(
            f"attention_prefill: query_starts {list(query_starts.shape)} must have one entry more than "
            f"the {context_lens.shape[0]} requests"
        )
    if not query_starts.is_contiguous() or query_starts.device != q.device:
        raise ValueError(f"attention_prefill: query_starts must be contiguous and on {q.device}")
    choose(IMPLEMENTATIONS, (q, k_cache), implementation)(call, query_starts, max_query_len)
    return out
