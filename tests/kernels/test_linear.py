"""linear, its weight layouts and its conversion of 16-bit types, and embedding, which may share a packed weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hookline_kernels.linear
from hookline_kernels.embedding import embedding
from hookline_kernels.implementations import explain
from hookline_kernels.linear import IMPLEMENTATIONS, linear, linear_upcast, pack_linear_weight


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 17])
def test_equals_the_product(
    tokens: int, with_bias: bool, packed: bool, dtype: torch.dtype, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hookline_kernels.linear, "PANEL", 32)
    for size in (31, 32, 33, 100):
        generator = torch.Generator().manual_seed(size)
        x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (tokens, size))
        bias = torch.randn(size, generator=generator).to(dtype) if with_bias else None
        expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        used = weight.t().contiguous().t() if packed else weight
        for implementation in (None, "direct", "reference"):
            assert_close(linear(x, used, bias, implementation=implementation), expected, looser=2.0)
        assert_close(linear_upcast(x, used, bias, False), expected, looser=2.0)


def test_packing_keeps_values_and_is_column_major() -> None:
    weight = torch.randn(6, 4)
    packed = pack_linear_weight(weight)
    assert torch.equal(packed, weight) and packed.stride() == (1, 6)
    assert pack_linear_weight(weight.half()).stride() == (4, 1)
    assert pack_linear_weight(packed).stride() == (1, 6)
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        pack_linear_weight(torch.zeros(3))


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("implementation", [None, "direct", "reference"])
@pytest.mark.parametrize("biased", [False, True])
def test_wide_answers_are_not_rounded(
    dtype: torch.dtype, tokens: int, implementation: str | None, biased: bool, assert_close: Any
) -> None:
    """To fp32's own precision, also where x and weight have 16 bits."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (tokens, 3100))
    bias = torch.randn(3100, generator=generator).to(dtype) if biased else None
    found = linear(x, pack_linear_weight(weight), bias, wide=True, implementation=implementation)
    assert found.dtype == torch.float32
    assert_close(found, x.double() @ weight.double().t() + (0 if bias is None else bias.double()), looser=2.0)


@pytest.mark.parametrize("native", [True, False])
def test_the_choice_and_its_reason(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without native kernels; `native` is whether the CPU itself has instructions for 16-bit products."""
    monkeypatch.setattr(hookline_kernels.linear, "has_native_16bit_products", lambda dtype: native)
    monkeypatch.setattr(hookline_kernels.linear, "why_not", lambda x: "there is no C compiler")
    weight = torch.zeros(4, 4)
    assert "16-bit" in str(explain(IMPLEMENTATIONS, (torch.zeros(8, 4), weight)))
    many = explain(IMPLEMENTATIONS, (torch.zeros(8, 4).bfloat16(), weight.bfloat16()))
    one = explain(IMPLEMENTATIONS, (torch.zeros(1, 4).bfloat16(), weight.bfloat16()))
    assert (many.name, one.name) == (("direct", "direct") if native else ("upcast", "direct"))
    assert ("matrix instructions" if native else "1 tokens") in str(one)
    assert pack_linear_weight(weight.bfloat16()).is_contiguous() == native
    scattered = explain(IMPLEMENTATIONS, (torch.zeros(1, 4).half(), weight.half().t()))
    assert scattered.name == ("direct" if native else "upcast")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(2, 5)}, ValueError, r"x \[T, in\]"),
    ({"x": torch.zeros(8)}, ValueError, r"x \[T, in\]"),
    ({"x": torch.zeros(2, 8, dtype=torch.float16)}, TypeError, "one type"),
    ({"bias": torch.zeros(4, dtype=torch.float16)}, TypeError, "one type"),
    ({"bias": torch.zeros(5)}, ValueError, "bias"),
    ({"bias": torch.zeros(8)[::2]}, ValueError, r"contiguous \[4\] is expected"),
    ({"bias": torch.zeros(1).expand(4)}, ValueError, r"contiguous \[4\] is expected"),
    ({"weight": torch.zeros(4, 8, device="meta")}, ValueError, "weight on meta"),
    ({"implementation": "upcast"}, ValueError, "cannot be used here"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8)}
    linear(**arguments)
    with pytest.raises(error, match=message):
        linear(**{**arguments, **change})


@pytest.mark.parametrize("ids", [[], [0], [9], [3, 3, 0, 9]], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_embedding(ids: list[int], kind: torch.dtype, dtype: torch.dtype) -> None:
    table = torch.randn(10, 7).to(dtype)
    expected = [table[i] for i in ids]
    for layout in (table, table.t().contiguous().t()):
        y = embedding(torch.tensor(ids, dtype=kind), layout, dtype)
        assert y.is_contiguous() and y.shape == (len(ids), 7)
        assert all(torch.equal(row, wanted) for row, wanted in zip(y, expected, strict=True))


def test_embedding_refuses_bad_arguments() -> None:
    table = torch.zeros(10, 7)
    for layout in (table, pack_linear_weight(table)):
        for wrong in (10, -1):
            with pytest.raises(IndexError):
                embedding(torch.tensor([0, wrong]), layout, torch.float32)
    with pytest.raises(ValueError, match="table on meta"):
        embedding(torch.tensor([1]), table.to("meta"), torch.float32)
    with pytest.raises(TypeError, match="int32 or int64"):
        embedding(torch.tensor([1.0]), table, torch.float32)
    with pytest.raises(ValueError, match=r"ids \[T\]"):
        embedding(torch.tensor([[1]]), table, torch.float32)
