"""The Triton kernels of latent attention: see `latent_attention` for the formula.

One latent entry serves all heads of a row, so a tile of up to 64 lanes is heads times rows: whole rows of heads for
lists, which differ from row to row; as many rows of one request as fit without lists. Each tile loads an entry once,
as the key of its scores and as its value.

A tile's positions are cut into equally many pieces for all tiles, as many as keep the device busy: their number depends
on shapes alone, their length on the device's numbers, so that a captured graph stays fast for what it is replayed with.
The results of pieces lie in `parts` [T, pieces, H, L] fp32, followed by the base-2 logarithm of each one's sum of
weights [T, pieces, H]; a second launch combines them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hookline_kernels.launch import dependent_launch, wait_for_inputs
from hookline_kernels.paged_context import limits
from hookline_kernels.paged_rows import PagedRows, find_entries, locate_tile, most_tiles


class LatentAttention(NamedTuple):
    """A checked call of `latent_attention`, as each implementation gets it.

    Attributes:
        q: [T, H, L + R], the last dimension contiguous; may be a strided view.
        cache: contiguous [blocks, S, L + R].
        rows: the requests' rows and blocks.
        scale: positive factor on the scores.
        positions: [T, K] int32, its rows contiguous, or None: causal.
        out: contiguous [T, H, L] of q's type to write into.
    """

    q: torch.Tensor
    cache: torch.Tensor
    rows: PagedRows
    scale: float
    positions: torch.Tensor | None
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How the kernel is cut and compiled.

    Attributes:
        block_m: lanes of a tile, heads times rows; at least 16.
        block_n: positions of a tile.
        warps, stages: Triton's num_warps and num_stages.
        programs: pieces and tiles together for each of the device's processors, as long as positions last.
        least: tiles of positions that a piece has at least.
    """

    block_m: int = 64
    block_n: int = 64
    warps: int = 8
    stages: int = 2
    programs: int = 1
    least: int = 1


def latent_config(call: LatentAttention) -> LatentConfig:
    """The configuration of a call, by its heads, rows, entry size and type, and by what the device can hold."""
    heads, width = call.q.shape[1:]
    rows = 1 if call.positions is not None else min(64, max(1, call.rows.max_query_len))
    lanes = triton.next_power_of_2(heads) * triton.next_power_of_2(rows)
    return _config(min(64, max(16, lanes)), width * call.q.element_size(), limits(call.q.device).shared_memory)


@cache
def _config(lanes: int, row_bytes: int, room: int) -> LatentConfig:
    if row_bytes > 1536:  # fp32 entries of GLM's size: without tensor cores, for checks
        return LatentConfig(block_m=16, block_n=16, warps=4, stages=1)
    config = LatentConfig(block_m=lanes, warps=8 if lanes * row_bytes > 16 * 1536 else 4)
    while config.stages > 1 and (lanes + config.stages * config.block_n) * row_bytes + 1024 > room:
        config = replace(config, stages=config.stages - 1)
    return config


@triton.jit
def _attend(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    values: tl.tensor,
    keys: tl.tensor,
    visible: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    factor: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds one tile of entries, values [BLOCK_N, L] and rotated keys [BLOCK_N, R], to the running softmax."""
    values = values.to(q_latent.dtype)
    scores = tl.dot(q_rope, tl.trans(keys.to(q_rope.dtype)), input_precision="ieee")
    scores = tl.dot(q_latent, tl.trans(values), scores, input_precision="ieee")
    scores = tl.where(visible, scores * factor, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(
    do_not_specialize=("table_stride", "list_stride", "tokens", "requests", "pieces", "least"),
    do_not_specialize_on_alignment=("tables_ptr", "starts_ptr", "contexts_ptr", "lists_ptr"),
)
def latent_attention_kernel(
    q_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    list_stride: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    pieces: tl.tensor,
    least: tl.tensor,
    factor: tl.tensor,
    LIST: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program ROWS rows of a request, HEAD_LANES heads and a piece of positions. LIST is the lists' length or 0."""
    wait_for_inputs(PDL)
    WIDTH: tl.constexpr = LATENT + ROPE
    piece = tl.program_id(0) % pieces
    tile = tl.program_id(0) // pieces
    request, first, end_row, context = locate_tile(starts_ptr, contexts_ptr, requests, tokens, tile, ROWS, BLOCK_B)
    if request <= requests:
        lane = tl.arange(0, BLOCK_M)
        row = first + lane // HEAD_LANES
        head = tl.program_id(1) * HEAD_LANES + lane % HEAD_LANES
        real = (row < tl.minimum(first + ROWS, end_row)) & (head < HEADS)
        token = row.to(tl.int64)
        latent = tl.arange(0, BLOCK_L)
        rope = tl.arange(0, BLOCK_R)
        q_place = q_ptr + (token * q_stride_token + head * q_stride_head)[:, None]
        q_latent = tl.load(q_place + latent[None, :], mask=real[:, None] & (latent < LATENT)[None, :], other=0.0)
        q_rope = tl.load(q_place + LATENT + rope[None, :], mask=real[:, None] & (rope < ROPE)[None, :], other=0.0)

        # The piece's positions, or its places in the list.
        reach = LIST if LIST else tl.minimum(context - end_row + tl.minimum(first + ROWS, end_row), context)
        length = tl.maximum(tl.cdiv(tl.cdiv(tl.maximum(reach, 0), BLOCK_N), pieces), least) * BLOCK_N
        begin = piece * length
        end = tl.minimum(begin + length, reach)
        list_ptr = lists_ptr + first.to(tl.int64) * list_stride
        stand_in = end - 1
        if LIST:
            place = begin + tl.arange(0, BLOCK_LIST)
            own = tl.load(list_ptr + place, mask=(place < end) & (context > 0), other=-1)
            # What is not visible is replaced by something that is, and so is finite; the rest of the list is left out.
            stand_in = tl.max(own, axis=0)
            end = tl.max(tl.where(own >= 0, place + 1, begin), axis=0)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        table_ptr = tables_ptr + request.to(tl.int64) * table_stride
        row_position = context - end_row + row
        index = tl.arange(0, BLOCK_N)
        # Where entries lie is found a tile ahead: else each load of entries would wait for two or three in a row.
        entry = find_entries(list_ptr, table_ptr, begin + index, end, stand_in, LIST, BLOCK_SIZE, WIDTH)
        for start in range(begin, end, BLOCK_N):
            entry_ptr = cache_ptr + entry[:, None]
            entry = find_entries(list_ptr, table_ptr, start + BLOCK_N + index, end, stand_in, LIST, BLOCK_SIZE, WIDTH)
            if LIST:
                visible = (tl.load(list_ptr + start + index, mask=start + index < end, other=-1) >= 0)[None, :]
            else:
                visible = start + index[None, :] <= row_position[:, None]
            if LATENT == BLOCK_L:
                values = tl.load(entry_ptr + latent[None, :])
            else:
                values = tl.load(entry_ptr + latent[None, :], mask=(latent < LATENT)[None, :], other=0.0)
            if ROPE == BLOCK_R:
                keys = tl.load(entry_ptr + LATENT + rope[None, :])
            else:
                keys = tl.load(entry_ptr + LATENT + rope[None, :], mask=(rope < ROPE)[None, :], other=0.0)
            top, total, acc = _attend(q_latent, q_rope, values, keys, visible, top, total, acc, factor)

        some = total > 0.0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        mask = real[:, None] & (latent < LATENT)[None, :]
        if SPLIT:
            part = (token * pieces + piece) * HEADS + head
            weight = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
            weights_ptr = parts_ptr + tokens.to(tl.int64) * pieces * (HEADS * LATENT)
            tl.store(weights_ptr + part, weight, mask=real)
            # Nobody reads the sums of a piece without weight.
            tl.store(parts_ptr + (part * LATENT)[:, None] + latent[None, :], acc, mask=mask & (end > begin))
        else:
            out_place = out_ptr + ((token * HEADS + head) * LATENT)[:, None] + latent[None, :]
            tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("pieces",))
def latent_combine_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pieces: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a row and head: the sum of its pieces, weighted by what each saw."""
    wait_for_inputs(PDL)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    latent = tl.arange(0, BLOCK_L)
    weights_ptr = parts_ptr + tl.num_programs(1).to(tl.int64) * pieces * (HEADS * LATENT)
    top = tl.max(tl.full([CHUNK], float("-inf"), tl.float32), axis=0)
    total = tl.sum(tl.zeros([CHUNK], tl.float32), axis=0)
    acc = tl.zeros([BLOCK_L], tl.float32)
    for start in range(0, pieces, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        part = (token * pieces + piece) * HEADS + head
        weight = tl.load(weights_ptr + part, mask=piece < pieces, other=float("-inf"))
        some = weight > float("-inf")
        mask = some[:, None] & (latent < LATENT)[None, :]
        sums = tl.load(parts_ptr + (part * LATENT)[:, None] + latent[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(weight, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        share = tl.exp2(weight - base)
        total = total * shrink + tl.sum(share, axis=0)
        acc = acc * shrink + tl.sum(sums * share[:, None], axis=0)
        top = new_top
    acc = acc / tl.where(total > 0.0, total, 1.0)
    out_place = out_ptr + (token * HEADS + head) * LATENT + latent
    tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=latent < LATENT)


def latent_attention_triton(call: LatentAttention, config: LatentConfig | None = None) -> None:
    """One launch, or two where positions are cut. Reads nothing of the device."""
    q, cache_, rows, scale, lists, out = call
    tokens, heads, width = q.shape
    requests = rows.context_lens.shape[0]
    if tokens == 0:
        return
    config = config or latent_config(call)
    size = out.shape[2]
    constants = _constants(config, heads, size, width - size, cache_.shape[1], requests.bit_length())
    list_size = 0 if lists is None else lists.shape[1]
    each = config.block_m // constants["HEAD_LANES"] if lists is None else 1
    tiles = most_tiles(tokens, requests, each)
    head_tiles = -(-heads // constants["HEAD_LANES"])
    longest = -(-(list_size or rows.max_context_len) // (config.block_n * config.least))
    room = config.programs * limits(q.device).processors // (tiles * head_tiles)
    pieces = max(1, min(room, longest))
    parts = q.new_empty(tokens * pieces * heads * (size + 1) if pieces > 1 else 1, dtype=torch.float32)
    dependent = dependent_launch(q.device)
    latent_attention_kernel[(tiles * pieces, head_tiles)](
        q,
        cache_,
        rows.block_tables,
        rows.query_starts,
        rows.context_lens,
        rows.block_tables if lists is None else lists,
        out,
        parts,
        q.stride(0),
        q.stride(1),
        rows.block_tables.stride(0),
        0 if lists is None else lists.stride(0),
        tokens,
        requests,
        pieces,
        config.least,
        scale * math.log2(math.e),
        LIST=list_size,
        SPLIT=pieces > 1,
        ROWS=each,
        BLOCK_LIST=triton.next_power_of_2(max(1, list_size)),
        num_warps=config.warps,
        num_stages=config.stages,
        **constants,
        **dependent,
    )
    if pieces > 1:
        block = constants["BLOCK_L"]
        chunk = max(1, min(16, 8192 // block))
        latent_combine_kernel[(heads, tokens)](
            parts, out, pieces, HEADS=heads, LATENT=size, BLOCK_L=block, CHUNK=chunk, **dependent
        )


@cache
def _constants(
    config: LatentConfig, heads: int, latent: int, rope: int, block_size: int, request_bits: int
) -> dict[str, int]:
    """What the kernel is compiled for; kept, for this runs in each layer of each step."""
    constants = {"HEADS": heads, "HEAD_LANES": min(config.block_m, triton.next_power_of_2(heads))}
    constants |= {"LATENT": latent, "ROPE": rope, "BLOCK_SIZE": block_size}
    constants |= {"BLOCK_L": max(16, triton.next_power_of_2(latent)), "BLOCK_R": max(16, triton.next_power_of_2(rope))}
    return constants | {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_B": max(64, 2**request_bits)}
