"""Speculation's arithmetic against what a reader would write down, and against the distributions it promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from hookline.execution.speculative import (
    accept,
    draw,
    exact_matches,
    merge_drafts,
    probabilities,
    relaxed_matches,
    sampled_matches,
    shift,
    synthetic_chance,
)

# Of a chi-square with so many degrees of freedom, the value that one in 100,000 passes.
CHI_SQUARE = {3: 25.9, 7: 36.0}
TRIALS = 40_000


def uniform(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distribution(size: int, seed: int) -> torch.Tensor:
    weights = uniform(size, seed=seed) ** 2
    return (weights / weights.sum()).float()


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    assert not counts[expected == 0].any(), "a token that has no probability"
    kept = expected > 0
    return float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum())


@pytest.mark.parametrize("width", [0, 1, 3])
def test_merge_puts_each_requests_drafts_behind_its_tokens(width: int) -> None:
    inputs = [[1, 2, 3], [4], [], [5, 6], [7]]
    counts = [min(width, count) for count in (3, 0, 2, 1, 3)]
    drafts = torch.arange(100, 100 + 5 * width).view(5, width)
    starts = torch.tensor([0, *itertools.accumulate(map(len, inputs))])
    tokens = torch.tensor(list(itertools.chain(*inputs)))
    merged, merged_starts = merge_drafts(tokens, starts, drafts, torch.tensor(counts))
    wanted = [own + drafts[row, : counts[row]].tolist() for row, own in enumerate(inputs)]
    assert merged.shape == (7 + 5 * width,), "the shape must not depend on the counts"
    flat = list(itertools.chain(*wanted))
    assert merged.tolist() == flat + [0] * (len(merged) - len(flat))
    assert merged_starts.tolist() == [0, *itertools.accumulate(map(len, wanted))]


def test_merge_of_an_empty_batch() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    merged, starts = merge_drafts(nothing, torch.tensor([0]), nothing.view(0, 2), nothing)
    assert (merged.tolist(), starts.tolist()) == ([], [0])


def test_shift_follows_the_emitted_tokens() -> None:
    """Two decodes that accepted 1 of 2 and 2 of 2, and a prompt's chunk whose next token is known."""
    tokens = torch.tensor([1, 11, 12, 2, 21, 22, 31, 32])
    shifted = shift(tokens, torch.tensor([1, 5, 7]), torch.tensor([91, 92, 33]))
    assert shifted[[0, 1]].tolist() == [11, 91]
    assert shifted[[3, 4, 5]].tolist() == [21, 22, 92]
    assert shifted[[6, 7]].tolist() == [32, 33]


@pytest.mark.parametrize("width", [0, 1, 2, 4])
def test_acceptance_stops_at_the_first_mismatch(width: int) -> None:
    patterns = list(itertools.product([False, True], repeat=width))
    cases = [(pattern, count) for pattern in patterns for count in range(width + 1)]
    matches = torch.tensor([pattern for pattern, _ in cases], dtype=torch.bool).view(len(cases), width)
    targets = torch.arange(len(cases) * (width + 1)).view(len(cases), width + 1)
    found = accept(matches, targets, torch.tensor([count for _, count in cases]))
    for row, (pattern, count) in enumerate(cases):
        taken = 0
        while taken < count and pattern[taken]:
            taken += 1
        assert found.counts[row] == taken
        assert found.next_tokens[row] == targets[row, taken]


def test_exact_matches_are_the_targets_own_choice() -> None:
    drafts, targets = torch.tensor([[5, 6], [5, 7]]), torch.tensor([[5, 6, 1], [4, 7, 2]])
    assert exact_matches(drafts, targets).tolist() == [[True, True], [False, True]]


def test_relaxed_top_1_is_argmax() -> None:
    logits = uniform(1, 500, 9, seed=0).mul(4).round()  # whole numbers, so that there are ties
    drafts = torch.randint(9, (1, 500), generator=torch.Generator().manual_seed(1))
    for delta in (0.0, 0.5, 1.0):
        found = relaxed_matches(logits, drafts, 1, delta)
        assert torch.equal(found, drafts == logits.argmax(dim=-1))


def test_relaxed_delta_0_keeps_only_ties_with_the_top() -> None:
    logits = torch.tensor([2.0, 1.0, 2.0, 0.0, 2.0]).expand(1, 5, 5)
    every = torch.arange(5)[None]
    assert relaxed_matches(logits, every, 5, 0.0).tolist() == [[True, False, True, False, True]]
    assert relaxed_matches(logits, every, 2, 0.0).tolist() == [[True, False, True, False, False]]


def test_relaxed_delta_1_keeps_all_of_the_top() -> None:
    logits = torch.tensor([5.0, -3.0, 2.0, 0.0, 4.0]).expand(1, 5, 5)
    found = relaxed_matches(logits, torch.arange(5)[None], 3, 1.0)
    assert found.tolist() == [[True, False, True, False, True]]


def test_relaxed_delta_compares_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1, 4, 4)
    for delta, kept in ((0.1, 1), (0.21, 2), (0.36, 3), (0.46, 4)):
        assert relaxed_matches(logits, torch.arange(4)[None], 10, delta).sum() == kept


@pytest.mark.parametrize("same", [False, True])
def test_sampled_proposals_keep_the_targets_distribution(same: bool) -> None:
    """Whatever the draft proposes with, the first token is drawn from p_0, and the one after an accepted draft from
    p_1, a distribution of its own."""
    size, width = 8, 2
    target = torch.stack([distribution(size, 1), distribution(size, 2)])
    proposed = target if same else torch.stack([distribution(size, 3), distribution(size, 4)])
    target[0, 5] = 0.0
    target[0] /= target[0].sum()
    drafts = draw(proposed.expand(TRIALS, width, size), uniform(TRIALS, width, seed=5))
    matches, recovered = sampled_matches(
        drafts,
        proposed.expand(TRIALS, width, size),
        target.expand(TRIALS, width, size),
        uniform(TRIALS, width, seed=6),
        uniform(TRIALS, width, seed=7),
    )
    chosen = torch.where(matches, drafts, recovered)
    assert chi_square(chosen[:, 0], target[0]) < CHI_SQUARE[7]
    assert chi_square(chosen[matches[:, 0], 1], target[1]) < CHI_SQUARE[7]
    overlap = torch.minimum(target, proposed).sum(dim=-1)
    assert torch.allclose(matches.double().mean(dim=0).float(), overlap, atol=0.01), "accepted as often as can be"
    if same:
        assert matches[:, 1].all()


def test_without_drafts_there_is_nothing_to_verify() -> None:
    nothing, drafts = torch.zeros(2, 0, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.int64)
    matches, recovered = sampled_matches(drafts, torch.zeros(2, 0, 4), torch.zeros(2, 0, 4), nothing, nothing)
    assert matches.shape == recovered.shape == (2, 0)
    found = accept(matches, torch.tensor([[3], [1]]), torch.tensor([0, 0]))
    assert (found.counts.tolist(), found.next_tokens.tolist()) == ([0, 0], [3, 1])


def test_draw_never_gives_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(6, 5)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.9999, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, draws).tolist() == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((1.0, 0, 1.0, 0.0), [0.4, 0.1, 0.2, 0.2, 0.1]),
        ((1.0, 2, 1.0, 0.0), [0.5, 0.0, 0.25, 0.25, 0.0]),  # with the one level with the second
        ((1.0, 0, 0.59, 0.0), [2 / 3, 0.0, 1 / 3, 0.0, 0.0]),  # of two level ones the lower id
        ((1.0, 0, 1.0, 0.3), [0.5, 0.0, 0.25, 0.25, 0.0]),
        ((1.0, 3, 0.7, 0.3), [2 / 3, 0.0, 1 / 3, 0.0, 0.0]),
        ((0.5, 0, 1.0, 0.0), [0.16 / 0.26, 0.01 / 0.26, 0.04 / 0.26, 0.04 / 0.26, 0.01 / 0.26]),
        ((1e-4, 0, 1.0, 0.0), [1.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_probabilities_follow_the_options(options: tuple[float, int, float, float], wanted: list[float]) -> None:
    logits = torch.tensor([[0.4, 0.1, 0.2, 0.2, 0.1]]).log()
    columns = [torch.tensor([[value]]) for value in options]
    found = probabilities(logits, *columns)
    assert torch.allclose(found, torch.tensor([wanted]), atol=1e-6)


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.37, 0.8, 1.0])
def test_synthetic_chance_solves_for_the_rate(rate: float, num_drafts: int) -> None:
    chance = synthetic_chance(rate, num_drafts)
    share = sum(chance**i for i in range(1, num_drafts + 1)) / num_drafts
    assert abs(share - rate) < 1e-8
    if num_drafts == 1 or rate in (0.0, 1.0):
        assert abs(chance - rate) < 1e-8


def test_synthetic_acceptance_has_the_rate() -> None:
    for rate in (0.0, 0.6, 1.0):
        matches = uniform(TRIALS, 3, seed=8) < synthetic_chance(rate, 3)
        found = accept(matches, torch.zeros(TRIALS, 4, dtype=torch.int64), torch.full((TRIALS,), 3))
        assert abs(found.counts.double().mean() / 3 - rate) < 0.01


def whole_step(
    tokens: torch.Tensor, starts: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Everything here in the order of a step, made of nothing but tensors."""
    requests, width = drafts.shape
    merged, merged_starts = merge_drafts(tokens, starts, drafts, counts)
    forbidden = torch.arange(logits.shape[-1], device=logits.device) % 32 == 0
    masked = logits.masked_fill(forbidden, -torch.inf)
    targets = masked.argmax(dim=-1)
    matches = exact_matches(drafts, targets) | relaxed_matches(masked[:, :-1], drafts, 3, 0.4)
    options = [torch.full((requests * width, 1), value, device=logits.device) for value in (0.7, 5, 0.9, 0.01)]
    target = probabilities(masked[:, :-1].flatten(0, 1), *options).view(requests, width, -1)
    shares = torch.linspace(0.1, 0.9, requests * width, dtype=torch.float64, device=logits.device).view(drafts.shape)
    drawn, recovered = sampled_matches(drafts, target.flip(0), target, shares, shares.flip(0))
    targets = torch.cat([torch.where(drawn, targets[:, :-1], recovered), targets[:, -1:]], dim=1)
    verdict = accept(matches, targets, counts)
    last_rows = merged_starts[1:] - 1 - counts + verdict.counts
    return merged, merged_starts, verdict.counts, verdict.next_tokens, shift(merged, last_rows, verdict.next_tokens)


def step_inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, (4,), generator=generator)
    logits = torch.randn(4, 4, 50, generator=generator)
    drafts = logits[:, :-1].argmax(dim=-1)
    drafts[torch.rand(drafts.shape, generator=generator) < 0.3] = 7
    return [torch.arange(9), torch.tensor([0, 1, 4, 4 + seed, 9]), drafts, counts, logits]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_whole_step_is_one_cuda_graph() -> None:
    inputs = [tensor.cuda() for tensor in step_inputs(1)]
    whole_step(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = whole_step(*inputs)
    for seed in (1, 2, 3):
        for place, tensor in zip(inputs, step_inputs(seed), strict=True):
            place.copy_(tensor)
        graph.replay()
        for found, wanted in zip(outputs, whole_step(*step_inputs(seed)), strict=True):
            assert torch.equal(found.cpu(), wanted)


def test_shapes_of_a_step_do_not_depend_on_what_is_accepted() -> None:
    shapes = {tuple(tuple(output.shape) for output in whole_step(*step_inputs(seed))) for seed in range(1, 5)}
    assert len(shapes) == 1
