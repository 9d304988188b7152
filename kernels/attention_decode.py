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
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not
from hookline_kernels.paged_context import check_attention, read_context


def attention_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """The formula in plain torch, a request at a time, in fp32."""
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


def attention_decode_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """For the CPU: the contexts are gathered side by side and attended to in one call, G heads as its rows."""
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


@triton.jit
def attention_decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    part_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    soft_cap: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    size: tl.tensor,
    splits: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program a request, key-value head and split: the group's heads share each load of keys and values.

    Writes the split's own softmax-weighted values to part [B, H, splits, D] and the base-2 logarithm of its sum of
    weights to weight [B, H, splits], both fp32.
    """
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts_ptr + request)
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(context - window, 0)
    tiles = tl.cdiv(context - lowest, BLOCK_N)
    tiles_each = tl.cdiv(tiles, splits)
    begin = lowest + split * tiles_each * BLOCK_N
    end = tl.minimum(context, begin + tiles_each * BLOCK_N)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    row_real = row < GROUP
    dim_real = dim < size
    q_place = q_ptr + request * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(q_place, mask=row_real[:, None] & dim_real[None, :], other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        real = position < end
        block = tl.load(tables_ptr + request * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        entry = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * kv_heads + kv_head) * size
        place = entry[:, None] + dim[None, :]
        mask = real[:, None] & dim_real[None, :]
        k = tl.load(k_ptr + place, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + place, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        scores = tl.where(real[None, :], scores * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # finite: each tile has a real position
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        top = new_top

    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    weight = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    part = (request * heads + head) * splits + split
    tl.store(part_ptr + part[:, None] * size + dim[None, :], acc, mask=row_real[:, None] & dim_real[None, :])
    tl.store(weight_ptr + part, weight, mask=row_real)


@triton.jit
def attention_combine_kernel(
    part_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    splits: tl.tensor,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program a request and head: the splits' results, weighted by what each of them saw."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(weight, axis=0)
    share = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share, axis=0)
    share = share / tl.where(total > 0.0, total, 1.0)
    place = (row * splits + split)[:, None] * size + dim[None, :]
    part = tl.load(part_ptr + place, mask=(split < splits)[:, None] & (dim < size)[None, :], other=0.0)
    out = tl.sum(part * share[:, None], axis=0)
    tl.store(out_ptr + row * size + dim, out.to(out_ptr.dtype.element_ty), mask=dim < size)


def attention_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """Two launches: the splits of every context, and their combination."""
    requests, heads, size = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if requests == 0:
        return
    group = heads // kv_heads
    block_d = triton.next_power_of_2(size)
    block_n = 64 if block_d <= 128 else 32
    reach = max_context_len if window is None else min(max_context_len, window)
    splits = _count_splits(requests * kv_heads, triton.cdiv(reach, block_n), q.device)
    part = torch.empty((requests, heads, splits, size), dtype=torch.float32, device=q.device)
    weight = torch.empty((requests, heads, splits), dtype=torch.float32, device=q.device)
    attention_decode_kernel[(requests, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        part,
        weight,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        scale,
        window or 0,
        soft_cap or 0.0,
        heads,
        kv_heads,
        size,
        splits,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )
    attention_combine_kernel[(requests * heads,)](
        part, weight, out, size, splits, BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_D=block_d, num_warps=1
    )


def _count_splits(programs: int, tiles: int, device: torch.device) -> int:
    """Splits of each context: enough to give every processor two programs, none of them without a tile."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    wanted = -(-2 * processors // programs)
    return max(1, min(tiles, wanted, 128))


def attention_decode_native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """For the CPU: one call, a thread for each request and key-value head; reads no entry outside a context."""
    block_size, kv_heads = k_cache.shape[1:3]
    sizes = (ctypes.c_int64 * 10)(
        *(q.shape[0], q.shape[1], kv_heads, q.shape[2], block_size),
        *(q.stride(0), q.stride(1), block_tables.stride(0), max_context_len, window or 0),
    )
    pointers = (tensor.data_ptr() for tensor in (q, k_cache, v_cache, block_tables, context_lens, out))
    failed = native(q.dtype).attention_decode(*pointers, sizes, scale, soft_cap or 0.0, torch.get_num_threads())
    if failed:
        raise MemoryError(f"attention_decode: no memory for the scores of contexts up to {max_context_len} tokens")


DecodeQuery = tuple[torch.Tensor, torch.Tensor]


def _native_takes(query: DecodeQuery) -> str | None:
    q, k_cache = query
    if q.shape[2] % LANES or k_cache.dtype != q.dtype:
        return f"it takes head sizes of a multiple of {LANES} and a cache of the queries' type"
    return why_not(q)


class AttentionDecode(Protocol):
    """What each implementation is: `attention_decode` after its checks, writing into `out`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        max_context_len: int,
        out: torch.Tensor,
    ) -> None: ...


IMPLEMENTATIONS: tuple[Implementation[DecodeQuery, AttentionDecode], ...] = (
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
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention of one token for each request, which is the last of its context and already in the cache.

    Args:
        q: [B, H, D], D contiguous; may be a strided view.
        k_cache, v_cache: contiguous [blocks, S, K, D].
        block_tables: [B, N] int32; entries past a request's blocks may name any block of the cache.
        context_lens: [B] int32, counting the token itself.
        scale: of the scores, usually D ** -0.5.
        window: how many of the last positions are seen, the token itself included.
        soft_cap: bound of the scores.
        max_context_len: at least the longest of `context_lens`.
        out: contiguous [B, H, D] to write into; made when absent.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit.
    """
    check_attention(
        "attention_decode",
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        max_context_len,
        window,
        soft_cap,
        out,
    )
    if context_lens.shape[0] != q.shape[0]:
        raise ValueError(f"attention_decode: {q.shape[0]} tokens for {context_lens.shape[0]} requests")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    choose(IMPLEMENTATIONS, (q, k_cache), implementation)(
        q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, max_context_len, out
    )
    return out
