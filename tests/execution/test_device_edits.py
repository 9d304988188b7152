"""Penalties, biases, bans and log probabilities on the device are the plain path's, two steps in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.errors import NotEnoughMemoryError
from hookline.execution.device_edits import DeviceEdits
from hookline.execution.device_logprobs import LogprobsOnTheWay, logprob_values
from hookline.execution.device_phrases import DevicePhrases
from hookline.execution.sampler import token_logprobs
from hookline.execution.sampling_state import SamplingState
from hookline.scheduling.request import Request

PROMPTS = [[(11 * row + 5 * i) % 250 for i in range(length)] for row, length in enumerate((9, 1, 30, 17, 5, 24, 3, 12))]
FREE = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = dataclasses.replace(FREE, temperature=0.9, top_p=0.95, seed=4)

# The word stands for token sequences that `words_of` takes from what the model would say.
OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.4},
    "penalties": {"repetition_penalty": 0.7, "presence_penalty": -0.4, "frequency_penalty": 0.9},
    "bias": {"logit_bias": {7: 6.0, 8: 5.5, 200: -40.0}},
    "allowed": {"allowed_token_ids": tuple(range(3, 250, 7))},
    "words": {"bad_words": ("a",)},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 3))},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 3.0, 5: 4.0, 12: -3.0},
        "allowed_token_ids": tuple(range(0, 300, 3)),
        "bad_words": ("a",),
        "min_tokens": 4,
        "stop_token_ids": tuple(range(0, 300, 9)),
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def words_of(folder: Path) -> list[list[int]]:
    """A token that the model says, and phrases of two to four, greedily and in draws; and some that it never says."""
    phrases = [[1, 2], [3, 4, 5, 6, 7, 8]]
    with engine(folder, overlap=False) as run:
        for output in run.generate(PROMPTS, FREE) + run.generate(PROMPTS, SAMPLED):
            ids = list(output.outputs[0].token_ids)
            phrases += [ids[2:4], ids[4:7], ids[8:12], [ids[12]]]
    return phrases


def engine(folder: Path, overlap: bool = True, words: list[list[int]] | None = None, **options: Any) -> Engine:
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    known = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
    run = Engine(EngineConfig(str(folder), overlap=overlap, **(known | options)), **switches)
    if words is not None:
        run._intake._prompts.bad_word_ids = lambda texts: words if texts else []  # type: ignore[method-assign]
    return run


def with_options(base: SamplingParams, name: str) -> SamplingParams:
    return dataclasses.replace(base, **OPTIONS[name])


def most_in_flight(run: Engine) -> list[int]:
    """At each launch from now on, the steps in flight with it."""
    seen: list[int] = []
    launch = run._runner.launch

    def spy(batch: Any, states: Any) -> Any:
        seen.append(len(run._flights) + 1)
        return launch(batch, states)

    run._runner.launch = spy  # type: ignore[method-assign]
    return seen


def answers(outputs: list[Any]) -> list[Any]:
    return [(o.token_ids, o.finish_reason, o.stop_reason) for output in outputs for o in output.outputs]


def logprobs(outputs: list[Any]) -> list[Any]:
    return [(o.logprobs, output.prompt_logprobs) for output in outputs for o in output.outputs]


def flat(outputs: list[Any]) -> list[float]:
    """All log probabilities, in order."""
    entries = [entry for pair in logprobs(outputs) for part in pair for entry in part or () if entry is not None]
    return [value for entry in entries for value in (entry.logprob, entry.rank, *(p for _, p in entry.top))]


@pytest.mark.parametrize("base", [FREE, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_plain_paths(name: str, base: SamplingParams, folder: Path, words_of: Any) -> None:
    """Alone, where even the log probabilities are the same bits, and all the prompts in one batch."""
    params = with_options(base, name)
    with engine(folder, False, words_of) as plain, engine(folder, True, words_of) as run:
        flights = most_in_flight(run)
        for many in (PROMPTS[2:3], PROMPTS):
            want, found = plain.generate(many, params), run.generate(many, params)
            assert answers(found) == answers(want)
            assert logprobs(found) == logprobs(want)
        free = plain.generate(PROMPTS, base)
        assert max(flights) == 2, "steps did not overlap"
    assert sum(one != other for one, other in zip(answers(want), answers(free), strict=True)) > 2, "it changes nothing"


def mixed() -> list[SamplingParams]:
    """The last to come are the first to be preempted."""
    kinds = [FREE, with_options(SAMPLED, "bias"), SAMPLED, dataclasses.replace(FREE, logprobs=0)]
    kinds += [with_options(SAMPLED, "min_tokens"), with_options(FREE, "all"), with_options(SAMPLED, "words")]
    return [*kinds, with_options(FREE, "penalties")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 11},
        {"max_running": 3},
        {"kv_cache_memory": 2**16},
        {"preempt_every": 3},
        {"preempt_every": 4, "max_chunk_tokens": 4, "prefix_caching": False},
    ],
    ids=str,
)
def test_mixed_batches(options: dict[str, Any], folder: Path, words_of: Any) -> None:
    """With neighbours that have no options, chunks, few slots, preemption, and in the second round warm prefixes."""
    with engine(folder, False, words_of) as plain:
        want = plain.generate(PROMPTS, mixed())
    with engine(folder, True, words_of, **options) as run:
        flights = most_in_flight(run)
        preemptions = []
        release = run._runner.release
        run._runner.release = lambda request: (preemptions.append(request.preemptions), release(request))  # type: ignore
        for _ in range(2):
            found = run.generate(PROMPTS, mixed())
            assert answers(found) == answers(want)
            assert flat(found) == pytest.approx(flat(want), abs=1e-5)
        assert max(flights) == 2, "steps did not overlap"
        assert max(preemptions) > 0 or not {"preempt_every", "kv_cache_memory"} & set(options), "none was preempted"
        run.scheduler.check()
        assert not run._runner._reporting
        assert not run._runner.edits._states


def test_nearly_all_steps_overlap(folder: Path, words_of: Any) -> None:
    with engine(folder, True, words_of) as run:
        flights = most_in_flight(run)
        run.generate(PROMPTS, with_options(FREE, "all"))
        run.generate(PROMPTS[0], dataclasses.replace(with_options(FREE, "penalties"), max_tokens=30))
    assert flights.count(2) >= len(flights) - 4


def test_continuations_and_an_aborted_neighbour(folder: Path, words_of: Any) -> None:
    params = dataclasses.replace(with_options(SAMPLED, "all"), n=3)
    with engine(folder, False, words_of) as plain:
        want = plain.generate(PROMPTS[2], params)
    with engine(folder, True, words_of, max_running=5) as run:
        neighbours = [run.add_request(PROMPTS[3], with_options(FREE, name)) for name in ("words", "penalties")]
        wanted = run.add_request(PROMPTS[2], params)
        outputs = {}
        for step in range(100):
            outputs |= {output.request_id: output for output in run.step()}
            if step in (4, 7):
                assert run.abort(neighbours.pop())
                run.add_request(PROMPTS[4], with_options(FREE, "bias"))
            if not run.has_work:
                break
        assert answers([outputs[wanted]]) == answers(want)
        assert flat([outputs[wanted]]) == pytest.approx(flat(want), abs=1e-5)
        assert len(set(answers(want))) == 3


def test_nothing_stays_in_a_slot(folder: Path, words_of: Any) -> None:
    """One slot, which requests of every kind take one after the other."""
    names = ["all", "min_tokens", "penalties", "words", "bias", "repetition", "allowed", "presence"]
    params = [with_options(FREE, name) for name in names]
    with engine(folder, False, words_of) as plain, engine(folder, True, words_of, max_running=1) as run:
        assert answers(run.generate(PROMPTS, params)) == answers(plain.generate(PROMPTS, params))


def test_a_request_that_leaves_itself_no_token_fails_alone(folder: Path) -> None:
    none = dataclasses.replace(FREE, allowed_token_ids=(8,), bad_words=("a",), logprobs=1)
    few = dataclasses.replace(FREE, max_tokens=5, logprobs=1)
    with engine(folder, True, [[8]]) as run:
        want = run.generate(PROMPTS[:2], few)
        found = run.generate([*PROMPTS[:2], PROMPTS[2]], [few, few, none])
    assert [output.outputs[0].finish_reason for output in found] == ["length", "length", "error"]
    assert "left no token" in str(found[2].error)
    assert found[2].outputs[0].logprobs == ()
    assert answers(found[:2]) == answers(want)


def test_a_ban_takes_the_place_of_what_is_no_number(folder: Path) -> None:
    """Tokens whose logits are NaN or infinite can be banned, and then do no harm."""
    with engine(folder, False) as plain, engine(folder, True) as run:
        for one in (plain, run):
            model = one.loaded.opened.model
            compute = model.compute_logits

            def poisoned(hidden: torch.Tensor, compute: Any = compute) -> torch.Tensor:
                logits = compute(hidden)
                logits[:, 40], logits[:, 41] = torch.nan, torch.inf
                return logits

            model.compute_logits = poisoned  # type: ignore[method-assign]
        params = dataclasses.replace(FREE, allowed_token_ids=tuple(range(40)))
        found = run.generate(PROMPTS, params)
        assert answers(found) == answers(plain.generate(PROMPTS, params))
        assert {output.outputs[0].finish_reason for output in found} == {"length"}
        assert run.generate(PROMPTS[:1], FREE)[0].outputs[0].finish_reason == "error"


def test_no_room_for_the_tables_refuses_the_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as run:
        want = answers(run.generate(PROMPTS[:1], FREE))
        name = run.add_request(PROMPTS[0], FREE)
        run.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", no_room)
            for option in ("penalties", "bias", "words"):
                with pytest.raises(NotEnoughMemoryError, match=r"table of .* on the device"):
                    run.add_request(PROMPTS[1], dataclasses.replace(with_options(FREE, option), n=2))
        outputs = {}
        while run.has_work:
            outputs |= {output.request_id: output for output in run.step()}
        assert list(outputs) == [name]
        assert answers([outputs[name]]) == want
        assert run.generate(PROMPTS[1], with_options(FREE, "penalties"))[0].outputs[0].finish_reason == "length"


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


def request(prompt: list[int], outputs: list[int], **options: Any) -> Request:
    return Request("one", prompt, SamplingParams(**options), 1000, output_token_ids=outputs)


def test_tables_are_made_for_those_who_need_them() -> None:
    edits = DeviceEdits(3, 50, torch.device("cpu"))
    for options, tables in (({"min_tokens": 2}, 0), ({"logit_bias": {1: 1.0}}, 1), ({"presence_penalty": 1.0}, 2)):
        edits.reserve(SamplingState(SamplingParams(**options), [1], (), 50, 0))
        assert (edits._bias is not None) + (edits._counts is not None) == tables


def test_phrases_of_requests_that_come_and_go() -> None:
    """Longer phrases come later, a slot is given on, and tails follow the tokens."""
    phrases = DevicePhrases(4, torch.device("cpu"))
    first, second, third = (request([1, 2], outputs) for outputs in ([3], [], [2, 7]))
    slots = torch.tensor([2, 0])

    def banned(slots: torch.Tensor) -> list[list[int]]:
        out = torch.zeros(len(slots) + 1, 10)
        phrases.ban(out, slots)
        return [row.isinf().nonzero()[:, 0].tolist() for row in out[:-1]]

    assert banned(slots) == [[], []]
    phrases.take_in(first, 2, [((3,), 4), ((2, 3), 5), ((1, 3), 6)])
    assert banned(slots) == [[4, 5], []]
    phrases.take_in(second, 0, [((0, 1, 2), 9), ((1, 2), 8), ((2,), 8), ((3,), 8)])
    assert banned(slots) == [[4, 5], [8]]
    assert banned(slots.flip(0)) == [[8], [4, 5]]
    phrases.append(slots, torch.tensor([2, 3]))
    assert banned(slots) == [[], [8]]
    phrases.append(torch.tensor([2]), torch.tensor([3]))
    assert banned(slots) == [[4, 5], [8]]
    phrases.release(first)
    phrases.take_in(third, 2, [((2, 2, 7), 1), ((2, 7), 0), ((1, 2, 2, 7), 3), ((0, 1, 2, 2, 7), 4)])
    assert banned(slots) == [[0, 1, 3], [8]]
    phrases.release(third)
    assert banned(slots) == [[], [8]]


@pytest.mark.parametrize("level", [False, True], ids=["distinct", "level"])
def test_log_probabilities_are_the_samplers(level: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whatever is level, negative zeros among it, and in whatever parts the rows are taken."""
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(3)) * 3
    if level:
        logits = logits.round() * 0.5
        logits[:, ::5] = -0.0
        logits[3], logits[4, 5:] = 0.0, -torch.inf
    tokens = [(31 * row) % 700 for row in range(9)]
    want = token_logprobs(logits, tokens, 20)
    for places in (700, 3 * 700, 2**22):
        monkeypatch.setattr("hookline.execution.device_logprobs._PLACES", places)
        values = logprob_values(logits, None, torch.tensor(tokens), 20)
        assert LogprobsOnTheWay(tokens, [20] * 9, values).entries() == want
    some = torch.tensor([7, 2])
    values = logprob_values(logits, some, torch.tensor(tokens)[some], 20)
    found = LogprobsOnTheWay(None, [20, 3], values).entries([tokens[7], tokens[2]])
    assert found == [want[7], dataclasses.replace(want[2], top=want[2].top[:3])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_nothing_waits_for_the_gpu(graphs: bool, folder: Path, words_of: Any) -> None:
    """Tokens are the CPU's, and no launch makes the host wait."""
    with engine(folder, False, words_of) as plain:
        want = plain.generate(PROMPTS, mixed())
    with engine(folder, True, words_of, device="cuda", block_size=16, cuda_graphs=graphs) as run:
        run.generate(PROMPTS, mixed())  # compiles, and makes the tables
        launch = run._runner.launch

        def watched(batch: Any, states: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(batch, states)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        run._runner.launch = watched  # type: ignore[method-assign]
        found = run.generate(PROMPTS, mixed())
    assert answers(found) == answers(want)
    assert flat(found) == pytest.approx(flat(want), abs=1e-3)
