"""Grouped products of many pairs on a GPU: large tiles, each of one expert's pairs.

    gated_tiles:    h[i] = f(g) * u, the halves of x[order[i] // k] weight[e]^T + bias[e]       h [P, F]
    combine_tiles:  y[t] = sum over j of weights[t, j] * (h of pair (t, j) weight[e]^T + bias[e])    y [T, M]

A program makes the gate and the up sums of its tile together, so the activation is applied to sums in registers. The
tiles of an expert are numbered so that those that run together share rows of the weight and of x: GROUP_M tiles of
pairs for one block of columns, then the next block. Rows of x are gathered by the loads themselves, or by one launch
before so that TMA ("tensor memory accelerator", Hopper and later) can fetch them too. The second product leaves fp32
sums to `combine_parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline_kernels.grouped_rows import combine_parts, count_items, find_item, gated, most_items
from hookline_kernels.launch import check_choices
from hookline_kernels.moe_routing import Dispatch

# What TMA fetches: nothing, the weight, or x as well, which it can where x's rows lie in the dispatch's order.
TMA = ("none", "weight", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """How one shape is computed; `block_n` are columns of y, and a gated product has twice as many rows of the weight.

    Attributes:
        group_m: tiles of pairs that run together for one block of columns.
        persistent: one program a multiprocessor, which takes one tile after the other.
        overlap: a persistent program begins to fetch its next tile before it has stored this one.

    Raises:
        ValueError: a value that the kernel cannot take.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 4
    group_m: int = 16
    tma: str = "both"
    persistent: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        allowed = {
            "block_m": (16, 32, 64, 128, 256),
            "block_n": (16, 32, 64, 128, 256),
            "block_k": (16, 32, 64, 128, 256),
            "warps": (1, 2, 4, 8, 16),
            "stages": tuple(range(1, 9)),
            "group_m": (1, 2, 4, 8, 16, 32, 64),
            "tma": TMA,
            "persistent": (False, True),
            "overlap": (False, True),
        }
        check_choices(self, allowed)

    def shared_bytes(self, width: int, has_gate: bool) -> int:
        """Shared memory of a program, about, for elements of `width` bytes."""
        fetched = self.stages * (self.block_n * (2 if has_gate else 1) + self.block_m) * self.block_k * width
        stored = self.block_m * self.block_n * (width if has_gate else 1)
        return fetched + (stored if self.persistent and self.overlap else 0)


@triton.jit
def _rows_of_x(
    x: tl.tensor,
    places: tl.tensor,
    m: tl.tensor,
    end: tl.tensor,
    m_begin: tl.tensor,
    at: tl.tensor,
    inner: tl.tensor,
    BY_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_M, BLOCK_K]. Beyond an expert's pairs TMA fetches those of the next, whose sums are not stored."""
    if BY_TMA:
        tile = x.load([m_begin, at])
    elif EVEN_K:
        tile = tl.load(places + at, mask=(m < end)[:, None], other=0.0)
    else:
        k = at + tl.arange(0, BLOCK_K)
        tile = tl.load(places + at, mask=(m < end)[:, None] & (k < inner)[None, :], other=0.0)
    return tile


@triton.jit
def _rows_of_weight(
    weight: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    matrix: tl.tensor,
    n_begin: tl.tensor,
    at: tl.tensor,
    inner: tl.tensor,
    HALVES: tl.constexpr,
    BY_TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_K, HALVES * BLOCK_N]: rows of the gate and then as many of the up half, transposed."""
    if BY_TMA:
        tile = tl.reshape(weight.load([matrix, n_begin, at]), (HALVES * BLOCK_N, BLOCK_K))
    elif EVEN_N and EVEN_K:
        tile = tl.load(places + at)
    elif EVEN_K:
        tile = tl.load(places + at, mask=inside[:, None], other=0.0)
    else:
        k = at + tl.arange(0, BLOCK_K)
        tile = tl.load(places + at, mask=inside[:, None] & (k < inner)[None, :], other=0.0)
    return tl.trans(tile)


@triton.jit
def _halves(sums: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of [ROWS, 2 * COLUMNS]."""
    left, right = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return left, right


@triton.jit
def _store(
    sums: tl.tensor,
    y_ptr: tl.tensor,
    bias_at: tl.tensor,
    row: tl.tensor,
    kept: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Sums of the columns n, with their bias, into rows of y."""
    if HAS_BIAS:
        sums += tl.load(bias_at + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    place = y_ptr + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, sums.to(y_ptr.dtype.element_ty), mask=kept[:, None] & (n < columns)[None, :])


@triton.jit
def _place(
    number: tl.tensor,
    starts_ptr: tl.tensor,
    experts: tl.tensor,
    n_blocks: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the tile of y with a number: its expert, the end of the expert's pairs, its first pair and first column."""
    expert, begin, end, first, tiles = find_item(starts_ptr, experts, number // n_blocks, BLOCK_M, BLOCK_E)
    inside = number - first * n_blocks
    a_group = GROUP_M * n_blocks
    first_m = inside // a_group * GROUP_M
    group = tl.minimum(tiles - first_m, GROUP_M)
    m_begin = begin + (first_m + inside % a_group % group) * BLOCK_M
    n_begin = inside % a_group // group * BLOCK_N
    return expert, end, m_begin, n_begin


@triton.jit
def _finish(
    total: tl.tensor,
    y_ptr: tl.tensor,
    bias_at: tl.tensor,
    row: tl.tensor,
    kept: tl.tensor,
    n_begin: tl.tensor,
    columns: tl.tensor,
    CODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Bias, activation and the store of a tile's sums."""
    QUARTER: tl.constexpr = BLOCK_N // 4
    n = n_begin + tl.arange(0, BLOCK_N)
    if CODE >= 0:
        gate, up = _halves(total, BLOCK_M, BLOCK_N)
        if HAS_BIAS:
            gate += tl.load(bias_at + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_at + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        _store(gated(gate, up, CODE), y_ptr, bias_at, row, kept, n, columns, False)
    elif BLOCK_N < 64:
        _store(total, y_ptr, bias_at, row, kept, n, columns, HAS_BIAS)
    else:
        # By quarters: they pass through shared memory, which is full of what was fetched for the next tile.
        n = n_begin + tl.arange(0, QUARTER)
        left, right = _halves(total, BLOCK_M, 2 * QUARTER)
        one, two = _halves(left, BLOCK_M, QUARTER)
        three, four = _halves(right, BLOCK_M, QUARTER)
        _store(one, y_ptr, bias_at, row, kept, n, columns, HAS_BIAS)
        _store(two, y_ptr, bias_at, row, kept, n + QUARTER, columns, HAS_BIAS)
        _store(three, y_ptr, bias_at, row, kept, n + 2 * QUARTER, columns, HAS_BIAS)
        _store(four, y_ptr, bias_at, row, kept, n + 3 * QUARTER, columns, HAS_BIAS)


@triton.jit
def grouped_tiles_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    CODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_PAIR: tl.constexpr,
    X_BY_TMA: tl.constexpr,
    WEIGHT_BY_TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Every tile of y whose number is the program's plus a multiple of their number: one, if they are enough.

    x and the weight [E * HALVES, columns, K] are pointers, or descriptors of tiles for TMA. With a TOP_K the rows of x
    are tokens, else (0) x lies in the dispatch's order, and so does y [P, columns], or BY_PAIR in the order of the
    pairs' numbers.
    """
    HALVES: tl.constexpr = 2 if CODE >= 0 else 1
    k = tl.arange(0, BLOCK_K)
    n_blocks = tl.cdiv(columns, BLOCK_N)
    all_tiles = count_items(starts_ptr, experts, BLOCK_M, BLOCK_E) * n_blocks
    for number in tl.range(tl.program_id(0), all_tiles, tl.num_programs(0), flatten=OVERLAP):
        expert, end, m_begin, n_begin = _place(
            number, starts_ptr, experts, n_blocks, BLOCK_M, BLOCK_N, BLOCK_E, GROUP_M
        )
        m = m_begin + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + m, mask=m < end, other=0)
        x_places, weight_places, inside_n = k, k, k
        if not X_BY_TMA:
            row = m if TOP_K == 0 else pair // TOP_K
            x_places = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        if not WEIGHT_BY_TMA:
            both = tl.arange(0, HALVES * BLOCK_N)
            inside_n = n_begin + both % BLOCK_N < columns
            rows = (expert.to(tl.int64) * HALVES + both // BLOCK_N) * columns + n_begin + both % BLOCK_N
            weight_places = weight + rows[:, None] * inner + k[None, :]
        # Gate and up sums side by side: one wide matrix instruction makes both.
        total = tl.zeros((BLOCK_M, HALVES * BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(inner, BLOCK_K)):
            at = step * BLOCK_K
            x_rows = _rows_of_x(x, x_places, m, end, m_begin, at, inner, X_BY_TMA, EVEN_K, BLOCK_K)
            weight_rows = _rows_of_weight(
                weight,
                weight_places,
                inside_n,
                expert * HALVES,
                n_begin,
                at,
                inner,
                HALVES,
                WEIGHT_BY_TMA,
                EVEN_N,
                EVEN_K,
                BLOCK_N,
                BLOCK_K,
            )
            total = tl.dot(x_rows, weight_rows, total, input_precision="ieee")
        bias_at = bias_ptr + expert.to(tl.int64) * columns * HALVES
        row = pair if BY_PAIR else m
        _finish(total, y_ptr, bias_at, row, m < end, n_begin, columns, CODE, HAS_BIAS, BLOCK_M, BLOCK_N)


def why_no_tma(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why TMA cannot fetch rows of x and of the weight [E, N, K]; None where it can."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "it needs Hopper or later"
    strides = (x.stride(0) * x.itemsize, weight.shape[2] * weight.itemsize, x.data_ptr(), weight.data_ptr())
    return "rows are not aligned to 16 bytes" if any(stride % 16 for stride in strides) else None


def gated_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    code: int | None,
    bias: torch.Tensor | None,
    config: TilesConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """x [T, M], weight [E, 2F, M] contiguous; h [P, F] in the dispatch's order. One launch, three if TMA fetches x.

    Args:
        code: one of `linear_small.GATED_CODES`; None for the plain product [P, 2F].
        compile_only: the kernel is compiled (under `triton.AsyncCompileMode` in a thread) and not run.
    """
    columns = weight.shape[1] if code is None else weight.shape[1] // 2
    h = torch.empty((dispatch.order.shape[0], columns), dtype=x.dtype, device=x.device)
    top_k = dispatch.top_k
    if config.tma == "both":
        x, top_k = x.index_select(0, dispatch.order // top_k), 0
    _launch(x, weight, bias, h, dispatch, code, top_k, False, config, compile_only)
    return h


def combine_tiles(
    h: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    config: TilesConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """Two launches. h [P, F] in the dispatch's order, weight [E, M, F] contiguous, weights [T, k] fp32; y [T, M]."""
    parts = torch.empty((h.shape[0], 1, weight.shape[1]), dtype=torch.float32, device=h.device)
    _launch(h, weight, bias, parts, dispatch, None, 0, True, config, compile_only)
    return combine_parts(parts, weights, h.dtype, compile_only=compile_only)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    dispatch: Dispatch,
    code: int | None,
    top_k: int,
    by_pair: bool,
    config: TilesConfig,
    compile_only: bool,
) -> None:
    """Fills y, whose rows are in the dispatch's order or by pair."""
    if y.numel() == 0:
        return
    pairs, columns, experts, inner = y.shape[0], y.shape[-1], weight.shape[0], x.shape[1]
    halves, (block_m, block_n, block_k) = 1 if code is None else 2, (config.block_m, config.block_n, config.block_k)
    matrices = weight.view(experts * halves, columns, inner)
    by_tma = config.tma == "both"
    programs = most_items(pairs, experts, block_m) * triton.cdiv(columns, block_n)
    if config.persistent:
        programs = min(programs, _multiprocessors(x.device))
    kernel: Any = grouped_tiles_kernel
    launch = partial(kernel.warmup, grid=(programs,)) if compile_only else kernel[(programs,)]
    launch(
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if by_tma else x,
        matrices if config.tma == "none" else TensorDescriptor.from_tensor(matrices, [halves, block_n, block_k]),
        y if bias is None else bias,
        y,
        dispatch.order,
        dispatch.starts,
        experts,
        columns,
        inner,
        x.stride(0),
        CODE=-1 if code is None else code,
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        BY_PAIR=by_pair,
        X_BY_TMA=by_tma,
        WEIGHT_BY_TMA=config.tma != "none",
        EVEN_N=columns % block_n == 0,
        EVEN_K=inner % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_E=triton.next_power_of_2(experts),
        GROUP_M=config.group_m,
        OVERLAP=config.persistent and config.overlap,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
