"""Lengths, prompts and arrivals are what the recipe says, whoever draws them."""

from __future__ import annotations

import math

import pytest

from hookline.benchmark.workload import Lengths, fixed_lengths, lognormal_lengths, make_prompts, poisson_arrivals
from hookline.errors import UsageError


def test_lognormal_lengths_are_those_of_the_published_recipe() -> None:
    work = lognormal_lengths(2000)
    assert [(one.prompt, one.output) for one in work[:4]] == [(81, 119), (255, 104), (647, 24), (146, 34)]
    assert round(sum(one.prompt for one in work) / 2000, 1) == 205.6
    assert round(sum(one.output for one in work) / 2000, 1) == 181.7
    assert min(min(one.prompt, one.output) for one in work) == 4
    assert max(max(one.prompt, one.output) for one in work) == 1024
    assert lognormal_lengths(10) == work[:10]
    assert lognormal_lengths(10, seed=1) != work[:10]


def test_prompts_have_their_lengths_and_share_no_beginning() -> None:
    work = [Lengths(16, 1), Lengths(1, 9), Lengths(16, 2)]
    prompts = make_prompts(work, vocab_size=320)
    assert [len(prompt) for prompt in prompts] == [16, 1, 16]
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)
    assert prompts[0][:8] != prompts[2][:8]
    assert make_prompts(work, 320) == prompts
    assert make_prompts(work, 320, seed=1) != prompts


def test_fixed_lengths() -> None:
    assert fixed_lengths(3, 5, 7) == [Lengths(5, 7)] * 3
    assert Lengths(5, 7).total == 12


def test_arrivals_keep_the_rate_and_their_order() -> None:
    arrivals = poisson_arrivals(4000, rate=20.0)
    gaps = [later - sooner for sooner, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert all(gap >= 0 for gap in gaps)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # The gaps of a Poisson process scatter as much as they last.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)
    assert poisson_arrivals(3, 20.0) == arrivals[:3]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_must_be_one(rate: float) -> None:
    with pytest.raises(UsageError, match="rate"):
        poisson_arrivals(3, rate)
