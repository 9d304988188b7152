"""The floors are those that were worked out by hand for real shapes on a device of 4.3 TB/s and 790 TFLOP/s."""

from __future__ import annotations

import pytest

from hookline.benchmark.roofline import (
    Limits,
    ModelCosts,
    decode_floor,
    prefill_floor,
    serial_decode_floor,
    workload_floor,
)
from hookline.benchmark.workload import Lengths, fixed_lengths

CARD = Limits(4.3e12, 790e12, 650e12)
ATTENTION, MLP, HEAD = 2 * 4096 * (4096 + 1024), 3 * 4096 * 14336, 128256 * 4096
# 32 layers, 4096 wide, 32 heads of 128 and 8 key-value heads, in 16 bits; without the norms.
DENSE = ModelCosts(
    layer_bytes=2 * 32 * (ATTENTION + MLP),
    layer_weights=32 * (ATTENTION + MLP),
    head_bytes=2 * HEAD,
    head_weights=HEAD,
    cache_bytes=131072,
    attention_width=32 * 4096,
)
SPARSE_HEAD = 32000 * 4096
SPARSE = ModelCosts(
    layer_bytes=2 * 32 * ATTENTION,
    layer_weights=32 * ATTENTION,
    head_bytes=2 * SPARSE_HEAD,
    head_weights=SPARSE_HEAD,
    cache_bytes=131072,
    attention_width=32 * 4096,
    expert_bytes=2 * 32 * 8 * MLP,
    expert_weights=32 * 8 * MLP,
    num_experts=8,
    experts_per_token=2,
)


def milliseconds(seconds: float | None) -> float:
    assert seconds is not None
    return 1e3 * seconds


def test_bytes_of_a_step() -> None:
    assert DENSE.step_bytes(1) == pytest.approx(15.01e9, rel=1e-3)
    assert DENSE.step_bytes(256) == DENSE.step_bytes(1)
    assert SPARSE.step_bytes(1) == pytest.approx(25.5e9, rel=5e-3)
    assert SPARSE.step_bytes(10_000) == pytest.approx(93e9, rel=5e-3)


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        *((1, 1024, 3.52), (1, 8192, 3.74), (8, 1024, 3.74), (32, 1024, 4.49), (128, 1024, 7.49), (256, 1024, 11.48)),
        *((1, 1088, 3.52), (32, 1088, 4.55), (256, 1088, 11.98)),
    ],
)
def test_decode_floors_of_a_dense_model(batch: int, context: int, expected: float) -> None:
    assert milliseconds(decode_floor(DENSE, CARD, batch, context)) == pytest.approx(expected, abs=0.01)


def test_serial_floor_counts_products_that_are_bound_by_arithmetic() -> None:
    assert milliseconds(serial_decode_floor(DENSE, CARD, 256, 1024)) == pytest.approx(12.85, abs=0.03)
    assert serial_decode_floor(DENSE, CARD, 1, 1024) == pytest.approx(decode_floor(DENSE, CARD, 1, 1024))


def test_a_decode_floor_is_not_below_the_arithmetic() -> None:
    slow = Limits(4.3e12, 1e12, 1e12)
    assert decode_floor(DENSE, slow, 64, 0) == pytest.approx(64 * DENSE.token_flops / 1e12)


@pytest.mark.parametrize(("batch", "context", "expected"), [(1, 1024, 5.96), (32, 1024, 22.66), (128, 1024, 25.66)])
def test_decode_floors_with_experts(batch: int, context: int, expected: float) -> None:
    assert milliseconds(decode_floor(SPARSE, CARD, batch, context)) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("prompts", "expected"), [([1024], 18.5), ([2048], 37.9), ([8192], 171.8), ([1024] * 32, 592)])
def test_prefill_floors(prompts: list[int], expected: float) -> None:
    assert milliseconds(prefill_floor(DENSE, CARD, prompts)) == pytest.approx(expected, rel=3e-3)


def test_a_short_prefill_is_bound_by_the_weights() -> None:
    assert prefill_floor(DENSE, CARD, [4]) == pytest.approx(DENSE.step_bytes(4) / 4.3e12)


# The published figures let every prompt token pass the head, which only the last one does: ours are a little higher.
@pytest.mark.parametrize(
    ("prompt", "output", "published"),
    [(1000, 1000, 11890), (202, 179, 20246), (2048, 2048, 7551), (20000, 2000, 1005)],
)
def test_rooflines_of_workloads(prompt: int, output: int, published: float) -> None:
    count = 1000
    seconds = workload_floor(DENSE, CARD, fixed_lengths(count, prompt, output), batch=512)
    assert seconds is not None
    assert published * 0.99 < count * output / seconds < published * 1.09


def test_one_request_at_a_time_is_the_sum_of_its_steps() -> None:
    work, steps = [Lengths(1024, 128)], 127
    prefill, step = prefill_floor(DENSE, CARD, [1024]), decode_floor(DENSE, CARD, 1, 1024 + 64)
    assert prefill is not None and step is not None
    assert workload_floor(DENSE, CARD, work, batch=1) == pytest.approx(prefill + steps * step)


def test_what_is_not_known_gives_no_floor() -> None:
    blind, read_only = Limits(), Limits(4.2e12)
    assert decode_floor(DENSE, blind, 1, 1024) is None
    assert prefill_floor(DENSE, read_only, [8]) is None
    assert serial_decode_floor(DENSE, read_only, 1, 8) is None
    assert workload_floor(DENSE, read_only, [Lengths(1, 2)], 1) is None
    assert decode_floor(DENSE, read_only, 1, 1024) == pytest.approx(3.606e-3, rel=1e-2)
