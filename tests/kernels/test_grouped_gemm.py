"""The grouped products of a mixture of experts: the formulas in torch, the table, the layouts and the refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hookline_kernels.grouped_gemm as grouped_gemm
from hookline_kernels.activation import GATED_ACTIVATIONS, gated_activation
from hookline_kernels.grouped_gemm import (
    COMBINE_IMPLEMENTATIONS,
    GATED_IMPLEMENTATIONS,
    grouped_linear_combine,
    grouped_linear_gated,
    pack_expert_weight,
)
from hookline_kernels.implementations import explain
from hookline_kernels.moe_routing import Dispatch, sort_by_expert
from hookline_kernels.native import why_not
from hookline_kernels.quantized import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens with their experts; weights of experts without a token are NaN, and so is what lies between rows of x."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    dispatch: Dispatch

    def h(self, activation: str = "silu", bias: bool = True) -> torch.Tensor:
        """By the definition in fp64, in the dispatch's order."""
        rows = []
        for pair in self.dispatch.order.tolist():
            expert = self.expert_ids.flatten()[pair]
            sums = self.gate_up[expert].double() @ self.x[pair // self.dispatch.top_k].double()
            rows.append(sums + self.gate_up_bias[expert].double() if bias else sums)
        if not rows:
            return torch.zeros(0, self.down.shape[2], dtype=torch.float64)
        sums = torch.stack(rows)
        gate, up = sums.chunk(2, dim=-1)
        return gated_activation(torch.cat((gate, torch.ones_like(up)), -1).cpu(), activation) * up.cpu()

    def y(self, h: torch.Tensor, bias: bool = True) -> torch.Tensor:
        """By the definition in fp64."""
        result = torch.zeros(len(self.weights), self.down.shape[1], dtype=torch.float64)
        for place, pair in enumerate(self.dispatch.order.tolist()):
            expert = self.expert_ids.flatten()[pair]
            part = self.down[expert].double() @ h[place].double()
            part = part + self.down_bias[expert].double() if bias else part
            result[pair // self.dispatch.top_k] += (self.weights.flatten()[pair].double() * part).cpu()
        return result


def make(
    expert_ids: torch.Tensor,
    experts: int,
    model: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Case:
    """A case with random numbers."""
    generator = torch.Generator().manual_seed(model)
    ids = expert_ids.int()
    wide = torch.full((len(ids), model + 8), float("nan"))
    wide[:, :model] = torch.randn(len(ids), model, generator=generator)
    gate_up = torch.randn(experts, 2 * size, model, generator=generator) * model**-0.5
    down = torch.randn(experts, model, size, generator=generator) * size**-0.5
    unused = [expert for expert in range(experts) if expert not in ids]
    gate_up[unused], down[unused] = float("nan"), float("nan")
    return Case(
        x=wide.to(device, dtype)[:, :model],
        gate_up=gate_up.to(device, dtype),
        down=down.to(device, dtype),
        gate_up_bias=torch.randn(experts, 2 * size, generator=generator).to(device, dtype),
        down_bias=torch.randn(experts, model, generator=generator).to(device, dtype),
        expert_ids=ids.to(device),
        weights=torch.rand(ids.shape, generator=generator).to(device),
        dispatch=sort_by_expert(ids.to(device), experts, implementation="reference"),
    )


def distinct(tokens: int, k: int, experts: int) -> torch.Tensor:
    """k different experts for each token."""
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.zeros(0, k)


# expert_ids, experts, M, F
SHAPES = {
    "none": (distinct(0, 2, 4), 4, 16, 8),
    "one token": (distinct(1, 2, 8), 8, 33, 17),
    "all to one": (torch.full((18, 1), 2), 4, 24, 16),
    "all experts": (distinct(5, 4, 4), 4, 40, 31),
    "some idle": (distinct(17, 2, 3) * 2 + 1, 8, 48, 33),
    "many experts": (distinct(9, 3, 37), 37, 32, 15),
}
SHAPE = pytest.mark.parametrize("shape", SHAPES)


@SHAPE
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("implementation", ["by_expert", "reference"])
def test_torch_equals_the_definition(
    shape: str, biased: bool, implementation: str, dtype: torch.dtype, assert_close: Any
) -> None:
    case = make(*SHAPES[shape], dtype)
    gate_up, down = pack_expert_weight(case.gate_up), pack_expert_weight(case.down)
    biases = (case.gate_up_bias, case.down_bias) if biased else (None, None)
    h = grouped_linear_gated(case.x, gate_up, case.dispatch, "silu", biases[0], implementation=implementation)
    assert h.dtype == dtype
    assert_close(h, case.h(bias=biased), looser=3.0)
    y = grouped_linear_combine(h, down, case.dispatch, case.weights, biases[1], implementation=implementation)
    assert y.dtype == dtype
    assert_close(y, case.y(h, biased), looser=3.0)


@pytest.mark.parametrize(
    ("implementation", "activation"),
    [("by_expert", name) for name in sorted(GATED_ACTIVATIONS)]
    + [(name, activation) for name in ("small", "tiles") for activation in ("silu", "gelu_new", "relu2")],
)
def test_each_activation(activation: str, implementation: str, triton_device: torch.device, assert_close: Any) -> None:
    """By the table, which knows what to do with those that the kernels do not have."""
    case = make(distinct(2, 2, 4), 4, 16, 16, device="cpu" if implementation == "by_expert" else triton_device)
    args = (case.x, case.gate_up, case.dispatch, activation, case.gate_up_bias)
    assert_close(grouped_linear_gated(*args, implementation=implementation), case.h(activation), looser=3.0)
    y = grouped_linear_combine(
        case.h(activation).to(case.x), case.down, case.dispatch, case.weights, implementation=implementation
    )
    assert_close(y, case.y(case.h(activation).to(case.x), False), looser=3.0)


def test_packed_weights_keep_values_in_the_layout_of_linear() -> None:
    weight = torch.randn(3, 6, 4)
    packed = pack_expert_weight(weight)
    assert torch.equal(packed, weight) and packed[1].stride() == (1, 6)
    half = pack_expert_weight(weight, dtype=torch.float16)
    assert torch.equal(half, weight.half()) and half.is_contiguous()
    with pytest.raises(ValueError, match=r"\[E, N, K\]"):
        pack_expert_weight(weight[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_experts_stay_packed(bits: int, assert_close: Any) -> None:
    experts, model, size, generator = 3, 64, 32, torch.Generator().manual_seed(bits)

    def quantised(rows: int, inner: int) -> QuantizedTensor:
        low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-127, 128, torch.int8)
        codes = torch.randint(low, high, (experts, rows, inner), generator=generator, dtype=kind)
        scales = torch.rand(experts, rows, inner // 32, generator=generator).half() * 0.1
        return QuantizedTensor(codes, scales, scales * -0.5 if bits == 4 else None)

    gate_up, down = quantised(2 * size, model), quantised(model, size)
    case = make(distinct(5, 2, experts), experts, model, size)
    packed = (pack_expert_weight(gate_up), pack_expert_weight(down))
    if why_not(case.x) is None:
        assert all(weight.dtype == torch.uint8 and weight.dim() == 4 for weight in packed)
    h = grouped_linear_gated(case.x, packed[0], case.dispatch)
    wanted = grouped_linear_gated(case.x, gate_up.values(), case.dispatch, implementation="reference")
    assert_close(h, wanted, looser=3.0)
    y = grouped_linear_combine(h, packed[1], case.dispatch, case.weights)
    wanted = grouped_linear_combine(h, down.values(), case.dispatch, case.weights, implementation="reference")
    assert_close(y, wanted, looser=3.0)
    with pytest.raises(TypeError, match="pack_expert_weight"):
        grouped_linear_gated(case.x, gate_up, case.dispatch)


def test_idle_experts_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(distinct(6, 2, 2) + 3, 8, 16, 8)
    calls: list[int] = []
    real = grouped_gemm.linear_gated

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(len(x))
        return real(x, *args)

    monkeypatch.setattr(grouped_gemm, "linear_gated", counted)
    grouped_linear_gated(case.x, case.gate_up, case.dispatch)
    assert calls == [6, 6]


def test_the_choice_of_an_implementation() -> None:
    case = make(distinct(3, 2, 4), 4, 16, 8)
    assert explain(GATED_IMPLEMENTATIONS, (case.x, case.gate_up, case.dispatch, "silu")).name == "by_expert"
    assert explain(COMBINE_IMPLEMENTATIONS, (case.x, case.down, case.dispatch)).name == "by_expert"
    with pytest.raises(ValueError, match=r"bf16 on a GPU|no grouped_mm"):
        grouped_linear_gated(case.x, case.gate_up, case.dispatch, implementation="library")


CASE = make(distinct(3, 2, 4), 4, 16, 8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": CASE.x[:, :8]}, ValueError, r"weight \[E, N, K\]"),
        ({"x": CASE.x[0]}, ValueError, r"weight \[E, N, K\]"),
        ({"weight": CASE.gate_up[0]}, ValueError, r"weight \[E, N, K\]"),
        ({"weight": CASE.gate_up[:3]}, ValueError, "3 experts and the dispatch 4"),
        ({"weight": CASE.gate_up[:, :15]}, ValueError, "gate and up rows"),
        ({"weight": CASE.gate_up.half()}, TypeError, "one type"),
        ({"bias": CASE.gate_up_bias.half()}, TypeError, "one type"),
        ({"bias": CASE.gate_up_bias[:, :3]}, ValueError, r"bias \[4, 16\]"),
        ({"x": CASE.x[:2]}, ValueError, "2 tokens with 2 experts"),
        ({"x": CASE.x.t().contiguous().t()}, ValueError, "lie together"),
        ({"weight": CASE.gate_up.to("meta")}, ValueError, "one device"),
        ({"activation": "softmax"}, ValueError, "unknown activation"),
    ],
)
def test_bad_arguments_of_the_gated_product_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"x": CASE.x, "weight": CASE.gate_up, "dispatch": CASE.dispatch, "activation": "silu"}
    grouped_linear_gated(**arguments)
    with pytest.raises(error, match=message):
        grouped_linear_gated(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weights": CASE.weights.half()}, TypeError, "fp32"),
        ({"weights": CASE.weights[:2]}, ValueError, r"weights \[T, 2\] for 6 pairs"),
        ({"weights": CASE.weights.t().contiguous()}, ValueError, r"weights \[T, 2\]"),
        ({"weights": CASE.weights.t().contiguous().t()}, ValueError, "contiguous weights"),
        ({"dispatch": Dispatch(CASE.dispatch.order[:4], CASE.dispatch.starts, 2)}, ValueError, "4 pairs"),
        ({"bias": CASE.gate_up_bias}, ValueError, r"bias \[4, 16\]"),
    ],
)
def test_bad_arguments_of_the_combined_product_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    h = torch.zeros(6, 8)
    arguments: dict[str, Any] = {"h": h, "weight": CASE.down, "dispatch": CASE.dispatch, "weights": CASE.weights}
    if "bias" in changes:
        changes = {"bias": changes["bias"][:, :8]}
    grouped_linear_combine(**arguments)
    with pytest.raises(error, match=message):
        grouped_linear_combine(**{**arguments, **changes})
