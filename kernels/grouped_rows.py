"""What the grouped products of grouped_gemm.py share on a GPU: whose rows a program has, and the sum over experts.

The pairs of an expert are cut into tiles of BLOCK_M; `find_item` says which tile of which expert has a number, counting
the tiles of all experts. So programs are numbered without gaps and those without work, of which the host only knows
that there may be some, come last.

    combine_parts:  y[t] = sum over j of weights[t, j] * sum over s of parts[t * k + j, s]

Shapes: starts [E + 1], parts [P, S, M] fp32 in the order of the pairs' numbers, weights [T, k] fp32, y [T, M].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from hookline_kernels.launch import dependent_launch, wait_for_inputs


def most_items(pairs: int, experts: int, block_m: int) -> int:
    """The most tiles of `block_m` that the pairs can make, however they are spread over the experts."""
    active = min(pairs, experts)
    return active + (pairs - active) // block_m


@triton.jit
def find_item(
    starts_ptr: tl.tensor, experts: tl.tensor, number: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the tile with a number: its expert, the expert's first pair and the end of its pairs, the number of its first
    tile and of its tiles, 0 where there are fewer tiles in all.
    """
    ids = tl.arange(0, BLOCK_E)
    begins = tl.load(starts_ptr + ids, mask=ids < experts, other=0)
    ends = tl.load(starts_ptr + ids + 1, mask=ids < experts, other=0)
    tiles = (ends - begins + (BLOCK_M - 1)) // BLOCK_M
    upto = tl.cumsum(tiles, axis=0)
    own = (upto > number) & (upto - tiles <= number)
    expert = tl.sum(tl.where(own, ids, 0))
    begin = tl.sum(tl.where(own, begins, 0))
    end = tl.sum(tl.where(own, ends, 0))
    first = tl.sum(tl.where(own, upto - tiles, 0))
    return expert, begin, end, first, tl.sum(tl.where(own, tiles, 0))


@triton.jit
def count_items(starts_ptr: tl.tensor, experts: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr) -> tl.tensor:
    """Tiles of all experts."""
    ids = tl.arange(0, BLOCK_E)
    begins = tl.load(starts_ptr + ids, mask=ids < experts, other=0)
    ends = tl.load(starts_ptr + ids + 1, mask=ids < experts, other=0)
    return tl.sum((ends - begins + (BLOCK_M - 1)) // BLOCK_M)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """f(gate) * up; the codes are those of `linear_small.GATED_CODES`."""
    if CODE == 0:
        y = gate * tl.sigmoid(gate) * up
    elif CODE == 1:
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    return y


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    y_ptr: tl.tensor,
    columns: tl.tensor,
    splits: tl.tensor,
    TOP_K: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a token and BLOCK_N columns; everything is contiguous."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        part = tl.zeros((BLOCK_N,), tl.float32)
        for split in tl.static_range(SPLIT_LIMIT):
            there = (n < columns) & (split < splits)
            place = parts_ptr + (pair * splits + split) * columns + n
            part += tl.load(place, mask=there, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * part
    tl.store(y_ptr + token * columns + n, total.to(y_ptr.dtype.element_ty), mask=n < columns)


def split_limit(splits: int) -> int:
    """The bound that a kernel is compiled for: few variants for all numbers of splits."""
    return 1 if splits == 1 else max(4, triton.next_power_of_2(splits))


def combine_parts(
    parts: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, *, compile_only: bool = False
) -> torch.Tensor:
    """One launch: the weighted sum [T, M] of parts [P, S, M], in a type."""
    (tokens, top_k), (_, splits, columns) = weights.shape, parts.shape
    y = torch.empty((tokens, columns), dtype=dtype, device=parts.device)
    if y.numel() == 0:
        return y
    # For few tokens small programs, so that all multiprocessors have some.
    block_n = 256 if tokens < 64 else 1024
    grid = (tokens, triton.cdiv(columns, block_n))
    kernel: Any = combine_kernel
    launch = partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
    launch(
        parts,
        weights,
        y,
        columns,
        splits,
        TOP_K=top_k,
        SPLIT_LIMIT=split_limit(splits),
        BLOCK_N=block_n,
        num_warps=2 if block_n == 256 else 4,
        **dependent_launch(parts.device),
    )
    return y
