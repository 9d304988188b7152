"""The Triton kernel of paged prefill attention: see `attention_prefill` for the formula.

One program takes some rows of one request and head; where `packed`, of all heads of a key-value head, which then share
the loads and let few rows fill a tile. The requests' row tiles lie end to end in the grid, at most T / rows + B, and
each program finds its own from `query_starts` in device memory: so nothing depends on how the rows are spread.
Tiles of a request start with its last rows, which see most, so that the short ones fill the end of the launch.

A program's keys come in three ranges: tiles that the window cuts, tiles that all rows see, which need no mask, and
tiles that causality or the end of the context cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from hookline_kernels.paged_context import PagedAttention, attend_tile, find_request, limits, score_factors

# Longest context up to which the diagonal is a good part of the work.
SHORT = 2048


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is cut and compiled.

    Attributes:
        block_m: rows of a tile, heads included where packed.
        block_n: keys of a tile.
        warps, stages: Triton's num_warps and num_stages; the latter is how many tiles of keys are in flight.
        packed: whether a tile has all heads of a key-value head; without effect where they are no power of two.
        registers: bound of a thread's registers, so that two programs fit a processor; None leaves it to the compiler.
    """

    block_m: int = 128
    block_n: int = 64
    warps: int = 8
    stages: int = 3
    packed: bool = False
    registers: int | None = None


def prefill_config(call: PagedAttention, max_query_len: int) -> PrefillConfig:
    """The configuration of a call, by its rows, head size and type, and by what the device can hold."""
    bytes_each = max(call.q.element_size(), call.k_cache.element_size())
    row_bytes = triton.next_power_of_2(call.q.shape[2]) * bytes_each
    return _config(
        row_bytes,
        bytes_each,
        call.q.shape[1] // call.k_cache.shape[2],
        min(max_query_len, 65),
        call.max_context_len <= SHORT,
        limits(call.q.device).shared_memory,
    )


@cache
def _config(row_bytes: int, bytes_each: int, group: int, rows: int, short: bool, room: int) -> PrefillConfig:
    """As measured on an H200 (benchmarks/NOTES.md)."""
    if row_bytes == 512 and bytes_each == 2 and rows > 64:
        config = PrefillConfig(block_m=128, block_n=32, warps=8, stages=3)
    elif row_bytes > 256:
        config = PrefillConfig(block_m=32, block_n=32, warps=4)
    elif rows <= 64:
        block_m = max(16, min(64, triton.next_power_of_2(rows * group)))
        config = PrefillConfig(block_m=block_m, warps=4, packed=True)
    elif short:  # the edges of its tiles cost most: two programs on a processor hide each other's
        config = PrefillConfig(block_m=128, block_n=64, stages=2, registers=128)
    else:
        config = PrefillConfig(block_m=128, block_n=128)
    while config.stages > 1 and (config.block_m + config.stages * 2 * config.block_n) * row_bytes > room:
        config = replace(config, stages=config.stages - 1)
    return config


@triton.jit
def _attend_range(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    row_position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    last: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the tiles from begin, a multiple of BLOCK_N, to end; without MASKED all rows must see all of them.

    Places past `last`, the context's last position, stand for it: its keys and values may be read, so no load needs a
    mask. Blocks are read a tile ahead: else each tile would wait for two loads that follow each other.
    """
    dim = tl.arange(0, BLOCK_D)
    token = tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + tl.minimum(begin + token, last) // BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        position = start + token
        place = position
        if MASKED:
            place = tl.minimum(place, last)
        # Whole tiles of whole blocks are all cut the same way, which is then computed once.
        in_block = token % BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 and not MASKED else place % BLOCK_SIZE
        entry = block.to(tl.int64) * (BLOCK_SIZE * TOKEN_STRIDE) + in_block * TOKEN_STRIDE
        block = tl.load(table_ptr + tl.minimum(position + BLOCK_N, last) // BLOCK_SIZE)
        if SIZE == BLOCK_D:
            k = tl.load(k_ptr + entry[:, None] + dim[None, :])
            v = tl.load(v_ptr + entry[:, None] + dim[None, :])
        else:
            k = tl.load(k_ptr + entry[:, None] + dim[None, :], mask=(dim < SIZE)[None, :], other=0.0)
            v = tl.load(v_ptr + entry[:, None] + dim[None, :], mask=(dim < SIZE)[None, :], other=0.0)
        visible = None
        if MASKED:
            visible = position[None, :] <= row_position[:, None]
            if HAS_WINDOW:
                visible = visible & (row_position[:, None] - position[None, :] < window)
        # Without a window each row sees position 0, in the first tile; with one, a row's first tile may be hidden.
        top, total, acc = attend_tile(
            q, k.to(q.dtype), v.to(q.dtype), visible, top, total, acc, inner, outer, HAS_CAP, MASKED, not HAS_WINDOW
        )
    return top, total, acc


# Nothing is compiled anew for another batch: its lists may begin anywhere in those of a whole step.
@triton.jit(
    do_not_specialize=("requests", "window", "table_stride"),
    do_not_specialize_on_alignment=("tables_ptr", "starts_ptr", "contexts_ptr"),
)
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
    requests: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """One program PACK heads and BLOCK_M / PACK rows of one request; out is contiguous."""
    TOKENS: tl.constexpr = BLOCK_M // PACK
    index = tl.arange(0, BLOCK_B)
    real = index < requests
    starts = tl.load(starts_ptr + index, mask=real, other=0)
    ends = tl.load(starts_ptr + index + 1, mask=real, other=0)
    counts = tl.cdiv(ends - starts, TOKENS)
    item = tl.program_id(1)
    request, first_item = find_request(counts, item)
    if request < requests:
        first_row = tl.load(starts_ptr + request)
        count = tl.load(starts_ptr + request + 1) - first_row
        context = tl.load(contexts_ptr + request)
        tile = (tl.cdiv(count, TOKENS) - 1 - (item - first_item)) * TOKENS
        first_head = tl.program_id(0) * PACK
        kv_head = first_head // GROUP
        lane = tl.arange(0, BLOCK_M)
        row = tile + lane // PACK
        head = first_head + lane % PACK
        dim = tl.arange(0, BLOCK_D)
        mask = (row < count)[:, None] & (dim < SIZE)[None, :]
        token = (first_row + row).to(tl.int64)
        q_place = q_ptr + (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :]
        q = tl.load(q_place, mask=mask, other=0.0)

        first = context - count + tile  # position of the first row
        row_position = context - count + row
        end = tl.minimum(first + TOKENS, context)
        begin = 0
        whole_begin = 0
        whole_end = (first + 1) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            whole_end = tl.maximum(whole_end, begin)
            whole_begin = tl.cdiv(tl.maximum(first + TOKENS - window, 0), BLOCK_N) * BLOCK_N
            whole_begin = tl.minimum(tl.maximum(whole_begin, begin), whole_end)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table_ptr = tables_ptr + request.to(tl.int64) * table_stride
        k_head_ptr = k_ptr + kv_head * SIZE
        v_head_ptr = v_ptr + kv_head * SIZE
        if HAS_WINDOW:
            top, total, acc = _attend_range(
                q, top, total, acc, row_position, begin, whole_begin, context - 1, table_ptr, k_head_ptr, v_head_ptr,
                window, inner, outer, True, HAS_WINDOW, HAS_CAP, KV_HEADS * SIZE, SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        top, total, acc = _attend_range(
            q, top, total, acc, row_position, whole_begin, whole_end, context - 1, table_ptr, k_head_ptr, v_head_ptr,
            window, inner, outer, False, HAS_WINDOW, HAS_CAP, KV_HEADS * SIZE, SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        top, total, acc = _attend_range(
            q, top, total, acc, row_position, whole_end, end, context - 1, table_ptr, k_head_ptr, v_head_ptr,
            window, inner, outer, True, HAS_WINDOW, HAS_CAP, KV_HEADS * SIZE, SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        # Rows past the request's last saw the same tiles or fewer; they are not stored.
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_place = out_ptr + ((token * (KV_HEADS * GROUP) + head) * SIZE)[:, None] + dim[None, :]
        tl.store(out_place, out.to(out_ptr.dtype.element_ty), mask=mask)


def attention_prefill_triton(
    call: PagedAttention, query_starts: torch.Tensor, max_query_len: int, config: PrefillConfig | None = None
) -> None:
    """One launch for all requests. Reads nothing of the device."""
    q, window = call.q, call.window
    tokens, heads, size = q.shape
    requests = query_starts.shape[0] - 1
    if tokens == 0 or requests == 0:
        return
    config = config or prefill_config(call, max_query_len)
    _, block_size, kv_heads, _ = call.k_cache.shape
    group = heads // kv_heads
    packed = config.packed and group & (group - 1) == 0 and group <= config.block_m
    pack = group if packed else 1
    inner, outer = score_factors(call.scale, call.soft_cap)
    # The sum of ceil(n / rows) over the requests with rows is at most this.
    tiles = tokens // (config.block_m // pack) + min(requests, tokens)
    attention_prefill_kernel[(heads // pack, tiles)](
        q,
        call.k_cache,
        call.v_cache,
        call.block_tables,
        query_starts,
        call.context_lens,
        call.out,
        q.stride(0),
        q.stride(1),
        call.block_tables.stride(0),
        requests,
        window or 0,
        inner,
        outer,
        HAS_WINDOW=window is not None,
        HAS_CAP=call.soft_cap is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        PACK=pack,
        SIZE=size,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_B=max(64, triton.next_power_of_2(requests)),
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )
