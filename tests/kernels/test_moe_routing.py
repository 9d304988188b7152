"""The choice of experts and the order of pairs: Triton and torch against definitions in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline_kernels.implementations import explain
from hookline_kernels.moe_routing import (
    IMPLEMENTATIONS,
    SORT_IMPLEMENTATIONS,
    Dispatch,
    RoutingRule,
    choose_experts,
    sort_by_expert,
)
from hookline_kernels.moe_routing_triton import sort_by_expert_triton

MIXTRAL = RoutingRule(top_k=2, scoring="softmax", renormalize=True)
DEEPSEEK = RoutingRule(top_k=4, scoring="sigmoid", renormalize=True, scale=2.5, num_groups=4, top_groups=2)


def definition(logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None) -> tuple[list[Any], list[Any]]:
    """In fp64, a token at a time; `sorted` is stable, so the lower id comes first among equals."""
    all_ids, all_weights = [], []
    for row in logits.double().cpu():
        scores = (row.softmax(-1) if rule.scoring == "softmax" else row.sigmoid()).tolist()
        biased = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        size = len(scores) // rule.num_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(rule.num_groups)]
        order = sorted(range(rule.num_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))
        eligible = sorted(e for g in order[: rule.top_groups] for e in range(g * size, (g + 1) * size))
        ids = sorted(eligible, key=lambda e: -biased[e])[: rule.top_k]
        weights = [scores[e] for e in ids]
        total = sum(weights) if rule.renormalize else 1.0
        all_ids.append(ids)
        all_weights.append([rule.scale * weight / total for weight in weights])
    return all_ids, all_weights


RULES = [
    (MIXTRAL, 8, False),
    (RoutingRule(top_k=4, scoring="softmax", renormalize=False), 60, False),  # Qwen1.5-MoE, not a power of 2
    (RoutingRule(top_k=8, scoring="sigmoid", renormalize=True, scale=2.5), 256, True),  # GLM
    (DEEPSEEK, 32, True),
    (RoutingRule(top_k=6, scoring="softmax", renormalize=False, scale=16.0, num_groups=8, top_groups=3), 160, False),
    (RoutingRule(top_k=3, scoring="sigmoid", renormalize=False, num_groups=3, top_groups=2), 15, True),
    (RoutingRule(top_k=2, scoring="sigmoid", renormalize=True, num_groups=4, top_groups=2), 4, False),  # groups of 1
    (RoutingRule(top_k=16, scoring="softmax", renormalize=True), 512, False),
    (RoutingRule(top_k=5, scoring="softmax", renormalize=True), 5, True),  # all of them
    (RoutingRule(top_k=1, scoring="sigmoid", renormalize=False), 1, False),
]


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize(("rule", "experts", "biased"), RULES)
def test_choice_equals_the_definition(
    rule: RoutingRule, experts: int, biased: bool, implementation: str, triton_device: torch.device
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    generator = torch.Generator().manual_seed(experts)
    bias = torch.randn(experts, generator=generator) * 0.3 if biased else None
    for tokens in (0, 1, 5):
        wide = torch.full((tokens, experts + 3), float("nan"))
        wide[:, :experts] = torch.randn(tokens, experts, generator=generator) * 2
        used = None if bias is None else bias.to(device)
        ids, weights = choose_experts(wide.to(device)[:, :experts], rule, used, implementation=implementation)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert ids.shape == weights.shape == (tokens, rule.top_k) and ids.is_contiguous() and weights.is_contiguous()
        wanted_ids, wanted_weights = definition(wide[:, :experts], rule, bias)
        assert ids.tolist() == wanted_ids
        wanted = torch.tensor(wanted_weights).reshape(tokens, rule.top_k)
        torch.testing.assert_close(weights.cpu(), wanted, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("rule", [MIXTRAL, DEEPSEEK], ids=["softmax", "groups"])
def test_the_lower_id_comes_first_among_equals(
    rule: RoutingRule, implementation: str, triton_device: torch.device
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    logits = torch.zeros(3, 16, device=device)
    logits[1, [3, 7, 11]] = 1.0
    logits[2, 12:] = 1.0
    ids, weights = choose_experts(logits, rule, implementation=implementation)
    k = rule.top_k
    wanted = [list(range(k)), [3, 7, 11, 0][:k], [12, 13, 14, 15][:k]]
    if rule is DEEPSEEK:  # the groups of the ones: 0 to 3 and 4 to 7 are chosen before 8 to 11
        wanted[1] = [3, 7, 0, 1]
    assert ids.tolist() == wanted
    assert torch.allclose(weights.sum(-1), torch.full((3,), rule.scale, device=device))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("rule", [MIXTRAL, DEEPSEEK], ids=["softmax", "groups"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_logits_keep_ids_valid_and_spoil_no_other_row(
    rule: RoutingRule, implementation: str, bad: float, triton_device: torch.device
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).to(device)
    alone = choose_experts(logits[::2].contiguous(), rule, implementation=implementation)
    logits[1] = bad
    logits[3, 5] = bad
    logits[5, [0, 15]] = bad
    ids, weights = choose_experts(logits, rule, implementation=implementation)
    assert torch.equal(ids[::2], alone[0]) and torch.equal(weights[::2], alone[1])
    for row in ids.tolist():
        assert len(set(row)) == rule.top_k and all(0 <= expert < 16 for expert in row)
    if bad != bad:
        assert bool(weights[1].isnan().all()) and bool(weights[3].isnan().any())
    reference = choose_experts(logits, rule, implementation="reference")
    assert torch.equal(ids, reference[0]) and torch.equal(weights.isnan(), reference[1].isnan())


def test_half_precision_logits_are_scored_in_fp32(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(triton_device, triton_dtype)
    found = choose_experts(logits, MIXTRAL, implementation="triton")
    wanted = choose_experts(logits.float(), MIXTRAL, implementation="reference")
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-6, atol=0.0)


def sorted_definition(ids: torch.Tensor, experts: int) -> tuple[list[int], list[int]]:
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: flat[pair])
    return order, [sum(expert < bound for expert in flat) for bound in range(experts + 1)]


IDS = [
    (0, 2, 4),
    (1, 1, 1),
    (1, 2, 8),
    (7, 2, 8),
    (5, 8, 8),
    (33, 4, 60),
    (129, 2, 256),
]


@pytest.mark.parametrize("way", ["torch", "triton", "three launches"])
@pytest.mark.parametrize(("tokens", "k", "experts"), IDS)
def test_pairs_are_sorted_and_stable(tokens: int, k: int, experts: int, way: str, triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)] or [torch.zeros(k)])
    cases = [ids[:tokens], torch.full((tokens, k), experts - 1), torch.full((tokens, k), experts // 2)]
    for case in cases:
        used = case.int().to("cpu" if way == "torch" else triton_device)
        if way == "three launches":
            if tokens == 0:
                continue
            found = Dispatch(*sort_by_expert_triton(used, experts, compared=0, chunk=32), k)
        else:
            found = sort_by_expert(used, experts, implementation=way)
        assert (found.order.dtype, found.starts.dtype, found.top_k) == (torch.int32, torch.int32, k)
        assert (found.order.tolist(), found.starts.tolist()) == sorted_definition(used, experts)


def test_the_choice_of_an_implementation() -> None:
    assert explain(IMPLEMENTATIONS, (torch.zeros(1, 8), MIXTRAL)).name == "torch"
    assert explain(SORT_IMPLEMENTATIONS, (torch.zeros(1, 2, dtype=torch.int32), 8)).name == "torch"


def rule(**changes: Any) -> RoutingRule:
    values: dict[str, Any] = {"top_k": 2, "scoring": "softmax", "renormalize": True}
    return RoutingRule(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"scoring": "relu"}, "one of softmax, sigmoid"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups must be 1 to num_groups"),
        ({"top_groups": 0}, "top_groups must be 1 to num_groups"),
    ],
)
def test_unsound_rules_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(8)}, ValueError, r"\[T, E\]"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, ValueError, "float type"),
        ({"logits": torch.zeros(8, 2).t()}, ValueError, "contiguous rows"),
        ({"rule": rule(top_k=9)}, ValueError, "more than the 8 experts"),
        ({"rule": rule(num_groups=3)}, ValueError, "3 equal groups"),
        ({"rule": rule(top_k=3, num_groups=4)}, ValueError, "more than the 2 experts"),
        ({"correction_bias": torch.zeros(7)}, ValueError, r"correction_bias \[8\]"),
        ({"correction_bias": torch.zeros(8).half()}, TypeError, "fp32"),
        ({"implementation": "none"}, ValueError, "unknown implementation"),
    ],
)
def test_bad_arguments_of_the_choice_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 8), "rule": MIXTRAL}
    choose_experts(**arguments)
    with pytest.raises(error, match=message):
        choose_experts(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("ids", "experts", "error", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), 4, TypeError, "int32"),
        (torch.zeros(4, dtype=torch.int32), 4, ValueError, r"\[T, k\]"),
        (torch.zeros(4, 2, dtype=torch.int32).t(), 4, ValueError, "contiguous"),
        (torch.zeros(2, 2, dtype=torch.int32), 0, ValueError, "at least 1"),
        (torch.tensor([[0, 4]], dtype=torch.int32), 4, ValueError, r"\[0, 4\), got 0 to 4"),
        (torch.tensor([[-1, 2]], dtype=torch.int32), 4, ValueError, "got -1 to 2"),
    ],
)
def test_bad_arguments_of_the_sort_are_refused(
    ids: torch.Tensor, experts: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sort_by_expert(ids, experts)
