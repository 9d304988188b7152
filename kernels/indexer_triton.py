"""The Triton kernels of the indexer: see `indexer` for the formula.

Some rows at a time, so that their scores fit `SCRATCH`:

1.  score: the scores of a tile of rows of one request against a share of its positions, as keys [rows, C] int32 whose
    order is that of the scores. Nothing is computed for rows that see no more than top_k positions.
2.  select, one program a row: see `indexer_select`.
    Contexts above `SEGMENT` are cut: a program a segment first, and then one a row for the segments' choices.

How much work there is follows from the device's numbers; the host's bounds set shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hookline_kernels.indexer_select import order_key, select_kernel
from hookline_kernels.launch import dependent_launch, wait_for_inputs
from hookline_kernels.paged_context import limits
from hookline_kernels.paged_rows import PagedRows, find_entries, locate_tile, most_tiles

# Scores that are kept at a time.
SCRATCH = 2**24
# Rows of a launch: what a grid's second dimension holds.
_MOST_ROWS = 2**15
# Longest context that one program selects from: its keys stay in a processor's own cache.
SEGMENT = 2**13


class IndexTopk(NamedTuple):
    """A checked call of `index_topk`, as each implementation gets it.

    Attributes:
        q: [T, I, D], the last dimension contiguous; may be a strided view.
        weights: contiguous [T, I] fp32.
        cache: contiguous [blocks, S, D].
        rows: the requests' rows and blocks.
        out: contiguous [T, top_k] int32 to write into.
    """

    q: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor
    rows: PagedRows
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """How the kernels are cut and compiled.

    Attributes:
        block_m: positions of a tile.
        lanes: heads times rows of a tile.
        warps, stages: Triton's num_warps and num_stages of `score_kernel`.
        programs: of `score_kernel` for each of the device's processors, as long as positions last.
        chunk: keys that `select_kernel` looks at at a time.
        select_warps: its num_warps.
        scratch, segment: what `SCRATCH` and `SEGMENT` are for.
    """

    block_m: int = 128
    lanes: int = 128
    warps: int = 8
    stages: int = 3
    programs: int = 2
    chunk: int = 4096
    select_warps: int = 16
    scratch: int = SCRATCH
    segment: int = SEGMENT


def index_config(call: IndexTopk) -> IndexConfig:
    """The configuration of a call, by its heads, rows, key size and type."""
    heads = triton.next_power_of_2(call.q.shape[1])
    rows = triton.next_power_of_2(min(64, max(1, call.rows.max_query_len)))
    return _config(heads * rows, max(heads, 16), call.q.shape[2] * call.q.element_size())


@cache
def _config(wanted: int, least: int, row_bytes: int) -> IndexConfig:
    lanes = max(least, min(128, wanted))
    if row_bytes > 256:  # fp32, without tensor cores
        return IndexConfig(block_m=32, lanes=max(least, min(32, wanted)), warps=4, stages=1)
    return IndexConfig(lanes=lanes, warps=8 if lanes > 64 else 4)


@triton.jit(
    do_not_specialize=("table_stride", "row_units", "tokens", "requests", "pieces", "begin_row", "end_row"),
    do_not_specialize_on_alignment=("tables_ptr", "starts_ptr", "contexts_ptr"),
)
def score_kernel(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    row_units: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    pieces: tl.tensor,
    begin_row: tl.tensor,
    end_row: tl.tensor,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a tile of rows and a piece of their positions; writes those of rows begin_row to end_row alone.

    A row of keys has 16 * row_units places.
    """
    wait_for_inputs(PDL)
    piece = tl.program_id(0) % pieces
    tile = tl.program_id(0) // pieces
    request, first, request_end, context = locate_tile(starts_ptr, contexts_ptr, requests, tokens, tile, ROWS, BLOCK_B)
    last = tl.minimum(first + ROWS, request_end)
    reach = tl.minimum(context - request_end + last, context)
    if (request < requests) & (reach > TOP_K) & (first < end_row) & (last > begin_row):
        lane = tl.arange(0, ROWS * HEAD_LANES)
        row = first + lane // HEAD_LANES
        head = lane % HEAD_LANES
        dim = tl.arange(0, BLOCK_D)
        real = (row < last) & (head < HEADS)
        token = row.to(tl.int64)
        q_place = q_ptr + (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :]
        q = tl.load(q_place, mask=real[:, None] & (dim < SIZE)[None, :], other=0.0)
        weight = tl.load(weights_ptr + token * HEADS + head, mask=real, other=0.0)

        length = tl.cdiv(tl.cdiv(reach, BLOCK_M), pieces) * BLOCK_M
        begin = piece * length
        end = tl.minimum(begin + length, reach)
        table_ptr = tables_ptr + request.to(tl.int64) * table_stride
        out_row = first + tl.arange(0, ROWS)
        out_real = (out_row < tl.minimum(last, end_row)) & (out_row >= begin_row)
        out_place = keys_ptr + (out_row - begin_row).to(tl.int64) * row_units * 16
        index = tl.arange(0, BLOCK_M)
        # Where keys lie is found a tile ahead: else each load of keys would wait for another.
        entry = find_entries(table_ptr, table_ptr, begin + index, end, end - 1, 0, BLOCK_SIZE, SIZE)
        for start in range(begin, end, BLOCK_M):
            entry_ptr = cache_ptr + entry[:, None]
            entry = find_entries(table_ptr, table_ptr, start + BLOCK_M + index, end, end - 1, 0, BLOCK_SIZE, SIZE)
            if SIZE == BLOCK_D:
                keys = tl.load(entry_ptr + dim[None, :])
            else:
                keys = tl.load(entry_ptr + dim[None, :], mask=(dim < SIZE)[None, :], other=0.0)
            scores = tl.dot(keys.to(q.dtype), tl.trans(q), input_precision="ieee")
            # Plain `maximum` would turn NaN into 0.
            scores = tl.where(scores < 0.0, 0.0, scores) * weight[None, :]
            total = tl.sum(tl.reshape(scores, [BLOCK_M, ROWS, HEAD_LANES]), axis=2)
            inside = (start + index < end)[:, None] & out_real[None, :]
            tl.store(out_place[None, :] + (start + index)[:, None], order_key(total), mask=inside)


def index_topk_triton(call: IndexTopk, config: IndexConfig | None = None) -> None:
    """Two launches for as many rows as fit the scratch: three where contexts may be cut, one where nothing is scored.

    Reads nothing of the device.
    """
    tokens, top_k = call.out.shape
    requests, longest = call.rows.context_lens.shape[0], call.rows.max_context_len
    if tokens == 0:
        return
    config = config or index_config(call)
    scored = longest > top_k
    segments = -(-longest // config.segment) if scored else 1
    row_units = -(-longest // 16)
    step = min(tokens, _MOST_ROWS, max(1, config.scratch // (row_units * 16)) if scored else tokens)
    keys = call.out.new_empty(step * row_units * 16 + config.chunk if scored else 1)
    kept_size = step * segments * top_k
    kept_size = -(-kept_size // 16) * 16 + config.chunk  # both parts aligned
    kept = call.out.new_empty(2, kept_size if segments > 1 else 1)
    common: dict[str, Any] = {"BLOCK_B": max(64, 2 ** requests.bit_length()), "TOP_K": top_k}
    common |= dependent_launch(call.out.device)
    select = common | {"SEGMENT": config.segment, "CHUNK": config.chunk, "num_warps": config.select_warps}
    pointers = (keys, call.rows.query_starts, call.rows.context_lens, kept[0], kept[1], call.out)
    for begin in range(0, tokens, step):
        end = min(tokens, begin + step)
        if scored:
            _score(call, config, keys, begin, end, common)
        for stage in (1, 2) if segments > 1 else (0,):
            grid = (1 if stage == 2 else segments, end - begin)
            select_kernel[grid](*pointers, row_units, tokens, requests, begin, segments, STAGE=stage, **select)


def _score(
    call: IndexTopk, config: IndexConfig, keys: torch.Tensor, begin: int, end: int, common: dict[str, Any]
) -> None:
    """The keys of rows begin to end."""
    q, weights, cache_, rows, _ = call
    tokens, heads, size = q.shape
    requests = rows.context_lens.shape[0]
    head_lanes = triton.next_power_of_2(heads)
    each = max(1, config.lanes // head_lanes)
    tiles = most_tiles(tokens, requests, each)
    longest = -(-rows.max_context_len // config.block_m)
    pieces = max(1, min(longest, -(-config.programs * limits(q.device).processors // tiles)))
    score_kernel[(tiles * pieces,)](
        q,
        weights,
        cache_,
        rows.block_tables,
        rows.query_starts,
        rows.context_lens,
        keys,
        q.stride(0),
        q.stride(1),
        rows.block_tables.stride(0),
        -(-rows.max_context_len // 16),
        tokens,
        requests,
        pieces,
        begin,
        end,
        HEADS=heads,
        HEAD_LANES=head_lanes,
        ROWS=each,
        SIZE=size,
        BLOCK_SIZE=cache_.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(size)),
        num_warps=config.warps,
        num_stages=config.stages,
        **common,
    )
