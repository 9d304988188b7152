"""rms_norm_pair against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline_kernels.rms_norm_pair import rms_norm_pair

Check = Callable[..., None]

SHAPES = [(0, 8), (1, 1), (1, 64), (3, 100), (9, 33)]
EPS = 1e-5


def check(shape: tuple[int, int], implementation: str | None, dtype: torch.dtype, device: Any, close: Check) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    rows, size = shape
    wide = torch.randn(2, rows, size + 3, generator=generator).to(device, dtype)
    a, b = wide[0, :, :size], 100.0 * wide[1, :, 3:]
    weights = (1.0 + torch.randn(2, size, generator=generator)).to(device, dtype)
    wanted = [torch.rms_norm(x.double(), (size,), w.double(), EPS) for x, w in zip((a, b), weights, strict=True)]
    found = rms_norm_pair(a, weights[0], b, weights[1], EPS, implementation=implementation)
    assert found.dtype == dtype
    close(found, torch.cat(wanted, 1))


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch(shape: Any, implementation: str | None, dtype: torch.dtype, assert_close: Check) -> None:
    check(shape, implementation, dtype, "cpu", assert_close)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton(shape: Any, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Check) -> None:
    check(shape, "triton", triton_dtype, triton_device, assert_close)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"a": torch.zeros(2, 4).long()}, TypeError, "of one type"),
    ({"b": torch.zeros(2, 4).half()}, TypeError, "of one type"),
    ({"weight_b": torch.ones(4).half()}, TypeError, "weights of one type"),
    ({"b": torch.zeros(3, 4)}, ValueError, r"a and b \[T, M\]"),
    ({"weight_a": torch.ones(5)}, ValueError, r"weights \[M\]"),
    ({"eps": 0.0}, ValueError, "eps must be positive"),
    ({"a": torch.zeros(4, 2).t()}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"a": torch.zeros(2, 4), "weight_a": torch.ones(4), "b": torch.zeros(2, 4)}
    given |= {"weight_b": torch.ones(4), "eps": EPS}
    rms_norm_pair(**given)
    with pytest.raises(error, match=message):
        rms_norm_pair(**{**given, **change})
