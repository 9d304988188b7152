"""Grouped products of few pairs on a GPU, where the time is that of reading each active expert's weight once.

    gated_small:    h[i] = f(g) * u, the halves of x[order[i] // k] weight[e]^T + bias[e]       h [P, F]
    combine_small:  y[t] = sum over j of weights[t, j] * (h of pair (t, j) weight[e]^T + bias[e])    y [T, M]

As in linear_small.py a program takes BLOCK_N rows of a weight and a part of K, here of one expert and for up to BLOCK_M
of its pairs. Further tiles of an expert's pairs follow right after the first, so that they find its weight in the
second level cache. The gated product's parts of K are added by the program that arrives last at a tile; the second
product's are left to `combine_parts`, which adds the experts of a token anyway. Both add in a fixed order: equal calls
give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from hookline_kernels.grouped_rows import combine_parts, find_item, gated, most_items, split_limit
from hookline_kernels.launch import COUNTERS, arrival_counters, check_choices, dependent_launch
from hookline_kernels.linear_small import FORMS, add_product, as_rows, load_tile
from hookline_kernels.moe_routing import Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSmallConfig:
    """How one shape is computed; forms as in linear_small.py.

    Raises:
        ValueError: a value that the kernel cannot take.
    """

    form: str = "columns"
    block_m: int = 16
    block_n: int = 128
    block_k: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 3
    # Programmatic dependent launch: the kernel is started while the one before still runs.
    pdl: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "form": tuple(FORMS),
            "block_m": (1, 16, 32, 64, 128),
            "block_n": (1, 2, 4, 8, 16, 32, 64, 128, 256),
            "block_k": (16, 32, 64, 128, 256, 512, 1024, 2048),
            "splits": tuple(range(1, 17)),
            "warps": (1, 2, 4, 8),
            "stages": tuple(range(1, 9)),
            "pdl": (False, True),
        }
        check_choices(self, allowed)
        if (self.form == "vector") != (self.block_m == 1) or (self.form != "vector" and self.block_n < 16):
            raise ValueError(
                "GroupedSmallConfig: block_m 1 and block_n below 16 are for the form 'vector', "
                f"got {self.form!r} with {self.block_m} x {self.block_n}"
            )

    def shared_bytes(self, width: int, has_gate: bool) -> int:
        """Shared memory of a program, about, for elements of `width` bytes."""
        return self.stages * (self.block_n * (2 if has_gate else 1) + self.block_m) * self.block_k * width


@triton.jit
def _in_scratch(FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Where the sums of a part [BLOCK_M, BLOCK_N] lie: as in registers."""
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    return i + j * BLOCK_M if FORM == 1 else i * BLOCK_N + j


@triton.jit
def _is_last(
    gate: tl.tensor,
    up: tl.tensor,
    scratch: tl.tensor,
    count: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    CODE: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Leaves the sums of a part in scratch memory; whether all other parts of the tile are there already."""
    HALVES: tl.constexpr = 2 if CODE >= 0 else 1
    place = scratch + split * (HALVES * BLOCK_M * BLOCK_N) + _in_scratch(FORM, BLOCK_M, BLOCK_N)
    tl.store(place, gate)
    if CODE >= 0:
        tl.store(place + BLOCK_M * BLOCK_N, up)
    # All threads' stores come before one thread's release; its answer reaches all through a barrier of its own.
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def _sums_of_parts(
    scratch: tl.tensor,
    splits: tl.tensor,
    CODE: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sums of all parts, in their order."""
    HALVES: tl.constexpr = 2 if CODE >= 0 else 1
    place = scratch + _in_scratch(FORM, BLOCK_M, BLOCK_N)
    all_inside = tl.full((BLOCK_M, BLOCK_N), 1, tl.int1)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for part in tl.static_range(SPLIT_LIMIT):
        there = all_inside & (part < splits)
        own = place + part * (HALVES * BLOCK_M * BLOCK_N)
        gate += tl.load(own, mask=there, other=0.0, cache_modifier=".cg")
        if CODE >= 0:
            up += tl.load(own + BLOCK_M * BLOCK_N, mask=there, other=0.0, cache_modifier=".cg")
    return gate, up


@triton.jit(do_not_specialize=["splits"])
def grouped_small_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    count_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    splits: tl.tensor,
    CODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_PAIR: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a tile of an expert's pairs, BLOCK_N columns and a part of K.

    With a TOP_K the rows of x are tokens, else (0) x lies in the dispatch's order. y [P, columns] lies in that order,
    or BY_PAIR it is fp32 [P, splits, columns] in the order of the pairs' numbers, a row a part of K. ONCE: no expert
    has a second tile, so nothing of a weight is to be kept in a cache.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n_blocks = tl.cdiv(columns, BLOCK_N)
    an_item = n_blocks * splits
    item = tl.program_id(0) // an_item
    expert, begin, end, first, tiles = find_item(starts_ptr, experts, item, BLOCK_M, BLOCK_E)
    if tiles > 0:
        inside = tl.program_id(0) - first * an_item
        part = inside // tiles
        item = first + inside % tiles
        split, n_block = part % splits, part // splits
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        m = begin + (inside % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + m, mask=m < end, other=0)
        row = m if TOP_K == 0 else pair // TOP_K
        k = tl.arange(0, BLOCK_K)
        steps = tl.cdiv(inner, BLOCK_K)
        k_begin, k_end = split * steps // splits, (split + 1) * steps // splits
        HALVES: tl.constexpr = 2 if CODE >= 0 else 1
        weight_rows = weight_ptr + (expert.to(tl.int64) * columns * HALVES + n) * inner
        gate_places = weight_rows[:, None] + k[None, :]
        up_places = (weight_rows + tl.cast(columns, tl.int64) * inner)[:, None] + k[None, :]
        x_places = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        if FORM == 0:
            gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        elif FORM == 1:
            gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = gate
        POLICY: tl.constexpr = "evict_first" if ONCE else ""
        for step in tl.range(k_begin, k_end, num_stages=STAGES):
            at = step * BLOCK_K
            x = load_tile(x_places + at, m < end, at + k, inner, False, EVEN_K, "evict_last")
            weight = load_tile(gate_places + at, n < columns, at + k, inner, EVEN_N, EVEN_K, POLICY)
            gate = add_product(x, weight, gate, FORM)
            if CODE >= 0:
                weight = load_tile(up_places + at, n < columns, at + k, inner, EVEN_N, EVEN_K, POLICY)
                up = add_product(x, weight, up, FORM)
        gate, up = as_rows(gate, FORM), as_rows(up, FORM)
        kept = (m < end)[:, None] & (n < columns)[None, :]
        bias_at = bias_ptr + expert.to(tl.int64) * columns * HALVES + n
        if BY_PAIR:
            if HAS_BIAS:
                bias = tl.load(bias_at, mask=n < columns, other=0.0).to(tl.float32)
                gate += tl.where(split == 0, bias, 0.0)[None, :]
            place = y_ptr + (pair.to(tl.int64) * splits + split)[:, None] * columns + n[None, :]
            tl.store(place, gate, mask=kept)
        else:
            last = True
            if SPLIT_LIMIT > 1:
                tile = item * n_blocks + n_block
                size: tl.constexpr = HALVES * BLOCK_M * BLOCK_N
                scratch = partial_ptr + tile.to(tl.int64) * splits * size
                last = _is_last(gate, up, scratch, count_ptr + tile, split, splits, CODE, FORM, BLOCK_M, BLOCK_N)
                if last:
                    gate, up = _sums_of_parts(scratch, splits, CODE, FORM, SPLIT_LIMIT, BLOCK_M, BLOCK_N)
            if last:
                if HAS_BIAS:
                    gate += tl.load(bias_at, mask=n < columns, other=0.0).to(tl.float32)[None, :]
                    if CODE >= 0:
                        up += tl.load(bias_at + columns, mask=n < columns, other=0.0).to(tl.float32)[None, :]
                y = gated(gate, up, CODE) if CODE >= 0 else gate
                place = y_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
                tl.store(place, y.to(y_ptr.dtype.element_ty), mask=kept)


def gated_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    code: int | None,
    bias: torch.Tensor | None,
    config: GroupedSmallConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """One launch. x [T, M], weight [E, 2F, M] contiguous; h [P, F] in the dispatch's order.

    Args:
        code: one of `linear_small.GATED_CODES`; None for the plain product [P, 2F].
        compile_only: the kernel is compiled (under `triton.AsyncCompileMode` in a thread) and not run.

    Raises:
        RuntimeError: a device's first call with splits is captured in a CUDA graph.
    """
    columns = weight.shape[1] if code is None else weight.shape[1] // 2
    h = torch.empty((dispatch.order.shape[0], columns), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, h, dispatch, code, dispatch.top_k, config, compile_only)
    return h


def combine_small(
    h: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    config: GroupedSmallConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """Two launches. h [P, F] in the dispatch's order, weight [E, M, F] contiguous, weights [T, k] fp32; y [T, M]."""
    splits = max(1, min(config.splits, triton.cdiv(h.shape[1], config.block_k)))
    parts = torch.empty((h.shape[0], splits, weight.shape[1]), dtype=torch.float32, device=h.device)
    _launch(h, weight, bias, parts, dispatch, None, 0, config, compile_only)
    return combine_parts(parts, weights, h.dtype, compile_only=compile_only)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    dispatch: Dispatch,
    code: int | None,
    top_k: int,
    config: GroupedSmallConfig,
    compile_only: bool,
) -> None:
    """Fills y; [P, S, columns] has a row a part of K, by pair."""
    if y.numel() == 0:
        return
    by_pair, pairs, columns, inner = y.dim() == 3, y.shape[0], y.shape[-1], x.shape[1]
    experts, block_m, block_n = weight.shape[0], config.block_m, config.block_n
    items, n_blocks = most_items(pairs, experts, block_m), triton.cdiv(columns, block_n)
    scratch, counters = y, y  # never touched without splits
    splits = y.shape[1] if by_pair else max(1, min(config.splits, triton.cdiv(inner, config.block_k)))
    if not by_pair and splits > 1:
        if items * n_blocks > COUNTERS:
            splits = 1
        else:
            size = items * n_blocks * splits * block_m * block_n * (1 if code is None else 2)
            scratch = torch.empty(size, dtype=torch.float32, device=x.device)
            counters = arrival_counters(x.device)
    options = dependent_launch(x.device) if config.pdl else {"PDL": False}
    grid = (items * n_blocks * splits,)
    kernel: Any = grouped_small_kernel
    launch = partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
    launch(
        x,
        weight,
        y if bias is None else bias,
        y,
        scratch,
        counters,
        dispatch.order,
        dispatch.starts,
        experts,
        columns,
        inner,
        x.stride(0),
        splits,
        CODE=-1 if code is None else code,
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        BY_PAIR=by_pair,
        FORM=FORMS[config.form],
        SPLIT_LIMIT=1 if by_pair else split_limit(splits),
        EVEN_N=columns % block_n == 0,
        EVEN_K=inner % config.block_k == 0,
        ONCE=pairs // dispatch.top_k <= block_m,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        BLOCK_E=triton.next_power_of_2(experts),
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **options,
    )
