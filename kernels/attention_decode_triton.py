"""The Triton kernels of paged decode attention: see `attention_decode` for the formula.

The contexts are cut into pieces, one program a piece and key-value head, whose results are combined. How they are cut
is computed in the kernel, from the lengths in device memory, so that a captured graph stays fast for every batch that
it is replayed with. With t tiles in a request's context and W = sum(t), a grid of B + X pieces a head takes at most

    most = max(ceil(W / X), least) tiles a piece,   max(1, ceil(t / most)) pieces a request, of equal tiles

since sum(max(1, ceil(t / most))) <= B + W / most. So no piece is longer than 1/X of the whole batch, whatever
single request it belongs to, a request of no more than that is not cut, and programs beyond the last piece leave.

The results of a cut request lie in `parts` [B + X, K, G, D] fp32, followed by the base-2 logarithm of each one's sum
of weights [B + X, K, G]. A second launch combines them; or, where the choice is `fused`, the last program to arrive
of each request and head does, in the order of the pieces, so that it does not matter which one is last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from hookline_kernels.launch import COUNTERS, arrival_counters, dependent_launch, wait_for_inputs
from hookline_kernels.paged_context import PagedAttention, attend_tile, find_request, limits, score_factors

# What may change from call to call: nothing is compiled anew for another batch of the same power of two.
_COUNTS = ("requests", "extra", "least", "window", "table_stride")
_LISTS = ("tables_ptr", "contexts_ptr")

# Requests times key-value heads up to which a batch is short of programs, and up to which its programs are.
FEW, SOME = 64, 512


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is cut and compiled.

    Attributes:
        block_n: tokens of a tile.
        warps, stages: Triton's num_warps and num_stages; the latter is how many tiles are in flight.
        programs: X as pieces for each of the device's processors.
        least: tiles of a piece from which on it is worth cutting.
        fused: combine in the same launch, with the caller's counters or else those of `launch.arrival_counters`.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    least: int = 1
    fused: bool = True


def decode_config(call: PagedAttention) -> DecodeConfig:
    """The configuration of a call, by its batch, head size and type, and by what the device can hold."""
    row_bytes = triton.next_power_of_2(call.q.shape[2]) * max(call.q.element_size(), call.k_cache.element_size())
    items = call.q.shape[0] * call.k_cache.shape[2]
    return _config(row_bytes, items <= FEW, items <= SOME, limits(call.q.device).shared_memory)


@cache
def _config(row_bytes: int, few: bool, some: bool, room: int) -> DecodeConfig:
    """As measured on an H200 (benchmarks/NOTES.md)."""
    if few and row_bytes <= 256:  # its pieces have little to do: an arrival costs more than a second launch
        config = DecodeConfig(block_n=128, warps=8, stages=3, fused=False)
    else:
        config = DecodeConfig(block_n=64 if row_bytes <= 256 else 32, stages=4 if some else 3, fused=not few)
    while config.stages > 1 and config.stages * 2 * config.block_n * row_bytes > room:
        config = replace(config, stages=config.stages - 1)
    return config


@triton.jit
def _cut(
    contexts_ptr: tl.tensor,
    requests: tl.tensor,
    extra: tl.tensor,
    window: tl.tensor,
    least: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tl.tensor:
    """How many pieces each request is cut into, [BLOCK_B], 0 past the last request."""
    request = tl.arange(0, BLOCK_B)
    real = request < requests
    reach = tl.load(contexts_ptr + request, mask=real, other=0)
    if HAS_WINDOW:
        reach = tl.minimum(reach, window)
    tiles = tl.cdiv(reach, BLOCK_N)
    most = tl.maximum(tl.cdiv(tl.sum(tiles, 0), tl.maximum(extra, 1)), least)
    return tl.where(real, tl.maximum(tl.cdiv(tiles, most), 1), 0)


@triton.jit
def _combine(
    parts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    head: tl.tensor,
    row_real: tl.tensor,
    first: tl.tensor,
    pieces: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Writes the sum of a request's pieces, weighted by what each saw, for some heads [ROWS] to out [H, D]."""
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, pieces, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        real = (piece < pieces)[:, None] & row_real[None, :]
        place = ((first + piece) * HEADS)[:, None] + head[None, :]
        mask = real[:, :, None] & (dim < SIZE)[None, None, :]
        # Other programs may have written these in this launch: not from this processor's own cache.
        weight = tl.load(weights_ptr + place, mask=real, other=float("-inf"), cache_modifier=".cg")
        part_place = parts_ptr + (place * SIZE)[:, :, None] + dim[None, None, :]
        part = tl.load(part_place, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(weight, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        share = tl.exp2(weight - base[None, :])
        total = total * shrink + tl.sum(share, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * share[:, :, None], axis=0)
        top = new_top
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    mask = row_real[:, None] & (dim < SIZE)[None, :]
    tl.store(out_ptr + head[:, None] * SIZE + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_LISTS)
def attention_decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    requests: tl.tensor,
    extra: tl.tensor,
    least: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FUSED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a key-value head and piece of a context: the group's heads share each load of keys and values."""
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    counts = _cut(contexts_ptr, requests, extra, window, least, HAS_WINDOW, BLOCK_N, BLOCK_B)
    request, first = find_request(counts, item)
    if request < requests:
        context = tl.load(contexts_ptr + request)
        pieces = tl.sum(tl.where(tl.arange(0, BLOCK_B) == request, counts, 0), 0)
        lowest = 0
        if HAS_WINDOW:
            lowest = tl.maximum(context - window, 0)
        length = tl.cdiv(tl.cdiv(context - lowest, BLOCK_N), pieces) * BLOCK_N
        begin = lowest + (item - first) * length
        end = tl.minimum(context, begin + length)

        row = tl.arange(0, ROWS)
        dim = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + row
        mask = (row < GROUP)[:, None] & (dim < SIZE)[None, :]
        request_long = request.to(tl.int64)
        q_place = q_ptr + request_long * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
        q = tl.load(q_place, mask=mask, other=0.0)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        # Places past the end stand for the last token, whose keys and values may be read: so no load needs a mask, and
        # the one tile that is not full can be in flight like the others.
        token = tl.arange(0, BLOCK_N)
        table_ptr = tables_ptr + request_long * table_stride
        k_head_ptr = k_ptr + kv_head * SIZE
        v_head_ptr = v_ptr + kv_head * SIZE
        # Blocks are read a tile ahead: else each tile would wait for two loads that follow each other.
        near = tl.minimum(begin + token, end - 1)
        block = tl.load(table_ptr + near // BLOCK_SIZE, mask=near >= begin, other=0)
        for start in range(begin, end, BLOCK_N):
            place = tl.minimum(start + token, end - 1)
            slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
            block = tl.load(table_ptr + tl.minimum(place + BLOCK_N, end - 1) // BLOCK_SIZE)
            entry = (slot * (KV_HEADS * SIZE))[:, None] + dim[None, :]
            if SIZE == BLOCK_D:
                k = tl.load(k_head_ptr + entry)
                v = tl.load(v_head_ptr + entry)
            else:
                k = tl.load(k_head_ptr + entry, mask=(dim < SIZE)[None, :], other=0.0)
                v = tl.load(v_head_ptr + entry, mask=(dim < SIZE)[None, :], other=0.0)
            visible = (start + token < end)[None, :]
            top, total, acc = attend_tile(
                q, k.to(q.dtype), v.to(q.dtype), visible, top, total, acc, inner, outer, HAS_CAP, True, True
            )
        some = total > 0.0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        HEADS: tl.constexpr = KV_HEADS * GROUP
        out_request_ptr = out_ptr + request_long * (HEADS * SIZE)
        if pieces == 1:
            out_place = out_request_ptr + head[:, None] * SIZE + dim[None, :]
            tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            weights_ptr = parts_ptr + (requests + extra) * (HEADS * SIZE)
            weight = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
            tl.store(parts_ptr + (item * HEADS + head)[:, None] * SIZE + dim[None, :], acc, mask=mask)
            tl.store(weights_ptr + item * HEADS + head, weight, mask=row < GROUP)
            if FUSED:
                tl.debug_barrier()  # all threads' stores come before the one thread's arrival
                counter_ptr = counters_ptr + request * KV_HEADS + kv_head
                if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                    tl.store(counter_ptr, 0)
                    group_row = tl.arange(0, GROUP_ROWS)
                    _combine(
                        parts_ptr, weights_ptr, out_request_ptr, kv_head * GROUP + group_row, group_row < GROUP, first,
                        pieces, HEADS, SIZE, CHUNK, GROUP_ROWS, BLOCK_D,
                    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS[:-1], do_not_specialize_on_alignment=_LISTS[1:])
def attention_combine_kernel(
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    requests: tl.tensor,
    extra: tl.tensor,
    least: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a head and request; requests of one piece are complete already."""
    wait_for_inputs(PDL)
    head = tl.program_id(0)
    request = tl.program_id(1)
    counts = _cut(contexts_ptr, requests, extra, window, least, HAS_WINDOW, BLOCK_N, BLOCK_B)
    index = tl.arange(0, BLOCK_B)
    pieces = tl.sum(tl.where(index == request, counts, 0), 0)
    if pieces > 1:
        first = tl.sum(tl.where(index < request, counts, 0), 0)
        weights_ptr = parts_ptr + (requests + extra) * (HEADS * SIZE)
        out_request_ptr = out_ptr + request.to(tl.int64) * (HEADS * SIZE)
        one = tl.arange(0, 1)
        _combine(
            parts_ptr, weights_ptr, out_request_ptr, head + one, one == 0, first,
            pieces, HEADS, SIZE, 16, 1, BLOCK_D,
        )  # fmt: skip


def attention_decode_triton(call: PagedAttention, config: DecodeConfig | None = None) -> None:
    """One launch, or two where contexts may be cut and the choice is not `fused`. Reads nothing of the device."""
    q, k_cache, v_cache, tables, context_lens, scale, window, soft_cap, reach, out, counters = call
    requests, heads, size = q.shape
    if requests == 0:
        return
    config = config or decode_config(call)
    _, block_size, kv_heads, _ = k_cache.shape
    fused = config.fused and requests * kv_heads <= COUNTERS
    counters = arrival_counters(q.device) if fused and counters is None else counters
    dependent = dependent_launch(q.device)
    both, one = _constants(
        config,
        heads,
        kv_heads,
        size,
        block_size,
        (requests - 1).bit_length(),
        window is not None,
        soft_cap is not None,
        fused,
    )
    if window is not None:
        reach = min(reach, window)
    cuts = max(0, -(-reach // (config.block_n * config.least)) - 1)  # that one request can have
    extra = min(-(-config.programs * limits(q.device).processors // kv_heads), requests * cuts)
    parts = q.new_empty((requests + extra) * heads * (size + 1), dtype=torch.float32)
    numbers = (requests, extra, config.least, window or 0)
    attention_decode_kernel[(kv_heads, requests + extra)](
        q,
        k_cache,
        v_cache,
        tables,
        context_lens,
        out,
        parts,
        counters if fused else parts,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        *numbers,
        *score_factors(scale, soft_cap),
        **both,
        **one,
        **dependent,
    )
    if extra and not fused:
        constants = both | {"HEADS": heads} | dependent
        attention_combine_kernel[(heads, requests)](context_lens, out, parts, *numbers, **constants)


@cache
def _constants(
    config: DecodeConfig,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    batch_bits: int,
    has_window: bool,
    has_cap: bool,
    fused: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """What both kernels are compiled for, and what the first is; kept, for this runs in each layer of each step."""
    group = heads // kv_heads
    block_d = triton.next_power_of_2(size)
    group_rows = triton.next_power_of_2(group)
    both = {"HAS_WINDOW": has_window, "SIZE": size, "BLOCK_N": config.block_n, "BLOCK_D": block_d}
    both |= {"BLOCK_B": max(16, 2**batch_bits)}
    one = {"HAS_CAP": has_cap, "FUSED": fused, "KV_HEADS": kv_heads, "GROUP": group, "BLOCK_SIZE": block_size}
    one |= {"ROWS": max(16, group_rows), "GROUP_ROWS": group_rows}
    # More at a time would take more registers than the tiles do.
    one |= {"CHUNK": max(1, min(16, 1024 * config.warps // (group_rows * block_d)))}
    return both, one | {"num_warps": config.warps, "num_stages": config.stages}
