"""Products for few tokens: every form of the Triton kernel against an fp64 definition, and the gated linear layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hookline_kernels.linear
from hookline_kernels.activation import GATED_ACTIVATIONS, GELU, GELU_TANH, SILU, gated_activation
from hookline_kernels.implementations import explain
from hookline_kernels.launch import arrival_counters
from hookline_kernels.linear import GATED_IMPLEMENTATIONS, IMPLEMENTATIONS, linear, linear_gated
from hookline_kernels.linear_small import (
    GATED_CODES,
    SmallConfig,
    linear_gated_small,
    linear_small,
    linear_small_reference,
)
from hookline_kernels.packed import is_packed


def make(
    tokens: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as a view of wider rows whose rest is NaN, weight likewise, and bias."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows, gap in ((tokens, 16), (columns, 8)):
        wide = torch.full((rows, inner + gap), float("nan"))
        wide[:, :inner] = torch.randn(rows, inner, generator=generator) * inner**-0.25
        parts.append(wide.to(device, dtype)[:, :inner])
    return parts[0], parts[1], torch.randn(columns, generator=generator).to(device, dtype)


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, code: int | None = None) -> torch.Tensor:
    """The definition in fp64."""
    y = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    if code is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return GATED_CODES[code](gate) * up


# form, block_n, block_k, splits, tokens, columns, inner: around and below the blocks, uneven and empty parts of K.
CASES = [
    ("rows", 16, 32, 1, 1, 16, 32),
    ("rows", 16, 32, 2, 3, 17, 64),
    ("rows", 32, 16, 8, 17, 31, 127),
    ("rows", 16, 64, 5, 16, 33, 24),  # K smaller than one block
    ("rows", 64, 32, 3, 33, 64, 96),
    ("rows", 16, 32, 2, 65, 16, 128),  # two tiles of tokens
    ("columns", 16, 32, 1, 1, 16, 32),
    ("columns", 32, 32, 3, 5, 33, 100),
    ("columns", 16, 16, 8, 17, 15, 130),
    ("columns", 64, 32, 2, 33, 66, 64),
    ("rows", 16, 32, 2, 3, 1, 64),  # the gate of a shared expert
    ("vector", 4, 64, 1, 1, 9, 64),
    ("vector", 1, 32, 3, 1, 3, 100),
    ("vector", 8, 64, 6, 1, 9, 383),
]


@pytest.mark.parametrize(("form", "block_n", "block_k", "splits", "tokens", "columns", "inner"), CASES)
def test_equals_the_product(
    form: str,
    block_n: int,
    block_k: int,
    splits: int,
    tokens: int,
    columns: int,
    inner: int,
    triton_dtype: torch.dtype,
    triton_device: torch.device,
    assert_close: Any,
) -> None:
    config = SmallConfig(form=form, block_n=block_n, block_k=block_k, splits=splits, stages=3)
    x, weight, bias = make(tokens, columns, inner, triton_dtype, triton_device, columns)
    used = bias if splits > 1 else None
    wide = splits % 2 == 0
    y = linear_small(x, weight, used, wide, config)
    assert y.dtype == (torch.float32 if wide else triton_dtype) and y.is_contiguous()
    assert_close(y, expected(x, weight, used), looser=2.0)
    assert not arrival_counters(x.device).any()


@pytest.mark.parametrize(
    ("form", "splits", "tokens", "inner", "code", "biased"),
    [
        ("rows", 1, 2, 64, SILU, True),
        ("rows", 3, 17, 90, GELU, False),
        ("columns", 2, 5, 50, GELU_TANH, True),
        ("vector", 4, 1, 128, SILU, True),
    ],
)
def test_gated_equals_the_formula(
    form: str,
    splits: int,
    tokens: int,
    inner: int,
    code: int,
    biased: bool,
    triton_dtype: torch.dtype,
    triton_device: torch.device,
    assert_close: Any,
) -> None:
    config = SmallConfig(form=form, block_n=16, block_k=32, splits=splits)
    x, weight, bias = make(tokens, 2 * 19, inner, triton_dtype, triton_device, code)
    used = bias if biased else None
    y = linear_gated_small(x, weight, used, code, config)
    assert y.dtype == triton_dtype
    assert_close(y, expected(x, weight, used, code), looser=4.0)
    assert_close(linear_small_reference(x, weight, used, False, code), expected(x, weight, used, code), looser=4.0)
    assert not arrival_counters(x.device).any()


def test_equal_calls_give_equal_bits(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    """Also with other calls between them, whose counters and scratch are the same memory."""
    config = SmallConfig(block_n=16, block_k=16, splits=3)
    x, weight, _ = make(4, 18, 60, triton_dtype, triton_device)
    first = linear_small(x, weight, None, True, config)
    for _ in range(8 if x.is_cuda else 1):
        linear_gated_small(x, weight, None, SILU, config)
        assert torch.equal(linear_small(x, weight, None, True, config), first)


def test_dependent_launch_is_left_out_where_there_is_none(triton_device: torch.device, assert_close: Any) -> None:
    config = SmallConfig(block_n=16, block_k=64, splits=2, pdl=True)
    x, weight, _ = make(2, 32, 128, torch.float32, triton_device)
    assert_close(linear_small(x, weight, None, False, config), expected(x, weight, None), looser=2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_is_captured_in_a_graph(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    config = SmallConfig(splits=3)
    x, weight, _ = make(4, 256, 1024, triton_dtype, triton_device)
    eager = linear_small(x, weight, None, False, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [linear_small(x, weight, None, False, config) for _ in range(4)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(y, eager) for y in captured)


@pytest.mark.parametrize("tokens", [0, 2])
def test_no_tokens_and_no_columns(tokens: int, triton_device: torch.device) -> None:
    x, weight = torch.zeros(tokens, 8, device=triton_device), torch.zeros(0, 8, device=triton_device)
    assert linear_small(x, weight, None, False, SmallConfig()).shape == (tokens, 0)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(2, 5)}, ValueError, r"x \[T, K\]"),
    ({"x": torch.zeros(2, 8).half()}, TypeError, "one type"),
    ({"weight": torch.zeros(8, 4).t()}, ValueError, "rows must lie together"),
    ({"bias": torch.zeros(3)}, ValueError, "bias"),
    ({"config": SmallConfig(form="vector")}, ValueError, "one token"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": None}
    with pytest.raises(error, match=message):
        linear_small(**{**arguments, "wide": False, "config": SmallConfig(), **change})


def test_bad_gated_arguments_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="activation codes"):
        linear_gated_small(x, torch.zeros(4, 8), None, GATED_ACTIVATIONS["tanh"], SmallConfig())
    with pytest.raises(ValueError, match="gate and up rows"):
        linear_gated_small(x, torch.zeros(5, 8), None, SILU, SmallConfig())


@pytest.mark.parametrize(
    "change",
    [
        {"form": "diagonal"},
        {"block_n": 48},
        {"block_n": 8},
        {"block_k": 8},
        {"splits": 0},
        {"splits": True},
        {"splits": 17},
        {"warps": 3},
        {"stages": 0},
        {"pdl": 1},
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        SmallConfig(**change)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_gated_on_the_cpu_is_the_two_steps(activation: str, biased: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (t.contiguous() for t in make(3, 12, 16, dtype, torch.device("cpu")))
    used = bias if biased else None
    assert torch.equal(linear_gated(x, weight, used, activation), gated_activation(linear(x, weight, used), activation))


def test_linear_gated_refuses_bad_arguments() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match="gate and up rows"):
        linear_gated(x, torch.zeros(5, 8))
    with pytest.raises(ValueError, match="swosh"):
        linear_gated(x, weight, activation="swosh")
    with pytest.raises(ValueError, match=r"x \[T, in\]"):
        linear_gated(torch.zeros(2, 7), weight)
    with pytest.raises(ValueError, match="on a GPU"):
        linear_gated(x, weight, implementation="fused")


def test_the_choice_on_a_gpu_is_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that only say that they are on a GPU."""

    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False

    kinds: list[str] = []

    def from_table(x: torch.Tensor, weight: torch.Tensor, kind: str) -> SmallConfig | None:
        kinds.append(kind)
        return SmallConfig() if weight.shape[0] == 64 else None

    monkeypatch.setattr(hookline_kernels.linear, "configuration", from_table)
    x, many, weight, other = (torch.zeros(n, 32).as_subclass(OnGpu) for n in (4, 65, 64, 62))
    assert not is_packed(weight)
    monkeypatch.setattr(hookline_kernels.linear, "_upcast_pays", lambda query: "not on a GPU")
    assert explain(IMPLEMENTATIONS, (x, weight)).name == "small"
    assert explain(IMPLEMENTATIONS, (x, weight, True)).name == "small" and kinds[-1] == "wide"
    refused = explain(IMPLEMENTATIONS, (x, other))
    assert refused.name == "direct" and "library" in str(refused)
    assert "1 to 64 tokens" in str(explain(IMPLEMENTATIONS, (many, weight)))
    assert "lie together" in str(explain(IMPLEMENTATIONS, (x, torch.zeros(64, 64).as_subclass(OnGpu)[:, ::2])))
    assert explain(GATED_IMPLEMENTATIONS, (x, weight, "silu")).name == "fused" and kinds[-1] == "gated"
    assert "no relu" in str(explain(GATED_IMPLEMENTATIONS, (x, weight, "relu")))
