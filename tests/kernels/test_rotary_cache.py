"""rotary_cache_write against the two operations that it joins, and what it must leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline_kernels import native
from hookline_kernels.cache_write import cache_write
from hookline_kernels.rotary import apply_rotary, rotary_cos_sin
from hookline_kernels.rotary_cache import rotary_cache_write

# T, H, K, D, R.
SHAPES = [
    (0, 9, 3, 64, 64),
    (1, 9, 3, 64, 64),
    (17, 9, 3, 64, 64),
    (17, 4, 2, 80, 32),
    (3, 1, 1, 80, 80),
    (5, 6, 2, 40, 24),
    (2, 2, 2, 256, 2),
    (4, 3, 1, 16, 0),
    (22, 180, 4, 16, 16),  # many heads in all, which the Triton kernel takes in larger parts
]
NATIVE = pytest.mark.skipif(native.load(torch.float32).reason is not None, reason="no native kernels here")
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
CAPACITY = 20 * 4


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> tuple[torch.Tensor, ...]:
    """A projection within a wider tensor, cos and sin, caches of NaN, and slots of which each third is padding."""
    tokens, heads, kv_heads, size, turned = shape
    generator = torch.Generator().manual_seed(tokens + size)
    total = heads + 2 * kv_heads
    wide = torch.randn(tokens, total * size + 48, generator=generator).to(device, dtype)
    qkv = wide[:, 16 : 16 + total * size].unflatten(1, (total, size))
    inv_freq = 10000.0 ** (-torch.arange(0, turned, 2, device=device) / max(turned, 1))
    cos, sin = rotary_cos_sin(torch.arange(tokens, device=device) * 3 + 1, inv_freq)
    slots = torch.randperm(CAPACITY, generator=generator)[:tokens]
    slots[1::3] = -1 - slots[1::3]
    caches = [torch.full((20, 4, kv_heads, size), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    return qkv, cos, sin, *caches, slots.to(device)


def check(
    implementation: str, shape: Any, interleaved: bool, dtype: Any, device: Any, close: Any, cache_dtype: Any = None
) -> None:
    qkv, cos, sin, k_cache, v_cache, slots = inputs(shape, dtype, device)
    heads, kv_heads = shape[1:3]
    k_cache, v_cache = (cache.to(cache_dtype or dtype) for cache in (k_cache, v_cache))
    wanted_qkv, wanted_k, wanted_v = qkv.clone(), k_cache.clone(), v_cache.clone()
    q, k, v = wanted_qkv.split((heads, kv_heads, kv_heads), dim=1)
    apply_rotary(q, k, cos, sin, interleaved, implementation="reference")
    cache_write((k, v), (wanted_k, wanted_v), slots, implementation="reference")
    around = qkv._base.clone()  # type: ignore[union-attr]
    values = qkv[:, heads + kv_heads :].clone()
    found = rotary_cache_write(
        qkv, cos, sin, k_cache, v_cache, slots, heads, interleaved, implementation=implementation
    )
    assert found.data_ptr() == qkv.data_ptr() or not len(qkv)
    close(found, q)
    for cache, wanted in ((k_cache, wanted_k), (v_cache, wanted_v)):
        written = torch.zeros(CAPACITY, dtype=torch.bool, device=slots.device)
        written[slots[slots >= 0]] = True
        assert cache.flatten(0, 1)[~written].isnan().all(), "another slot was written"
        close(cache.flatten(0, 1)[written], wanted.flatten(0, 1)[written])
    bits = (qkv[:, heads + kv_heads :], values)
    assert torch.equal(*bits), "values were changed"
    assert torch.equal(v_cache.flatten(0, 1)[slots[slots >= 0]], values[slots >= 0].to(v_cache.dtype))
    base = qkv._base
    assert base is not None
    assert torch.equal(base[:, :16], around[:, :16])
    assert torch.equal(base[:, -32:], around[:, -32:])
    turned = shape[4]
    assert torch.equal(found[..., turned:], around[:, 16:-32].unflatten(1, (-1, shape[3]))[:, :heads, turned:])


@INTERLEAVED
@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch(shape: Any, implementation: str, interleaved: bool, dtype: torch.dtype, assert_close: Any) -> None:
    check(implementation, shape, interleaved, dtype, "cpu", assert_close)


@NATIVE
@INTERLEAVED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native(shape: Any, interleaved: bool, dtype: torch.dtype, assert_close: Any) -> None:
    check("native", shape, interleaved, dtype, "cpu", assert_close)


@INTERLEAVED
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_triton(
    shape: Any, interleaved: bool, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Any
) -> None:
    check("triton", shape, interleaved, triton_dtype, triton_device, assert_close)


@pytest.mark.parametrize(("dtype", "interleaved"), [(torch.float32, False), (torch.float16, True)], ids=str)
def test_triton_with_many_heads(
    dtype: torch.dtype, interleaved: bool, triton_device: torch.device, assert_close: Any
) -> None:
    """Each way and each type once: in the interpreter these take the longest."""
    check("triton", SHAPES[-1], interleaved, dtype, triton_device, assert_close)


@pytest.mark.parametrize("implementation", ["torch", "triton", "reference"])
def test_caches_of_another_type(implementation: str, triton_device: torch.device, assert_close: Any) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    check(implementation, (17, 9, 3, 64, 32), False, torch.float32, device, assert_close, torch.float16)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_gives_the_bits_of_the_two_native_operations(dtype: torch.dtype) -> None:
    found = []
    for fused in (False, True):
        qkv, cos, sin, k_cache, v_cache, slots = inputs((20, 9, 3, 64, 64), dtype, "cpu")
        if fused:
            q = rotary_cache_write(qkv, cos, sin, k_cache, v_cache, slots, 9, implementation="native")
        else:
            q, k, v = qkv.split((9, 3, 3), dim=1)
            apply_rotary(q, k, cos, sin, implementation="native")
            cache_write((k, v), (k_cache, v_cache), slots, implementation="native")
        found.append((q.clone(), k_cache.nan_to_num(7.0), v_cache.nan_to_num(7.0)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_choice_on_a_cpu() -> None:
    qkv, cos, sin, k_cache, v_cache, slots = inputs((2, 4, 2, 32, 32), torch.float32, "cpu")
    with pytest.raises(ValueError, match="differ in type"):
        rotary_cache_write(qkv, cos, sin, k_cache.half(), v_cache.half(), slots, 4, implementation="native")


@pytest.mark.parametrize("implementation", [None, "torch"])
def test_a_slot_past_the_cache_is_named(implementation: str | None) -> None:
    qkv, cos, sin, k_cache, v_cache, slots = inputs((2, 4, 2, 32, 32), torch.float32, "cpu")
    slots[:] = torch.tensor([-1, 80])
    with pytest.raises(ValueError, match="slot 80 does not exist, the cache has 80"):
        rotary_cache_write(qkv, cos, sin, k_cache, v_cache, slots, 4, implementation=implementation)
    assert k_cache.isnan().all()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qkv": torch.zeros(2, 9, 8)}, ValueError, "qkv"),
    ({"qkv": torch.zeros(2, 8, 9)[..., :8]}, ValueError, "one after the other"),
    ({"num_heads": 5}, ValueError, r"T, 5 \+ 2"),
    ({"cos": torch.zeros(2, 4, dtype=torch.float16)}, TypeError, "float32"),
    ({"cos": torch.zeros(2, 5), "sin": torch.zeros(2, 5)}, ValueError, "R at most D"),
    ({"cos": torch.zeros(4, 2).t()}, ValueError, "contiguous"),
    ({"slots": torch.zeros(3, dtype=torch.int64)}, TypeError, "slots"),
    ({"slots": torch.zeros(2, dtype=torch.int32)}, TypeError, "int64"),
    ({"v_cache": torch.zeros(2, 4, 1, 8)}, ValueError, "two caches"),
    ({"v_cache": torch.zeros(2, 2, 4, 8).transpose(1, 2)}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "qkv": torch.zeros(2, 8, 8),
        "cos": torch.zeros(2, 4),
        "sin": torch.zeros(2, 4),
        "k_cache": torch.zeros(2, 4, 2, 8),
        "v_cache": torch.zeros(2, 4, 2, 8),
        "slots": torch.tensor([1, 5]),
        "num_heads": 4,
    }
    rotary_cache_write(**arguments)
    with pytest.raises(error, match=message):
        rotary_cache_write(**{**arguments, **change})
