"""Paged decode attention: one query token for each request against its whole context.

    s[j] = scale * q . k[j]                     (with a soft cap c: s <- c tanh(s / c))
    out = sum_j softmax(s)[j] v[j]              over positions j < context, and with a window j >= context - window

Shapes: q, out [B, H, D]; k_cache, v_cache [blocks, S, K, D]; block_tables [B, N] int32; context_lens [B] int32. Query
head h reads key-value head h // G with G = H / K. Position j of request b lies in block block_tables[b, j // S] at
place j % S. Softmax is fp32. A context of 0 gives zeros. Cache entries outside of a request's context never matter,
whatever they hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hookline_kernels.attention_decode_triton import attention_decode_triton
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not
from hookline_kernels.paged_context import PagedAttention, check_attention, check_values, read_context


def attention_decode_reference(call: PagedAttention) -> None:
    """The formula in plain torch, a request at a time, in fp32."""
    if call.q.is_cpu:
        check_values("attention_decode", call)
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, _, out, _ = call
    block_size, kv_heads = k_cache.shape[1:3]
    for request, context in enumerate(context_lens.tolist()):
        positions = torch.arange(max(0, context - (window or context)), context, device=q.device)
        slots = block_tables[request].long()[positions // block_size] * block_size + positions % block_size
        keys, values = (cache.flatten(0, 1)[slots].float() for cache in (k_cache, v_cache))
        queries = q[request].float().view(kv_heads, -1, q.shape[2])
        scores = torch.einsum("kgd,lkd->kgl", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[request] = torch.einsum("kgl,lkd->kgd", scores.softmax(-1), values).flatten(0, 1)


def attention_decode_torch(call: PagedAttention) -> None:
    """For the CPU: the contexts are gathered side by side and attended to in one call, G heads as its rows."""
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, _, out, _ = call
    check_values("attention_decode", call)
    contexts: list[int] = context_lens.tolist()
    if not contexts or max(contexts) == 0:
        out.zero_()
        return
    visible = None
    if len(contexts) == 1:
        begin = max(0, contexts[0] - window) if window else 0
        keys, values = read_context((k_cache, v_cache), block_tables[0].tolist(), begin, contexts[0])
    else:
        slots, visible = _visible_slots(block_tables, context_lens, contexts, k_cache.shape[1], window)
        rows = slots.reshape(-1)
        keys, values = (
            cache.flatten(0, 1).index_select(0, rows).view(*slots.shape, *cache.shape[2:]).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
    queries = q.reshape(q.shape[0], k_cache.shape[2], -1, q.shape[2])
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    result = _attend(queries, keys, values, visible, scale, soft_cap)
    out.view(queries.shape).copy_(result)
    if min(contexts) == 0:
        out.masked_fill_((context_lens == 0).view(-1, 1, 1), 0.0)


def _visible_slots(
    block_tables: torch.Tensor, context_lens: torch.Tensor, contexts: list[int], block_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots [B, L] of what each request sees, and which of them are real: [B, L], or None when all are.

    A place past what a request sees stands for the first token that it does see: its weight is 0, and 0 times a finite
    value is 0, while an unused cache entry may hold anything.
    """
    longest = max(contexts)
    reach = longest if window is None else min(longest, window)
    places = torch.arange(reach)
    if reach < longest:
        positions = places + (context_lens - reach).clamp_(min=0).unsqueeze(1)
        blocks = block_tables.gather(1, (positions // block_size).clamp_(max=block_tables.shape[1] - 1))
        slots = blocks * block_size + positions % block_size
    else:
        blocks = block_tables[:, : -(-longest // block_size)].unsqueeze(2)
        slots = (blocks * block_size + torch.arange(block_size)).flatten(1)[:, :reach]
    if min(contexts) >= reach:
        return slots, None
    visible = places < context_lens.unsqueeze(1)
    return torch.where(visible, slots, slots[:, :1]), visible


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """queries [B, K, G, D] against keys and values [B, K, L, D]; visible [B, L]."""
    mask = None if visible is None else visible[:, None, None, :]
    if soft_cap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(queries.float(), keys.float().transpose(2, 3)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf)
    return torch.matmul(scores.softmax(-1), values.float())


def attention_decode_native(call: PagedAttention) -> None:
    """For the CPU: one call, a thread for each request and key-value head; reads no entry outside a context."""
    q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, max_context_len, out, _ = call
    block_size, kv_heads = k_cache.shape[1:3]
    sizes = (ctypes.c_int64 * 11)(
        *(q.shape[0], q.shape[1], kv_heads, q.shape[2], block_size),
        *(q.stride(0), q.stride(1), block_tables.stride(0), max_context_len, window or 0, k_cache.shape[0]),
    )
    pointers = (tensor.data_ptr() for tensor in (q, k_cache, v_cache, block_tables, context_lens, out))
    failed = native(q.dtype).attention_decode(*pointers, sizes, scale, soft_cap or 0.0, torch.get_num_threads())
    if failed:
        check_values("attention_decode", call)
        raise MemoryError(f"attention_decode: no memory for the scores of contexts up to {max_context_len} tokens")


DecodeQuery = tuple[torch.Tensor, torch.Tensor]


def _native_takes(query: DecodeQuery) -> str | None:
    q, k_cache = query
    if q.shape[2] % LANES or k_cache.dtype != q.dtype:
        return f"it takes head sizes of a multiple of {LANES} and a cache of the queries' type"
    return why_not(q)


IMPLEMENTATIONS: tuple[Implementation[DecodeQuery, Callable[[PagedAttention], None]], ...] = (
    Implementation("native", _native_takes, attention_decode_native),
    Implementation("torch", on_cpu, attention_decode_torch),
    Implementation("triton", by_triton, attention_decode_triton),
    Implementation("reference", anywhere, attention_decode_reference),
)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    max_context_len: int,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention of one token for each request, which is the last of its context and already in the cache.

    Args:
        q: [B, H, D], D contiguous; may be a strided view.
        k_cache, v_cache: contiguous [blocks, S, K, D].
        block_tables: [B, N] int32; entries past a request's blocks may name any block of the cache.
        context_lens: contiguous [B] int32, counting the token itself.
        scale: of the scores, positive, usually D ** -0.5.
        window: how many of the last positions are seen, the token itself included.
        soft_cap: bound of the scores.
        max_context_len: at least the longest of `context_lens`. The only thing on the host that depends on them: a
            graph that is captured with the longest context ever stays fast when replayed with short ones.
        out: contiguous [B, H, D] to write into; made when absent.
        counters: zeros, at least [B * K] int32, left zero, for the Triton kernel in place of those that the calls on a
            device share. Calls that may run at the same time need their own.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit; on the CPU also a context above
            max_context_len, or a block that the cache does not have.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    call = PagedAttention(
        q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, max_context_len, out, counters
    )
    check_attention("attention_decode", call)
    requests = context_lens.shape[0]
    if requests != q.shape[0]:
        raise ValueError(f"attention_decode: {q.shape[0]} tokens for {requests} requests")
    if counters is not None and (
        counters.dtype != torch.int32 or not counters.is_contiguous() or counters.numel() < requests * k_cache.shape[2]
    ):
        raise ValueError(
            f"attention_decode: counters must be contiguous int32 of B * K = {requests * k_cache.shape[2]} "
            f"or more, got {counters.dtype} {list(counters.shape)}"
        )
    choose(IMPLEMENTATIONS, (q, k_cache), implementation)(call)
    return out
