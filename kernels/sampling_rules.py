"""What the launches of `sample` on a GPU share: weights, the order of values, a row's options and its draw."""

from __future__ import annotations

import math

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0**40)  # the likeliest token's weight
_LOG2E = tl.constexpr(math.log2(math.e))

# Rows of the scratch of whole-number sums.
TOTAL, ABOVE_COUNT, ABOVE, ABOVE_KEPT = (tl.constexpr(index) for index in range(4))


@triton.jit
def options_of(
    temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, row: tl.tensor, vocab: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Temperature fp32, top-k int64 (0 for none), top-p fp64 of a row."""
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_k = tl.where(top_k < vocab, top_k, 0)
    return tl.load(temperature_ptr + row), top_k, tl.load(top_p_ptr + row).to(tl.float64)


@triton.jit
def largest_of(peaks: tl.tensor) -> tl.tensor:
    """Largest logit of a row from those of its chunks; infinite where a logit is NaN."""
    return tl.max(tl.where(peaks != peaks, float("inf"), peaks))


@triton.jit
def ratio(scores: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Probability over that of the likeliest token."""
    return tl.exp2((scores - largest) * (_LOG2E / temperature))


@triton.jit
def order_key(scores: tl.tensor) -> tl.tensor:
    """An int32 in the order of the fp32 `scores`; -0 and 0 are equal."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def uniform(key: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Element `number` of the SplitMix64 stream that starts at `key`, 53 bits of it as fp64 in [0, 1)."""
    z = key.to(tl.int64).to(tl.uint64, bitcast=True)
    z += (number.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16
