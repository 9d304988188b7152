"""Masks of tokens: what is allowed is chosen and nothing else, on every runner, and only for who is limited."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline.execution.device_runner import DeviceRunner
from hookline.execution.runner import Runner
from hookline.execution.speculative_runner import SpeculativeRunner
from hookline.execution.token_masks import DelayedMatcher, TokenMatcher, make_masks
from hookline.execution.unified_runner import UnifiedRunner
from hookline.grammar import GrammarSpec
from hookline.structured_output import CompiledGrammar
from tests.execution.test_device_runner import results, spy_on_launches

TRAINED = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp"
PROMPTS = ["Once upon a time", "Tell me a short story.", "x", "The river ran past the old mill and"]
END_OF_TEXT = 258
OBJECT = GrammarSpec("ebnf", r'''root ::= "{\"name\": \"" [a-z ]{3,8} "\", \"ok\": " ("true" | "false") "}"''')

Allowed = Callable[[Sequence[int]], Collection[int] | None]


class RuleMatcher:
    """Allows what a rule says of the output so far; None for all tokens."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self.output: list[int] = []

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        for place in range(len(drafts) + 1):
            tokens = self.allowed([*self.output, *drafts[:place]])
            if tokens is None:
                mask[place] = -1
            else:
                flags = torch.zeros(mask.shape[1] * 32, dtype=torch.int64)
                flags[list(tokens)] = 1
                mask[place] = (flags.view(-1, 32) << torch.arange(32)).sum(dim=-1).int()

    def accept(self, token_id: int) -> None:
        self.output.append(token_id)

    def restart(self) -> None:
        self.output.clear()

    @property
    def is_finished(self) -> bool:
        return False


class Rule(CompiledGrammar):
    """A grammar that is a rule, as `RuleMatcher` takes it."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self.made: list[RuleMatcher] = []

    def matcher(self, stop_token_ids: Collection[int] = (), *, ignore_eos: bool = False) -> Any:
        self.made.append(RuleMatcher(self.allowed))
        return self.made[-1]


KINDS: dict[str, tuple[bool, SpeculativeConfig | None, type[Runner]]] = {
    "plain": (False, None, Runner),
    "device": (True, None, DeviceRunner),
    "drafts": (False, SpeculativeConfig(num_speculative_tokens=3), SpeculativeRunner),
    "unified": (True, SpeculativeConfig(num_speculative_tokens=3), UnifiedRunner),
    "ngram": (False, SpeculativeConfig(method="ngram", num_speculative_tokens=3), SpeculativeRunner),
}


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def engine(half_right: Path) -> Make:
    """Makes engines of a kind with a small model, or with `model`."""

    def make(kind: str, model: Path = half_right, **options: Any) -> Engine:
        overlap, speculative, runner = KINDS[kind]
        switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
        known = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
        config = EngineConfig(str(model), overlap=overlap, speculative=speculative, **(known | options))
        made = Engine(config, **switches)
        assert type(made._runner) is runner
        return made

    return make


@pytest.fixture(scope="module")
def running(engine: Make) -> Iterator[Callable[[str], Engine]]:
    """An engine of each kind, which many tests use."""
    made: dict[str, Engine] = {}

    def find(kind: str) -> Engine:
        if kind not in made:
            made[kind] = engine(kind)
        return made[kind]

    yield find
    for run in made.values():
        finish(run)


def finish(run: Engine) -> None:
    """Nothing is left behind."""
    run.settle()
    run.scheduler.check()
    assert run.pool.num_referenced == 0
    assert not run._limited and not getattr(run._runner, "_limited", None)


def told(outputs: list[Any]) -> list[Any]:
    """Tokens and ends. How likely a token is that hardly ever would be chosen differs in its last bits."""
    return [(one.token_ids, one.text, one.finish_reason) for output in outputs for one in output.outputs]


def make_params(**options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=40, **options),
        SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=3, n=2, **options),
        SamplingParams(max_tokens=40, temperature=0.8, seed=4, repetition_penalty=1.2, bad_words=("g",), **options),
        SamplingParams(max_tokens=40, temperature=1.2, top_k=30, seed=5, logprobs=2, **options),
    ]


@pytest.fixture(scope="module")
def wanted(engine: Make) -> list[Any]:
    """Results of plain steps."""
    return in_plain_steps(engine("plain"))


def in_plain_steps(made: Engine) -> list[Any]:
    with made as run:
        found = run.generate(PROMPTS, make_params(), grammar=OBJECT)
        finish(run)
    ended = [one.text for output in found for one in output.outputs if one.finish_reason == "stop"]
    assert len(ended) == 5
    for text in ended:
        value = json.loads(text)
        assert isinstance(value["ok"], bool) and 3 <= len(value["name"]) <= 8
    return told(found)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {"preempt_every": 3, "max_chunk_tokens": 5}),
        ("device", {}),
        ("device", {"preempt_every": 3, "max_chunk_tokens": 5, "prefix_caching": False}),
        ("device", {"max_running": 2}),
        ("drafts", {}),
        ("drafts", {"kv_cache_memory": 185_000}),
        ("unified", {}),
        ("unified", {"preempt_every": 4, "max_batch_tokens": 11}),
        ("ngram", {}),
    ],
    ids=str,
)
def test_a_grammar_gives_what_it_gives_in_plain_steps(
    kind: str, options: dict[str, Any], engine: Make, wanted: list[Any]
) -> None:
    """Greedy and sampled, with penalties and banned words, several continuations, and log probabilities."""
    with engine(kind, **options) as run:
        found = run.generate(PROMPTS, make_params(), grammar=OBJECT)
        finish(run)
    assert told(found) == wanted
    if kind in ("drafts", "unified"):
        steps = [step for output in found for one in output.outputs for step in one.speculative or ()]
        assert any(step.num_accepted for step in steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_on_a_gpu_a_grammar_gives_what_it_gives_on_a_cpu(kind: str, cuda_graphs: bool, engine: Make) -> None:
    """With a trained model, whose choices are far from ties."""
    wanted = in_plain_steps(engine("plain", TRAINED))
    with engine(kind, TRAINED, device="cuda", cuda_graphs=cuda_graphs) as run:
        alone = told(run.generate(PROMPTS, make_params(), grammar=OBJECT))
        free = [SamplingParams(max_tokens=30, ignore_eos=True)] * 4
        ids = [run.add_request(prompt, one) for prompt, one in zip(PROMPTS, free, strict=True)]
        beside = told(run.generate(PROMPTS, make_params(), grammar=OBJECT))
        done = {output.request_id: output for output in run.step()} if run.has_work else {}
        while run.has_work:
            done |= {output.request_id: output for output in run.step()}
        finish(run)
        assert told(run.generate(PROMPTS, free)) == told([done[request_id] for request_id in ids])
    assert alone == beside == wanted


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_a_limited_request_runs_as_whole_steps_on_the_device(device: str, engine: Make) -> None:
    """Beside others and between them: nothing but edits of logits makes the host verify."""
    params, free = make_params()[:2], SamplingParams(max_tokens=20, ignore_eos=True)
    with engine("plain") as run:
        wanted = told(run.generate(PROMPTS[:2], params, grammar=OBJECT)), results(run.generate(PROMPTS[2:], free))
    with engine("unified", device=device) as run:
        runner, launched = run._runner, list[object]()
        assert isinstance(runner, UnifiedRunner)
        runner._host.launch = lambda *given: launched.append(given)  # type: ignore[method-assign,assignment,func-returns-value]
        before = results(run.generate(PROMPTS[2:], free))
        ids = [run.add_request(prompt, free) for prompt in PROMPTS[2:]]
        found = told(run.generate(PROMPTS[:2], params, grammar=OBJECT))
        done: dict[str, Any] = {}
        while run.has_work:
            done.update((output.request_id, output) for output in run.step())
        after = results(run.generate(PROMPTS[2:], free))
        finish(run)
    assert (found, before) == wanted
    assert before == after == results([done[name] for name in ids])
    assert not launched


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_allowed_is_chosen(kind: str, running: Callable[[str], Engine]) -> None:
    """Even tokens after an even number of tokens, others after an odd one: each row has a mask of its own."""
    run = running(kind)
    sets = [set(range(rest, run.vocab_size, 2)) for rest in (0, 1)]
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=1.0, seed=1),
    ]
    outputs = run.generate(PROMPTS[:2], params, grammar=Rule(lambda output: sets[len(output) % 2]))
    finish(run)
    for output in outputs:
        assert all(token % 2 == place % 2 for place, token in enumerate(output.outputs[0].token_ids))
        assert len(output.outputs[0].token_ids) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_as_they_are_alone(kind: str, running: Callable[[str], Engine]) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    run = running(kind)
    alone = results(run.generate(PROMPTS[1:3], params))
    run.add_request(PROMPTS[0], params, grammar=Rule(lambda output: range(0, run.vocab_size, 2)))
    for prompt in PROMPTS[1:3]:
        run.add_request(prompt, params)
    done: dict[str, Any] = {}
    while run.has_work:
        done.update((output.request_id, output) for output in run.step())
    finish(run)
    limited, *others = (done[name] for name in sorted(done, key=lambda name: int(name.split("-")[1])))
    assert results(others) == alone
    assert all(token % 2 == 0 for token in limited.outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["device", "unified"])
def test_steps_overlap_but_while_someone_is_limited(kind: str, running: Callable[[str], Engine]) -> None:
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    run = running(kind)
    launches = spy_on_launches(run)
    run.generate(PROMPTS[:2], params, grammar=Rule(lambda output: None))
    assert launches and max(launches) == 0
    del launches[:]
    run.generate(PROMPTS[:2], params)
    assert max(launches) == 1
    # One that comes while steps of others are in flight, whose tokens the host does not know yet.
    first = run.add_request(PROMPTS[0], params, stream=True)
    for _ in range(4):
        run.step()
    assert run._flights
    run.add_request(PROMPTS[1], params, grammar=Rule(lambda output: range(1, run.vocab_size, 2)))
    done: dict[str, Any] = {}
    while run.has_work:
        done.update((output.request_id, output) for output in run.step() if output.finished)
    finish(run)
    alone = run.generate(PROMPTS[:1], params)
    assert results([done.pop(first)]) == results(alone)
    [limited] = done.values()
    assert all(token % 2 == 1 for token in limited.outputs[0].token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_token_left_ends_alone(kind: str, running: Callable[[str], Engine]) -> None:
    """A matcher that allows nothing, and one that breaks, from some place on."""

    def breaks(output: Sequence[int]) -> None:
        if len(output) >= 3:
            raise RuntimeError("the matcher is broken")

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    run = running(kind)
    want = results(run.generate(PROMPTS[2:3], params))
    ids = [
        run.add_request(PROMPTS[0], params, grammar=Rule(lambda output: None if len(output) < 5 else ())),
        run.add_request(PROMPTS[1], params, grammar=Rule(breaks)),
        run.add_request(PROMPTS[2], params),
    ]
    done: dict[str, Any] = {}
    while run.has_work:
        done.update((output.request_id, output) for output in run.step())
    finish(run)
    first, second, third = (done[name] for name in ids)
    assert [one.outputs[0].finish_reason for one in (first, second)] == ["error", "error"]
    assert len(first.outputs[0].token_ids) <= 5 and len(second.outputs[0].token_ids) <= 3
    assert results([third]) == want


def test_log_probabilities_are_of_the_logits_as_they_are(running: Callable[[str], Engine]) -> None:
    """The reported rank of a token that the mask forced counts those that were forbidden."""
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
    found = []
    for kind in ("plain", "device", "drafts", "unified"):
        run = running(kind)
        [output] = run.generate(PROMPTS[:1], params, grammar=Rule(lambda output: [300 + len(output)]))
        entries = output.outputs[0].logprobs
        assert output.outputs[0].token_ids == (300, 301, 302) and entries is not None
        assert all(entry.rank > 1 and entry.top[0][0] != entry.token_id for entry in entries)
        found.append([(entry.rank, round(entry.logprob, 3), entry.top[0][0]) for entry in entries])
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_holds_behind_its_token(kind: str, running: Callable[[str], Engine]) -> None:
    """Free before, held after; the token itself may come anywhere, also within drafts."""
    params = [
        SamplingParams(max_tokens=14, temperature=1.5, seed=seed, logit_bias={END_OF_TEXT: -100}) for seed in range(2)
    ]
    run = running("plain")
    free = run.generate(PROMPTS[:2], params)
    run = running(kind)
    after = free[0].outputs[0].token_ids[4]
    digits = run.compile_grammar(GrammarSpec("regex", "[0-9]{3}"))
    ids = [
        run.add_request(p, one, grammar=digits, grammar_after=after) for p, one in zip(PROMPTS[:2], params, strict=True)
    ]
    done: dict[str, Any] = {}
    while run.has_work:
        done.update((output.request_id, output) for output in run.step())
    finish(run)
    for name, before in zip(ids, free, strict=True):
        tokens, plain = list(done[name].outputs[0].token_ids), list(before.outputs[0].token_ids)
        if after not in plain:
            assert tokens == plain
        else:
            start = plain.index(after) + 1
            assert tokens[:start] == plain[:start]
            text = run.tokenizer.decode(tokens[start:]) if run.tokenizer else ""
            assert text.isdigit() and len(text) == 3 and done[name].outputs[0].finish_reason == "stop"
    assert after in free[0].outputs[0].token_ids


def test_a_delayed_matcher_and_its_drafts() -> None:
    inner = RuleMatcher(lambda output: [len(output)])
    matcher: TokenMatcher = DelayedMatcher(inner, 9)
    masks = torch.zeros((4, 1), dtype=torch.int32)
    matcher.fill(masks, [9, 5, 6])
    assert masks[:, 0].tolist() == [-1, 1, 2, 4]
    matcher.fill(masks, [4, 9, 6])
    assert masks[:, 0].tolist() == [-1, -1, 1, 2]
    matcher.fill(masks, [4, 5, 9])
    assert masks[:, 0].tolist() == [-1, -1, -1, 1]
    matcher.fill(masks, [4, 5, 6])
    assert masks[:, 0].tolist() == [-1] * 4
    for token in (4, 9, 7):
        matcher.accept(token)
    assert inner.output == [7]
    matcher.fill(masks[:1], [])
    assert masks[0] == 2
    matcher.restart()
    matcher.fill(masks[:1], [])
    assert masks[0] == -1 and inner.output == []


def test_masks_come_in_one_piece() -> None:
    limited = [(1, RuleMatcher(lambda output: [len(output), 33]), (5,)), (4, RuleMatcher(lambda output: None), ())]
    masks = make_masks(limited, 40, torch.device("cpu"))
    assert masks is not None and masks.rows.tolist() == [1, 2, 4]
    assert masks.bits.tolist() == [[1, 2], [2, 2], [-1, -1]]
    logits = torch.zeros(5, 40)
    found = masks.apply(logits)
    assert not logits.any()
    assert [(row > -torch.inf).nonzero().flatten().tolist() for row in found[1:3]] == [[0, 33], [1, 33]]
    assert not found[[0, 3, 4]].any()
    assert make_masks([], 40, torch.device("cpu")) is None


def test_relaxed_acceptance_keeps_to_the_mask(half_right: Path) -> None:
    """Every draft would be accepted while a sampled request thinks; a forbidden one is not."""
    changes = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 320, "relaxed_delta": 1.0}
    config = SpeculativeConfig(num_speculative_tokens=3, think_token_ids=(256, 257), **changes)
    options = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96, "kv_cache_memory": 2**22}
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=2)
    with Engine(EngineConfig(str(half_right), overlap=False, speculative=config, **options)) as run:
        prompt = [256, *run.encode(PROMPTS[0])]
        loose = run.generate([prompt], params)
        [held] = run.generate([prompt], params, grammar=Rule(lambda output: range(0, run.vocab_size, 2)))
    steps = loose[0].outputs[0].speculative or ()
    assert sum(step.num_accepted for step in steps) > 12
    assert all(token % 2 == 0 for token in held.outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["plain", "unified"])
def test_aborted_requests_leave_nothing(kind: str, running: Callable[[str], Engine]) -> None:
    run = running(kind)
    ids = [run.add_request(prompt, one, grammar=OBJECT) for prompt, one in zip(PROMPTS, make_params(), strict=True)]
    for _ in range(3):
        run.step()
    assert len(run._limited) == 5
    for name in ids:
        run.abort(name)
    while run.has_work:
        run.step()
    finish(run)
