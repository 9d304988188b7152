"""Speculative steps that are launched before the one before is known give what plain steps give, whatever happens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline.execution.sampling_state import SamplingState
from hookline.execution.speculative_runner import SpeculativeRunner
from hookline.execution.unified_runner import UnifiedRunner
from tests.execution.test_device_runner import EDITED, PARAMS, results, spy_on_launches

TRAINED = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp"
TEXT = "Once upon a time there was a fox who lived in a forest near the river, and every day he went to the market."
PROMPTS = [TEXT[: 3 + 8 * n] for n in range(6)] + ["Tell me a short story.", "x"]
# For a tokenizer whose tokens are of several letters.
LONG_PROMPTS = [TEXT[: 3 + 20 * n] for n in range(6)] + PROMPTS[6:]

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def engine(half_right: Path) -> Make:
    """Makes engines of a small model, or of `model`."""

    def make(
        overlap: bool, drafts: int = 3, changes: dict[str, Any] | None = None, model: Path = half_right, **options: Any
    ) -> Engine:
        switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
        known = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
        speculative = SpeculativeConfig(num_speculative_tokens=drafts, **changes or {}) if drafts else None
        config = EngineConfig(str(model), overlap=overlap, speculative=speculative, **(known | options))
        made = Engine(config, **switches)
        assert isinstance(made._runner, UnifiedRunner) == (overlap and bool(drafts))
        return made

    return make


def finish(run: Engine) -> None:
    """Nothing is left behind."""
    run.settle()
    run.scheduler.check()
    assert run.pool.num_referenced == 0


@pytest.fixture(scope="module")
def wanted(engine: Make) -> Callable[..., list[Any]]:
    """Results of plain steps without drafts."""
    known: dict[Any, list[Any]] = {}

    def compute(kinds: Sequence[SamplingParams], prompts: Sequence[str] = PROMPTS, **options: Any) -> list[Any]:
        key = (tuple(map(repr, kinds)), tuple(prompts), *options.values())
        if key not in known:
            with engine(False, 0, **options) as plain:
                known[key] = results(plain.generate(prompts, list(kinds)))
        return known[key]

    return compute


MIXED = PARAMS[:5] + EDITED


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, PARAMS),
        ({}, MIXED),
        ({"drafts": 1}, PARAMS),
        ({"drafts": 5, "block_size": 4}, PARAMS),
        ({"max_batch_tokens": 11}, MIXED),
        ({"max_running": 3}, PARAMS),
        ({"kv_cache_memory": 185_000}, MIXED),
        ({"preempt_every": 4}, PARAMS),
        ({"preempt_every": 3, "max_chunk_tokens": 5, "prefix_caching": False}, MIXED),
    ],
    ids=["plain", "edited", "one draft", "five", "small steps", "three at a time", "few blocks", "preempted", "chunks"],
)
def test_equals_plain_steps(options: dict[str, Any], kinds: list[SamplingParams], engine: Make, wanted: Any) -> None:
    with engine(True, **options) as run:
        launches = spy_on_launches(run)
        outputs = [run.generate(PROMPTS, kinds) for _ in range(2)]
        finish(run)
    assert [results(each) for each in outputs] == [wanted(kinds)] * 2
    assert max(launches) == 1, "steps did not overlap"
    steps = [step for output in outputs[0] for step in output.outputs[0].speculative or ()]
    assert any(step.num_accepted for step in steps) and any(step.num_accepted < step.num_drafts for step in steps)


@pytest.mark.parametrize("changes", [{}, {"synthetic_acceptance_rate": 0.5}], ids=str)
def test_steps_are_those_that_the_host_settles(changes: dict[str, Any], engine: Make) -> None:
    """Accepted counts and drafts too, but for steps that end a request, whose last drafts nobody needs."""
    found = []
    for overlap in (False, True):
        with engine(overlap, changes=changes, max_batch_tokens=64) as run:
            outputs = run.generate(PROMPTS[:5], SamplingParams(max_tokens=24, ignore_eos=True))
            steps = [output.outputs[0].speculative or () for output in outputs]
            found.append([[(s.num_accepted, s.next_token, s.drafts) for s in each[:-2]] for each in steps])
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 20


def test_a_request_that_comes_and_one_that_goes(engine: Make, wanted: Any) -> None:
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    want = wanted([long] * 2, PROMPTS[3:5])
    with engine(True, max_running=3) as run:
        first = run.add_request(PROMPTS[3], long)
        gone, outputs, second = [run.add_request(PROMPTS[6], long)], {}, ""
        for step in range(200):
            outputs |= {output.request_id: output for output in run.step()}
            if step == 3:
                assert run.abort(gone[0])
                second = run.add_request(PROMPTS[4], long)
            if 4 < step < 12:
                gone.append(run.add_request(PROMPTS[0], long))
                assert run.abort(gone[-1])
            if not run.has_work:
                break
        assert results([outputs[first], outputs[second]]) == want
        assert {outputs[name].outputs[0].finish_reason for name in gone} == {"abort"}
        finish(run)


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.5, "logprobs": 2}], ids=str)
@pytest.mark.parametrize("where", ["launch", "after launch", "collect", "between"])
def test_an_interrupt_loses_nothing(where: str, options: dict[str, Any], engine: Make, wanted: Any) -> None:
    many, long = PROMPTS[:4], SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True, **options)
    want = wanted([long] * 4, many)
    with engine(True) as run:
        names = [run.add_request(prompt, long) for prompt in many]
        owner, verb = (run, "_launch") if where == "between" else (run._runner, where.removeprefix("after "))
        original, calls = getattr(owner, verb), 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            result = original(*arguments) if where in ("after launch", "between") else None
            if calls in (2, 5, 6):
                raise KeyboardInterrupt
            return result if result is not None else original(*arguments)

        setattr(owner, verb, interrupted)
        outputs, interrupts = {}, 0
        while run.has_work:
            try:
                outputs |= {output.request_id: output for output in run.step()}
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 3
        assert results([outputs[name] for name in names]) == want
        finish(run)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("where", ["before requests come in", "after the decision"])
def test_an_interrupt_after_a_preemption_loses_nothing(where: str, drafts: int, engine: Make, wanted: Any) -> None:
    """Nobody is told then that the request has lost its cache, and its slot must not pass for one that knows it."""
    many, long = PROMPTS[:3], SamplingParams(max_tokens=24, ignore_eos=True)
    want = wanted([long] * 3, many)
    for first in range(3):
        with engine(True, drafts, preempt_every=4, max_running=3) as run:
            scheduler, seen = run.scheduler, 0
            admit, decide = scheduler._admit, scheduler.schedule

            def interrupt(preempted: Sequence[Any], first: int = first) -> None:
                nonlocal seen
                seen += bool(preempted)
                if preempted and seen == first + 1:
                    raise KeyboardInterrupt

            def admitting(plan: Any, admit: Any = admit) -> None:
                interrupt(plan.preempted)
                admit(plan)

            def deciding(decide: Any = decide) -> Any:
                batch = decide()
                interrupt(batch.preempted)
                return batch

            if where == "after the decision":
                scheduler.schedule = deciding  # type: ignore[method-assign]
            else:
                scheduler._admit = admitting  # type: ignore[method-assign]
            names, outputs, interrupts = [run.add_request(prompt, long) for prompt in many], {}, 0
            while run.has_work:
                try:
                    outputs |= {output.request_id: output for output in run.step()}
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts == 1
            assert results([outputs[name] for name in names]) == want, first
            finish(run)
            assert not run._runner.batch._slots


def living_states() -> int:
    gc.collect()
    return sum(type(item) is SamplingState for item in gc.get_objects())


@pytest.mark.parametrize(("overlap", "drafts"), [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_what_requests_have_in_the_sampler_goes_with_them(overlap: bool, drafts: int, engine: Make) -> None:
    """Also that of drafts that a step settles on the host, behind which the host has nothing more to do."""
    before = living_states()
    with engine(overlap, drafts) as run:
        reserve, alive = run._runner.reserve, list[weakref.ref[SamplingState]]()

        def seen(state: SamplingState) -> None:
            alive.append(weakref.ref(state))
            reserve(state)

        run._runner.reserve = seen  # type: ignore[method-assign]
        run.generate(
            PROMPTS, [SamplingParams(temperature=0.8, seed=1, max_tokens=9, logit_bias={5: 1.0})] * len(PROMPTS)
        )
        finish(run)
        gc.collect()
        assert len(alive) == len(PROMPTS) and not any(state() for state in alive)
        more = living_states() - before
        assert more <= 0, f"{more} of rows of drafts"


def test_lost_steps_end_their_own_requests(engine: Make) -> None:
    """Two times in a row, two steps each: two faults, which are not yet too many."""
    with engine(True, max_running=2) as run:
        collect, calls = run._runner.collect, 0

        def failing(flight: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (3, 4):
                raise RuntimeError("the device is gone")
            return collect(flight)

        run._runner.collect = failing  # type: ignore[method-assign]
        outputs = run.generate(PROMPTS[:6], SamplingParams(max_tokens=20, ignore_eos=True))
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["error"] * 4 + ["length"] * 2
        finish(run)


def test_a_token_that_cannot_be_chosen_ends_its_own_request(engine: Make) -> None:
    """Logits of one request are no numbers from some place on; its neighbour's are."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with engine(True) as run:
        want = results(run.generate(PROMPTS[:1], params))
        model = run.loaded.opened.model
        forward, compute, rows = model.forward, model.compute_logits, list[torch.Tensor]()

        def watched(batch: Any) -> torch.Tensor:
            # The second request is the longer one: it has more tokens in its context.
            lengths = batch.context_lens.repeat_interleave(batch.query_starts.diff().long())
            rows[:] = [lengths > 54]
            return forward(batch)

        def poisoned(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            return torch.where(rows[0][:, None], torch.nan, logits) if len(rows[0]) == len(logits) else logits

        model.forward, model.compute_logits = watched, poisoned  # type: ignore[method-assign]
        outputs = run.generate([PROMPTS[0], PROMPTS[5]], params)
        assert outputs[1].outputs[0].finish_reason == "error"
        assert results(outputs[:1]) == want
        finish(run)


RELAXED = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 4, "think_token_ids": (256, 257)}


@pytest.mark.parametrize(
    ("changes", "overlap", "kind"),
    [
        ({}, True, UnifiedRunner),
        ({}, None, SpeculativeRunner),
        ({"method": "ngram"}, True, SpeculativeRunner),
        ({"draft_proposal": "sampled"}, True, SpeculativeRunner),
        (RELAXED, True, SpeculativeRunner),
    ],
    ids=str,
)
def test_which_runner_serves(changes: dict[str, Any], overlap: bool | None, kind: type, half_right: Path) -> None:
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
    speculative = SpeculativeConfig(num_speculative_tokens=2, **changes)
    with Engine(EngineConfig(str(half_right), overlap=overlap, speculative=speculative, **options)) as run:
        assert type(run._runner) is kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"max_running": 3}, {"preempt_every": 4}], ids=str)
@pytest.mark.parametrize("kinds", [PARAMS[:1] * 8, MIXED], ids=["greedy", "mixed"])
def test_a_gpu_gives_the_same(options: dict[str, Any], kinds: list[SamplingParams], engine: Make, wanted: Any) -> None:
    """With a trained model, whose choices are far from ties."""
    with engine(True, device="cuda", model=TRAINED, **options) as run:
        launches = spy_on_launches(run)
        assert results(run.generate(LONG_PROMPTS, kinds)) == wanted(kinds, LONG_PROMPTS, model=TRAINED)
        assert max(launches) == 1
        finish(run)
