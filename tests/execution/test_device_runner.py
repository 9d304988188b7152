"""Steps that are launched before the one before is collected give what plain steps give, whatever happens between."""

from __future__ import annotations

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
