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
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not
from hookline_kernels.paged_context import check_attention, read_context

# Rows of a request that the CPU attends with at a time: few enough to skip most of what causality and window hide, many
# enough for its matrix products.
CPU_ROWS = 256

# Head size up to which the native kernel has room on its stack.
LONGEST_HEAD = 256


def attention_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """The formula in plain torch, a request at a time, in fp32."""
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


def attention_prefill_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """For the CPU: a request at a time, and unless its prompt is whole, some rows of it at a time."""
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


@triton.jit
def _attend_tiles(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    row_position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    soft_cap: tl.tensor,
    size: tl.tensor,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the tiles from begin to end to the running softmax; without MASKED, all rows must see all of them."""
    dim = tl.arange(0, BLOCK_D)
    dim_real = dim < size
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        real = position < context
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        entry = (block * BLOCK_SIZE + position % BLOCK_SIZE) * token_stride
        place = entry[:, None] + dim[None, :]
        mask = real[:, None] & dim_real[None, :]
        k = tl.load(k_ptr + place, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + place, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        scores = scores * 1.4426950408889634
        if MASKED:
            visible = position[None, :] <= row_position[:, None]
            if HAS_WINDOW:
                visible = visible & (row_position[:, None] - position[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet has a top of -inf, from which nothing may be subtracted.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def attention_prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    soft_cap: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    size: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program a request, head and BLOCK_M of its rows; out is contiguous."""
    request = tl.program_id(2)
    head = tl.program_id(1)
    first_row = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first_row
    tile = tl.program_id(0) * BLOCK_M
    if tile < count:
        context = tl.load(contexts_ptr + request)
        computed = context - count
        row = tile + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        mask = (row < count)[:, None] & (dim < size)[None, :]
        token = (first_row + row).to(tl.int64)
        q_place = q_ptr + token[:, None] * q_stride_token + head * q_stride_head + dim[None, :]
        q = tl.load(q_place, mask=mask, other=0.0)
        row_position = computed + row
        kv_head = head // GROUP
        k_head_ptr = k_ptr + kv_head * size
        v_head_ptr = v_ptr + kv_head * size
        token_stride = kv_heads * size
        table_ptr = tables_ptr + request.to(tl.int64) * table_stride

        # Tiles that the window cuts, tiles that all rows see, tiles that causality or the end of the context cuts.
        first = computed + tile
        last = tl.minimum(first + BLOCK_M, context)
        begin = 0
        whole_begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            whole_begin = tl.cdiv(tl.maximum(first + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
        whole_end = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, begin)
        whole_begin = tl.minimum(whole_begin, whole_end)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if HAS_WINDOW:
            acc, top, total = _attend_tiles(
                acc, top, total, q, row_position, begin, whole_begin, context, table_ptr, k_head_ptr, v_head_ptr,
                token_stride, scale, window, soft_cap, size, True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, row_position, whole_begin, whole_end, context, table_ptr, k_head_ptr, v_head_ptr,
            token_stride, scale, window, soft_cap, size, False, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, top, total = _attend_tiles(
            acc, top, total, q, row_position, whole_end, last, context, table_ptr, k_head_ptr, v_head_ptr,
            token_stride, scale, window, soft_cap, size, True, HAS_WINDOW, HAS_CAP, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        # Rows past the request's last saw the same tiles or fewer; they are not stored.
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_place = out_ptr + (token[:, None] * heads + head) * size + dim[None, :]
        tl.store(out_place, out.to(out_ptr.dtype.element_ty), mask=mask)


def attention_prefill_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """One launch for all requests."""
    heads, size = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    requests = context_lens.shape[0]
    if q.shape[0] == 0 or requests == 0:
        return
    block_d = triton.next_power_of_2(size)
    wide = block_d > 128 or q.dtype == torch.float32  # tiles must fit the shared memory
    block_m = min(32 if wide else 64, max(16, triton.next_power_of_2(max_query_len)))
    attention_prefill_kernel[(triton.cdiv(max_query_len, block_m), heads, requests)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        context_lens,
        out,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        scale,
        window or 0,
        soft_cap or 0.0,
        heads,
        kv_heads,
        size,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        GROUP=heads // kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=32 if wide else 64,
        BLOCK_D=block_d,
    )


def attention_prefill_native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor,
) -> None:
    """For the CPU: some rows of a head at a time, with as many keys as fit the first cache; never more than is seen."""
    block_size, kv_heads = k_cache.shape[1:3]
    sizes = (ctypes.c_int64 * 9)(
        *(context_lens.shape[0], q.shape[1], kv_heads, q.shape[2], block_size),
        *(q.stride(0), q.stride(1), block_tables.stride(0), window or 0),
    )
    pointers = (x.data_ptr() for x in (q, k_cache, v_cache, block_tables, query_starts, context_lens, out))
    if native(q.dtype).attention_prefill(*pointers, sizes, scale, soft_cap or 0.0, torch.get_num_threads()):
        raise MemoryError(f"attention_prefill: no memory for a context of up to {max_context_len} tokens in fp32")


PrefillQuery = tuple[torch.Tensor, torch.Tensor]


def _native_takes(query: PrefillQuery) -> str | None:
    q, k_cache = query
    if q.shape[2] % LANES or q.shape[2] > LONGEST_HEAD or k_cache.dtype != q.dtype:
        return f"it takes head sizes of multiples of {LANES} up to {LONGEST_HEAD} and a cache of the queries' type"
    return why_not(q)


class AttentionPrefill(Protocol):
    """What each implementation is: `attention_prefill` after its checks, writing into `out`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        max_query_len: int,
        max_context_len: int,
        out: torch.Tensor,
    ) -> None: ...


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
        query_starts: [B + 1] int32, first row of each request; the last entry is T.
        context_lens: [B] int32, at least each request's number of rows.
        scale: of the scores, usually D ** -0.5.
        window: how many of the last positions a row sees, its own included.
        soft_cap: bound of the scores.
        max_query_len, max_context_len: at least the largest number of rows and the longest context.
        out: contiguous [T, H, D] to write into; made when absent.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit.
    """
    check_attention(
        "attention_prefill",
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
    if query_starts.dtype != torch.int32:
        raise TypeError(f"attention_prefill: query_starts must be int32, got {query_starts.dtype}")
    if query_starts.shape != (context_lens.shape[0] + 1,):
        raise ValueError(
            f"attention_prefill: query_starts {list(query_starts.shape)} must have one entry more than "
            f"the {context_lens.shape[0]} requests"
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    choose(IMPLEMENTATIONS, (q, k_cache), implementation)(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        context_lens,
        scale,
        window,
        soft_cap,
        max_query_len,
        max_context_len,
        out,
    )
    return out
