"""Steps that are launched before the one before is collected give what plain steps give, whatever happens between."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.execution.decode_step import bucket_sizes
from hookline.execution.device_runner import DeviceRunner

PROMPTS = [[(7 * row + 3 * i) % 250 for i in range(length)] for row, length in enumerate((1, 9, 16, 30, 5, 17, 40, 3))]

# Every kind of choice, and ends that come to light late.
PARAMS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0.8, seed=5),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=18, temperature=1.3, top_p=0.9, seed=6),
    SamplingParams(max_tokens=30, temperature=0.7, top_k=5, min_p=0.05, seed=7),
    SamplingParams(max_tokens=22, stop_token_ids=tuple(range(0, 250, 9))),
    SamplingParams(max_tokens=12, temperature=1.0, top_k=40, top_p=0.8, seed=8),
    SamplingParams(max_tokens=2, ignore_eos=True),
]
EDITED = [
    SamplingParams(max_tokens=9, repetition_penalty=1.3),
    SamplingParams(max_tokens=6, logprobs=2),
    SamplingParams(max_tokens=7, prompt_logprobs=1, temperature=0.5, seed=1),
]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def engine(folder: Path, overlap: bool, **options: Any) -> Engine:
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    known = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
    return Engine(EngineConfig(str(folder), overlap=overlap, **(known | options)), **switches)


def results(outputs: list[Any]) -> list[Any]:
    """Ids, ends, and of log probabilities the ranks: the numbers depend a little on the shape of a step's batch."""
    return [
        (o.token_ids, o.finish_reason, o.stop_reason, ranks(o.logprobs), ranks(output.prompt_logprobs))
        for output in outputs
        for o in output.outputs
    ]


def ranks(entries: Any) -> Any:
    return entries and [entry and (entry.token_id, entry.rank) for entry in entries]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 11},
        {"max_running": 3},
        {"kv_cache_memory": 2**16},
        {"preempt_every": 4},
        {"preempt_every": 3, "max_chunk_tokens": 4, "prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [PARAMS, PARAMS[:5] + EDITED], ids=["plain", "edited"])
def test_equals_plain_steps(folder: Path, options: dict[str, Any], kinds: list[SamplingParams]) -> None:
    plain, overlapped = (engine(folder, overlap, **options) for overlap in (False, True))
    launches = spy_on_launches(overlapped)
    want = [results(plain.generate(PROMPTS, kinds)) for _ in range(2)]
    found = [results(overlapped.generate(PROMPTS, kinds)) for _ in range(2)]
    assert found == want
    overlapped.scheduler.check()
    assert overlapped.pool.num_referenced == 0
    assert max(launches) == 1, "steps did not overlap"


def spy_on_launches(run: Engine) -> list[int]:
    """How many steps were in flight at each launch."""
    runner, seen = run._runner, []
    assert isinstance(runner, DeviceRunner)
    launch = runner.launch

    def spy(batch: Any, states: Any) -> Any:
        seen.append(len(run._flights))
        return launch(batch, states)

    runner.launch = spy  # type: ignore[method-assign]
    return seen


def test_a_request_that_comes_and_one_that_goes(folder: Path) -> None:
    """Added and aborted between steps; who stays is not touched, and slots are given on."""
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    with engine(folder, False) as run:
        want = results(run.generate(PROMPTS[3:5], long))
    with engine(folder, True, max_running=3) as run:
        first = run.add_request(PROMPTS[3], long)
        gone = [run.add_request(PROMPTS[6], long)]
        outputs = {}
        for step in range(200):
            for output in run.step():
                outputs[output.request_id] = output
            if step == 5:
                assert run.abort(gone[0])
                second = run.add_request(PROMPTS[4], long)
            if 6 < step < 20:
                gone.append(run.add_request(PROMPTS[0], long))
                assert run.abort(gone[-1])
            if not run.has_work:
                break
        assert results([outputs[first], outputs[second]]) == want
        assert {outputs[name].outputs[0].finish_reason for name in gone} == {"abort"}
        run.scheduler.check()
        assert run.pool.num_referenced == 0


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 2}], ids=str)
@pytest.mark.parametrize("where", ["launch", "after launch", "collect"])
def test_an_interrupt_loses_nothing(folder: Path, where: str, options: dict[str, Any]) -> None:
    many, long = PROMPTS[:4], SamplingParams(max_tokens=15, temperature=0.9, seed=3, **options)
    with engine(folder, False) as run:
        want = results(run.generate(many, long))
    with engine(folder, True) as run:
        names = [run.add_request(prompt, long) for prompt in many]
        runner, calls = run._runner, 0
        verb = "collect" if where == "collect" else "launch"
        original = getattr(runner, verb)

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            result = original(*arguments) if where == "after launch" else None
            if calls in (2, 7, 8):
                raise KeyboardInterrupt
            return result or original(*arguments)

        setattr(runner, verb, interrupted)
        outputs, interrupts = {}, 0
        while run.has_work:
            try:
                for output in run.step():
                    outputs[output.request_id] = output
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 3
        assert results([outputs[name] for name in names]) == want


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["before launch", "after launch", "in launch", "after collect"])
def test_an_interrupt_between_verbs_loses_nothing(folder: Path, where: str, overlap: bool) -> None:
    many, long = PROMPTS[:4], SamplingParams(max_tokens=15, temperature=0.9, seed=3, repetition_penalty=1.2)
    with engine(folder, False) as run:
        want = results(run.generate(many, long))
    with engine(folder, overlap) as run:
        owner, name = {
            "before launch": (run._outputs, "note_scheduled"),
            "after launch": (run, "_launch"),
            "in launch": (run._flights, "append"),
            "after collect": (run._runner, "collect"),
        }[where]
        original, calls = getattr(owner, name), 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            result = original(*arguments)
            if calls in (2, 7, 8):
                raise KeyboardInterrupt
            return result

        if where == "in launch":
            run._flights = Flights(interrupted)
            original = super(Flights, run._flights).append
        else:
            setattr(owner, name, interrupted)
        names, outputs, interrupts = [run.add_request(prompt, long) for prompt in many], {}, 0
        while run.has_work:
            try:
                outputs |= {output.request_id: output for output in run.step()}
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 3
        assert results([outputs[name] for name in names]) == want
        run.scheduler.check()
        assert run.pool.num_referenced == 0


class Flights(deque[Any]):
    """Steps in flight whose `append` can be watched."""

    def __init__(self, append: Callable[..., Any]) -> None:
        super().__init__()
        self.append = append  # type: ignore[method-assign]


def test_interrupted_at_any_line_of_launch(folder: Path) -> None:
    """Once in each round, after more and more lines, in steps of all kinds."""
    many, params = PROMPTS[:3], [SamplingParams(max_tokens=9, seed=3), PARAMS[1], EDITED[0]]
    with engine(folder, False) as run:
        want = results(run.generate(many, params))
    with engine(folder, True, max_batch_tokens=12) as run:
        launch, left, interrupts = run._runner.launch, 0, 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if "hookline" not in frame.f_globals["__name__"]:
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return trace

        def traced(*arguments: Any) -> Any:
            if left <= 0:
                return launch(*arguments)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                return launch(*arguments)
            finally:
                sys.settrace(before)

        run._runner.launch = traced  # type: ignore[method-assign]
        for first in range(5, 1200, 120):
            left = first
            names, outputs = [run.add_request(*each) for each in zip(many, params, strict=True)], {}
            while run.has_work:
                try:
                    outputs |= {output.request_id: output for output in run.step()}
                except KeyboardInterrupt:
                    interrupts += 1
            assert results([outputs[name] for name in names]) == want, first
        assert interrupts == 10
        run.scheduler.check()
        assert run.pool.num_referenced == 0


def test_a_lost_step_ends_its_own_requests(folder: Path) -> None:
    with engine(folder, True, max_running=2) as run:
        runner, calls = run._runner, 0
        collect = runner.collect

        def failing(flight: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("the device is gone")
            return collect(flight)

        runner.collect = failing  # type: ignore[method-assign]
        found = run.generate(PROMPTS[:4], SamplingParams(max_tokens=8, ignore_eos=True))
        reasons = [output.outputs[0].finish_reason for output in found]
        assert reasons == ["error", "error", "length", "length"]
        assert "the device is gone" in str(found[0].error)
        run.scheduler.check()
        assert run.pool.num_referenced == 0


def test_a_lost_first_step_does_not_look_like_a_full_cache(folder: Path) -> None:
    """Nothing is in flight then and nothing to report, but the other continuation only waits for its turn."""
    with engine(folder, True, max_running=1) as run:
        launch, calls = run._runner.launch, 0

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("the device is gone")
            return launch(*arguments)

        run._runner.launch = failing  # type: ignore[method-assign]
        (found,) = run.generate(PROMPTS[1], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
        assert [one.finish_reason for one in found.outputs] == ["error", "length"]


def test_blocks_of_a_surplus_step_are_there_for_who_drives_by_hand(folder: Path) -> None:
    with engine(folder, True, kv_cache_memory=2**16, max_model_len=None) as run:
        first = run.generate(PROMPTS[3], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids
        run.generate(PROMPTS[3], SamplingParams(max_tokens=30, stop_token_ids=(first[3],)))
        assert run.pool.num_referenced > 0, "no step was launched ahead"
        whole = run.pool.num_blocks
        assert run.query("a", 10**6, whole)[1] == whole
        assert run.put(["a"], [[1] * (whole * run.pool.block_size)]).shape[0] == 1


def test_logits_that_are_no_numbers_end_their_own_request(folder: Path) -> None:
    with engine(folder, True) as run:
        want = results(run.generate(PROMPTS[:3], SamplingParams(max_tokens=9)))
        model = run.loaded.opened.model
        compute, calls = model.compute_logits, 0

        def poisoned(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits = compute(hidden)
            if calls == 4:
                logits[1] = float("nan")
            return logits

        model.compute_logits = poisoned  # type: ignore[method-assign]
        found = run.generate(PROMPTS[:3], SamplingParams(max_tokens=9))
        assert [output.outputs[0].finish_reason for output in found] == ["length", "error", "length"]
        assert results([found[0], found[2]]) == [want[0], want[2]]


def test_buckets() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert bucket_sizes(320)[-4:] == (240, 256, 288, 320)
