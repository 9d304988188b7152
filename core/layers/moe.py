"""Mixture of experts: the router chooses, tokens go to their experts, what these give is combined; shared experts.

    y[t] = sum over the chosen e of weight[t, e] * down_e(f(gate_e(x[t])) * up_e(x[t]))      (+ shared expert)

Benchmarks may force the routing: a router with random weights can collapse to few experts, which flatters the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from hookline.layers.mlp import gated_mlp
from hookline_kernels.grouped_gemm import grouped_linear_combine, grouped_linear_gated
from hookline_kernels.linear import linear
from hookline_kernels.moe_routing import RoutingRule, choose_experts, sort_by_expert

if TYPE_CHECKING:
    from hookline.model import ForwardBatch

# Rows of the table of forced scores: a prime, so that tokens whose slots lie regularly have different rows.
_ROWS = 8191
# From layer to layer the rows shift by so many.
_STRIDE = 977
# What a request's own score weighs against the token's, in correlated routing.
_REQUEST_SHARE = 2.0

# Takes note of a layer's choices: the layer's number, expert ids [T, k].
Watch = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class ForcedRouting:
    """Scores that stand in for the router's, for benchmarks. `make` makes one.

    Attributes:
        mode: `uniform`: each token's choice is independent of all others; `correlated`: tokens of a request mostly
            choose the same experts, and requests are independent.
        table: [2 * rows, E] fp32, normal scores; all of one row makes a choice in which no expert is preferred.
    """

    mode: Literal["uniform", "correlated"]
    table: torch.Tensor
    # Of the last batch, for its layers all ask: what is not the model's own work should be little.
    _numbers: tuple[ForwardBatch, torch.Tensor, torch.Tensor | None] | None = field(default=None, init=False)

    @classmethod
    def make(cls, mode: Literal["uniform", "correlated"], num_experts: int, device: torch.device) -> ForcedRouting:
        """The same table for the same number of experts, wherever it lies."""
        generator = torch.Generator().manual_seed(num_experts)
        scores = torch.randn((_ROWS, num_experts), generator=generator)
        return cls(mode, scores.repeat(2, 1).to(device))

    def logits(self, layer: int, batch: ForwardBatch) -> torch.Tensor:
        """Scores [T, E] fp32. A token is told by its cache slot, a request by its first cache block."""
        numbers = self._numbers  # which another thread may set meanwhile: kernels are compiled by many
        if numbers is None or numbers[0] is not batch:
            numbers = self._numbers = batch, batch.slots.remainder(_ROWS), self._requests(batch)
        _, tokens, requests = numbers
        # The table is there twice, so that a layer's shift is a mere view.
        shifted = self.table.narrow(0, layer * _STRIDE % _ROWS, _ROWS)
        scores = shifted.index_select(0, tokens)
        return scores if requests is None else scores.add_(shifted.index_select(0, requests), alpha=_REQUEST_SHARE)

    def _requests(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The row of each token's request, [T]; None where it does not matter."""
        if self.mode == "uniform":
            return None
        requests, count = batch.block_tables[:, 0].remainder(_ROWS), batch.slots.shape[0]
        if len(requests) == count:
            return requests
        tokens = torch.arange(count, device=requests.device, dtype=batch.query_starts.dtype)
        return requests.index_select(0, torch.searchsorted(batch.query_starts[1:], tokens, right=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """The experts of one kind of layer.

    Attributes:
        rule: how experts and their weights follow from the router's logits.
        num_experts: E.
        activation: the experts' own, a name of `kernels/activation.py`.
        forced: scores in place of the router's, for benchmarks.
        watch: is told each layer's choices, for benchmarks and tests; it must not make the host wait.
    """

    rule: RoutingRule
    num_experts: int
    activation: str
    forced: ForcedRouting | None = None
    watch: Watch | None = None

    def __call__(
        self,
        layer: int,
        x: torch.Tensor,
        gate: torch.Tensor,
        mlp_1: torch.Tensor,
        mlp_2: torch.Tensor,
        batch: ForwardBatch,
        correction_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the chosen experts of `layer` make of `x` [T, M]: [T, M].

        Args:
            gate: the router [E, M], whose logits are fp32.
            mlp_1: [E, 2F, M], each expert's gate rows before its up rows, as `pack_expert_weight` gives it.
            mlp_2: [E, M, F], likewise.
            correction_bias: [E] fp32, added to the scores for the choice alone.
        """
        # With forced routing too, for the router's product is part of what is measured.
        logits = linear(x, gate, wide=True)
        if self.forced is not None:
            logits, correction_bias = self.forced.logits(layer, batch), None
        expert_ids, weights = choose_experts(logits, self.rule, correction_bias)
        if self.watch is not None:
            self.watch(layer, expert_ids)
        dispatch = sort_by_expert(expert_ids, self.num_experts)
        hidden = grouped_linear_gated(x, mlp_1, dispatch, self.activation)
        return grouped_linear_combine(hidden, mlp_2, dispatch, weights)


def shared_expert(
    x: torch.Tensor, mlp_1: torch.Tensor, mlp_2: torch.Tensor, activation: str, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The expert that every token of `x` [T, M] passes, [T, M]; with `gate` [1, M] times sigmoid(gate(x))."""
    y = gated_mlp(x, mlp_1, mlp_2, activation)
    return y if gate is None else (y * linear(x, gate, wide=True).sigmoid_()).to(y.dtype)
