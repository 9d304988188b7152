"""Which experts each token goes to, and the pairs of token and expert in the order of the experts.

    scores = softmax(logits) over all experts, or sigmoid(logits)                             [T, E], in fp32
    choose_experts:  the k best of scores + bias, the best first; weights = scores of these    [T, k]
                     / their sum (renormalize), * scale
    sort_by_expert:  pair p = t * k + j is token t's j-th expert; all P = T * k pairs, stably sorted by expert

With groups (DeepSeek-V3) the experts fall into equal groups in the order of their ids, a group's score is the sum of
its two best biased scores, and only experts of the best `top_groups` groups are eligible. The bias takes part in the
choice alone, not in the weights. Among equals the lower id comes first, of groups too. NaN counts as the largest score,
so that each token has k different valid ids whatever its logits are.

Shapes: logits [T, E], bias [E], expert_ids and weights [T, k], order [P], starts [E + 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.moe_routing_triton import MAX_EXPERTS, SIGMOID_EPS, choose_experts_triton, sort_by_expert_triton

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How a token's experts and their weights follow from its logits.

    Attributes:
        top_k: experts a token.
        scoring: `softmax` over all experts, or `sigmoid`.
        renormalize: whether the chosen weights are divided by their sum.
        scale: factor of the weights, after that division.
        num_groups, top_groups: experts are chosen from the `top_groups` best of `num_groups` groups.

    Raises:
        ValueError: a value that makes no sense.
    """

    top_k: int
    scoring: str
    renormalize: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"RoutingRule: scoring must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")
        if self.top_k < 1:
            raise ValueError(f"RoutingRule: top_k must be at least 1, got {self.top_k}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"RoutingRule: top_groups must be 1 to num_groups, got {self.top_groups} of {self.num_groups}"
            )


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Pairs of token and expert, sorted by expert.

    Attributes:
        order: [P] int32, pair numbers t * top_k + j, by expert, and by number within an expert.
        starts: [E + 1] int32, where each expert's pairs begin in `order`; the last is P.
        top_k: experts a token.
    """

    order: torch.Tensor
    starts: torch.Tensor
    top_k: int


def choose_experts_reference(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in plain torch."""
    values = logits.float()
    scores = values.softmax(dim=-1) if rule.scoring == "softmax" else values.sigmoid()
    biased = scores if bias is None else scores + bias
    if rule.num_groups > 1 and len(biased):
        grouped = biased.view(len(biased), rule.num_groups, -1)
        best = grouped.sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)
        kept = _best(best, rule.top_groups)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        biased = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    ids = _best(biased, rule.top_k)
    weights = scores.gather(-1, ids)
    if rule.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + SIGMOID_EPS if rule.scoring == "sigmoid" else total)
    return ids.int(), weights if rule.scale == 1.0 else weights * rule.scale


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` largest in each row; unlike `topk`, the lower place first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def sort_by_expert_reference(expert_ids: torch.Tensor, num_experts: int) -> Dispatch:
    """By torch's stable sort."""
    experts, order = expert_ids.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
    starts = torch.searchsorted(experts, bounds, out_int32=True)
    return Dispatch(order.int(), starts, expert_ids.shape[1])


ChoiceQuery = tuple[torch.Tensor, RoutingRule]
ChooseExperts = Callable[[torch.Tensor, RoutingRule, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
SortQuery = tuple[torch.Tensor, int]
SortByExpert = Callable[[torch.Tensor, int], Dispatch]


def _choice_by_triton(query: ChoiceQuery) -> str | None:
    if query[0].shape[1] > MAX_EXPERTS:
        return f"it keeps up to {MAX_EXPERTS} experts in registers"
    return by_triton(query)


def sort_by_expert_on_gpu(expert_ids: torch.Tensor, num_experts: int) -> Dispatch:
    """By counting, with Triton."""
    return Dispatch(*sort_by_expert_triton(expert_ids, num_experts), expert_ids.shape[1])


IMPLEMENTATIONS: tuple[Implementation[ChoiceQuery, ChooseExperts], ...] = (
    Implementation("torch", on_cpu, choose_experts_reference),
    Implementation("triton", _choice_by_triton, choose_experts_triton),
    Implementation("reference", anywhere, choose_experts_reference),
)

SORT_IMPLEMENTATIONS: tuple[Implementation[SortQuery, SortByExpert], ...] = (
    Implementation("torch", on_cpu, sort_by_expert_reference),
    Implementation("triton", by_triton, sort_by_expert_on_gpu),
    Implementation("reference", anywhere, sort_by_expert_reference),
)


def choose_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction_bias: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and their weights: expert_ids [T, k] int32 and weights [T, k] fp32, the best first.

    Args:
        logits: [T, E], any float type, experts contiguous.
        correction_bias: [E] fp32, added to the scores for the choice only.
        implementation: a name of `IMPLEMENTATIONS`; by default the first that supports the logits.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            f"choose_experts: logits [T, E] of a float type with contiguous rows expected, got {logits.dtype} "
            f"{list(logits.shape)} strides {logits.stride()}"
        )
    experts = logits.shape[1]
    if experts % rule.num_groups:
        raise ValueError(f"choose_experts: {experts} experts do not fall into {rule.num_groups} equal groups")
    eligible = experts // rule.num_groups * rule.top_groups
    if rule.top_k > eligible:
        raise ValueError(f"choose_experts: top_k {rule.top_k} is more than the {eligible} experts to choose from")
    if correction_bias is not None:
        if correction_bias.shape != (experts,) or correction_bias.device != logits.device:
            raise ValueError(
                f"choose_experts: correction_bias [{experts}] on {logits.device} expected, got "
                f"{list(correction_bias.shape)} on {correction_bias.device}"
            )
        if correction_bias.dtype != torch.float32 or not correction_bias.is_contiguous():
            raise TypeError(f"choose_experts: correction_bias must be contiguous fp32, got {correction_bias.dtype}")
    return choose(IMPLEMENTATIONS, (logits, rule), implementation)(logits, rule, correction_bias)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int, *, implementation: str | None = None) -> Dispatch:
    """All pairs of token and expert, stably sorted by expert.

    Args:
        expert_ids: [T, k] int32, contiguous, each in [0, num_experts): not looked at on a GPU, where the host cannot.
        implementation: a name of `SORT_IMPLEMENTATIONS`; by default the first that supports the ids.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if expert_ids.dtype != torch.int32:
        raise TypeError(f"sort_by_expert: expert_ids must be int32, got {expert_ids.dtype}")
    if expert_ids.dim() != 2 or expert_ids.shape[1] < 1 or not expert_ids.is_contiguous():
        raise ValueError(
            f"sort_by_expert: contiguous expert_ids [T, k] expected, got {list(expert_ids.shape)} "
            f"strides {expert_ids.stride()}"
        )
    if num_experts < 1:
        raise ValueError(f"sort_by_expert: num_experts must be at least 1, got {num_experts}")
    if expert_ids.device.type == "cpu" and expert_ids.numel():
        lowest, highest = (int(bound) for bound in expert_ids.aminmax())
        if lowest < 0 or highest >= num_experts:
            raise ValueError(
                f"sort_by_expert: expert_ids must be in [0, {num_experts}), got {lowest} to {highest}; "
                "give num_experts the router's number of experts"
            )
    return choose(SORT_IMPLEMENTATIONS, (expert_ids, num_experts), implementation)(expert_ids, num_experts)
