"""activation and gated_activation: the CPU implementation and the Triton kernel against formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hookline_kernels.activation import (
    GATED_ACTIVATIONS,
    activation,
    gated_activation,
    gelu_and_mul,
    silu_and_mul,
)

# The interpreter's sigmoid passes through an infinite exponential, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "gelu_new": lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "tanh": lambda x: x.tanh(),
    "linear": lambda x: x,
}
SHAPES = [(0, 4), (1, 1), (3, 63), (2, 65), (2, 1025)]


def check(implementation: str, name: str, shape: tuple[int, int], dtype: Any, device: Any, close: Any) -> None:
    tokens, size = shape
    generator = torch.Generator().manual_seed(size)
    wide = (3 * torch.randn(tokens, 2 * size + 5, generator=generator)).to(device, dtype)
    x = wide[:, : 2 * size]
    gate, up = x.double().cpu().chunk(2, -1)
    gated = gated_activation(x, name, implementation=implementation)
    assert gated.is_contiguous() and gated.dtype == dtype
    # Two roundings on the CPU, and tanh near 0 through a sigmoid in the kernel.
    close(gated, FORMULAS[name](gate) * up, looser=3.0)
    alone = activation(x, name, implementation=implementation)
    assert alone.data_ptr() != x.data_ptr() or alone.numel() == 0
    close(alone, FORMULAS[name](x.double().cpu()), looser=2.0)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("name", FORMULAS)
def test_torch(name: str, dtype: torch.dtype, implementation: str, assert_close: Any) -> None:
    for shape in SHAPES:
        check(implementation, name, shape, dtype, "cpu", assert_close)


@pytest.mark.parametrize("name", FORMULAS)
def test_triton(name: str, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Any) -> None:
    for shape in SHAPES:
        check("triton", name, shape, triton_dtype, triton_device, assert_close)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMULAS)
def test_large_values(name: str, implementation: str, triton_device: torch.device) -> None:
    x = torch.tensor([[-1000.0, 1000.0]], device=triton_device if implementation == "triton" else "cpu")
    assert not activation(x, name, implementation=implementation).isnan().any()


def test_every_name_is_one_of_the_formulas() -> None:
    assert {GATED_ACTIVATIONS[name] for name in FORMULAS} == set(GATED_ACTIVATIONS.values())


def test_short_names() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(silu_and_mul(x), gated_activation(x, "swish"))
    assert torch.equal(gelu_and_mul(x), gated_activation(x, "gelu"))
    assert torch.equal(gelu_and_mul(x, approximate="tanh"), gated_activation(x, "gelu_pytorch_tanh"))
    with pytest.raises(ValueError, match="'none' or 'tanh'"):
        gelu_and_mul(x, approximate="fast")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swosh'; known are .*silu"):
        gated_activation(torch.zeros(2, 4), "swosh")
    with pytest.raises(ValueError, match="two halves"):
        gated_activation(torch.zeros(2, 5), "silu")
    with pytest.raises(ValueError, match=r"\[T, F\]"):
        activation(torch.zeros(4), "silu")
    with pytest.raises(ValueError, match="contiguous rows"):
        activation(torch.zeros(4, 2).t(), "silu")
    with pytest.raises(TypeError, match="floating point"):
        activation(torch.zeros(2, 4, dtype=torch.int64), "silu")
