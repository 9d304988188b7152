"""The trained model with drafts against an independent implementation, step by step, and against itself without them.

`golden.json` has what that implementation gave in fp32; its prompts have from 10 to 360 tokens, and lists hold 64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline.model import DraftBatch, Proposer
from hookline.scheduling.request import Request
from hookline_glm5_2_mtp.mtp import MTPProposer
from tests.glm5_2.drafting import Watch
from tests.glm5_2.models import GOLDEN_MODEL

CASES: list[dict[str, Any]] = json.loads((GOLDEN_MODEL / "golden.json").read_text())["cases"]
PROMPTS = [case["prompt"] for case in CASES]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
# Beyond what golden.json has, so that its last step is not cut short.
LONGER = SamplingParams(max_tokens=60, ignore_eos=True)


class Notes(Proposer):
    """Proposes as the draft does, and takes notes for each request, which is told by its first block.

    Attributes:
        steps: drafts, their logits, and the list that later draft steps had, of each step.
    """

    def __init__(self, proposer: MTPProposer) -> None:
        self.proposer = proposer
        self.watch = Watch(proposer.attention)
        proposer.attention = self.watch  # type: ignore[assignment]
        self.steps: dict[int, list[tuple[list[int], list[float], set[int]]]] = {}

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            ids = batch.choose(logits, step)
            found.append(logits.gather(1, ids[:, None])[:, 0])
            return ids

        self.watch.calls.clear()
        drafts = self.proposer.propose(replace(batch, choose=choose))
        logits, (_, lists, _) = torch.stack(found, dim=1).tolist(), self.watch.calls[-1]
        for row, block in enumerate(batch.forward.block_tables[:, 0].tolist()):
            listed = set() if lists is None else set(lists[row].tolist()) - {-1}
            self.steps.setdefault(block, []).append((drafts[row].tolist(), logits[row], listed))
        return drafts


class Forced(Proposer):
    """Proposes so that exactly `count` drafts are accepted in each step; fills the draft's cache all the same."""

    def __init__(self, proposer: Proposer, count: int) -> None:
        self.proposer = proposer
        self.count = count
        self.texts: dict[int, list[int]] = {}

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        drafts, forward = self.proposer.propose(batch), batch.forward
        starts = forward.query_starts.tolist()
        for row, block in enumerate(forward.block_tables[:, 0].tolist()):
            if forward.positions[starts[row]] == 0:
                prompt = forward.token_ids[starts[row] : starts[row + 1]].tolist()
                case = next(case for case in CASES if case["prompt"] == prompt)
                self.texts[block] = prompt + case["greedy"]
            begin = int(forward.positions[batch.last_rows[row]]) + 2
            for place in range(batch.num_drafts):
                right = [*self.texts[block], *[0] * 99][begin + place]
                drafts[row, place] = right if place < self.count else (right + 1) % 8192
        return drafts


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[..., Engine]]:
    made: dict[str, Engine] = {}

    def make(num_drafts: int | None, **options: Any) -> Engine:
        key = json.dumps([num_drafts, options])
        if key not in made:
            speculative = None if num_drafts is None else SpeculativeConfig(num_speculative_tokens=num_drafts)
            faults = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
            known: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "block_size": 8}
            known |= {"kv_cache_memory": 2**24, "max_batch_tokens": 1024, "prefix_caching": False}
            config = EngineConfig(str(GOLDEN_MODEL), speculative=speculative, **known | options)
            made[key] = Engine(config, **faults)
        return made[key]

    yield make


@pytest.mark.parametrize("num_drafts", [3, 5])
def test_every_step_is_that_of_the_independent_implementation(load: Callable[..., Engine], num_drafts: int) -> None:
    engine = load(num_drafts)
    runner: Any = engine._runner
    notes = Notes(MTPProposer(engine.loaded.opened.model))  # type: ignore[arg-type]
    original, runner.proposer = runner.proposer, notes
    results = engine.generate(PROMPTS, LONGER)
    runner.proposer = original
    found = list(notes.steps.values())
    for case, result in zip(CASES, results, strict=True):
        output = result.outputs[0]
        assert list(output.token_ids)[:48] == case["greedy"]
        expected = case["steps" if num_drafts == 3 else "steps_5"]
        assert output.speculative is not None
        steps = output.speculative[: len(expected)]
        assert [
            {"num_accepted": step.num_accepted, "next_token": step.next_token, "drafts": list(step.drafts)}
            for step in steps
        ] == [{name: step[name] for name in ("num_accepted", "next_token", "drafts")} for step in expected]
        own = next(each for each in found if [one[0] for one in each[:9]] == [s["drafts"] for s in expected[:9]])
        for (_, logits, _), step in zip(own, expected, strict=False):
            assert logits == pytest.approx(step["draft_logits"], abs=1e-3)
        if num_drafts == 3:
            assert case["draft_list_gap"] is None or case["draft_list_gap"] > 1e-4
            for number, positions in case["draft_list"].items():
                assert own[int(number)][2] == set(positions), (case["text"][:40], number)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_greedy_text_is_that_without_drafts(load: Callable[..., Engine], num_drafts: int) -> None:
    """In batches, with prefills in chunks beside decodes, and a request preempted."""
    engine = load(num_drafts, max_chunk_tokens=64, preempt_every=12, max_running=4)
    taken: list[Request] = []
    add = engine.scheduler.add
    engine.scheduler.add = lambda request: (taken.append(request), add(request))[1]  # type: ignore[method-assign]
    results = engine.generate(PROMPTS[:6], replace(GREEDY, max_tokens=24))
    assert [list(result.outputs[0].token_ids) for result in results] == [case["greedy"][:24] for case in CASES[:6]]
    assert sum(request.preemptions for request in taken) > 0


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_greedy_text_is_the_same_for_any_number_of_accepted_drafts(load: Callable[..., Engine], count: int) -> None:
    engine = load(3)
    runner: Any = engine._runner
    original, runner.proposer = runner.proposer, Forced(runner.proposer, count)
    results = engine.generate(PROMPTS, replace(GREEDY, max_tokens=24))
    runner.proposer = original
    for case, result in zip(CASES, results, strict=True):
        output = result.outputs[0]
        assert list(output.token_ids) == case["greedy"][:24]
        assert output.speculative is not None
        first, *steps, _ = output.speculative
        assert first.num_accepted == 0
        assert {step.num_accepted for step in steps} == {count}


def test_warm_prefixes_change_no_text(load: Callable[..., Engine]) -> None:
    """The draft's entries of a prefix come with its blocks."""
    engine = load(3, prefix_caching=True)
    prompts = [case["prompt"] + case["greedy"][:24] for case in CASES[:6]]
    expected = [case["greedy"][24:] for case in CASES[:6]]
    for _ in range(2):
        results = engine.generate(prompts, replace(GREEDY, max_tokens=24))
        assert [list(result.outputs[0].token_ids) for result in results] == expected
    assert engine.pool.counters.hit_tokens > 0
