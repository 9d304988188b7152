"""rms_norm: the CPU implementation and the Triton kernel against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline_kernels.rms_norm import rms_norm

SHAPES = [(0, 64), (1, 1), (1, 576), (3, 63), (16, 64), (17, 65), (2, 1023), (33, 1000), (2, 3, 80)]


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    rows = x.double().cpu()
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double().cpu() + offset)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, residual = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.randn(shape[-1:], generator=generator).to(device, dtype)
    return x, residual, weight


def check(implementation: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any, assert_close: Any) -> None:
    x, residual, weight = inputs(shape, dtype, device)
    assert_close(rms_norm(x, weight, 1e-5, implementation=implementation), formula(x, weight, 1e-5))
    total, old_x = x + residual, x.clone()
    y, returned = rms_norm(x, weight, 1e-3, residual, weight_offset=1.0, implementation=implementation)
    assert returned is residual and torch.equal(x, old_x)
    assert torch.equal(residual, total)
    assert y.is_contiguous() and y.dtype == dtype
    assert_close(y, formula(total, weight, 1e-3, 1.0))


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch(shape: Any, dtype: torch.dtype, implementation: str, assert_close: Any) -> None:
    check(implementation, shape, dtype, "cpu", assert_close)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton(shape: Any, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Any) -> None:
    check("triton", shape, triton_dtype, triton_device, assert_close)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_strided_rows(implementation: str, triton_device: torch.device, assert_close: Callable[..., None]) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    wide, _, weight = inputs((5, 200), torch.float32, device)
    x, weight = wide[:, 7:71], weight[:64].contiguous()
    for rows in (x, x[:1], x[:, :64]):
        assert_close(rms_norm(rows, weight, 1e-5, implementation=implementation), formula(rows, weight, 1e-5))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_zeros_and_huge_values(implementation: str, tokens: int, triton_device: torch.device) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    weight = torch.ones(64, device=device)
    zeros = torch.zeros(tokens, 64, device=device)
    assert torch.equal(rms_norm(zeros, weight, 1e-6, implementation=implementation), zeros)
    huge = torch.full((tokens, 64), 6e4, dtype=torch.float16, device=device)
    y = rms_norm(huge, weight.half(), 1e-6, implementation=implementation)
    assert torch.equal(y, torch.ones_like(huge))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(2, 8, dtype=torch.int64)}, TypeError, "floating point"),
    ({"weight": torch.zeros(9)}, ValueError, "weight"),
    ({"eps": 0.0}, ValueError, "eps"),
    ({"eps": float("nan")}, ValueError, "eps"),
    ({"x": torch.zeros(8, 2).t()}, ValueError, "contiguous"),
    ({"residual": torch.zeros(2, 8, dtype=torch.float16)}, ValueError, "residual"),
    ({"residual": torch.zeros(1, 8)}, ValueError, "residual"),
    ({"residual": torch.zeros(8, 2).t()}, ValueError, "residual"),
    ({"implementation": "cuda"}, ValueError, "unknown implementation 'cuda'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 1e-6}
    rms_norm(**arguments)
    with pytest.raises(error, match=message):
        rms_norm(**{**arguments, **change})
