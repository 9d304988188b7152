"""Whole runs with drafts give what runs without them give, whatever the drafts are.

The proposers here know what the model will write. They propose that, or something wrong from some place on, look at
what they are told, and leave NaN in the cache wherever the next step has to write before it reads.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline.errors import UsageError
from hookline.execution.starting import settle_speculation
from hookline.model import DraftBatch, Proposer, TransformerModel
from hookline.scheduling.output import RequestOutput
from tests.execution.test_token_masks import Rule

BLOCK, VOCABULARY, TOKENS = 8, 320, 24
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, top_p=0.95, top_k=50, seed=11)
EDITED = SamplingParams(
    max_tokens=TOKENS, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=6, bad_words=("ab",)
)
NO_DRAFT = 319  # what a wrong proposal is


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(256) for _ in range(length)] for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 40, 21)]


class Oracle(Proposer):
    """Proposes each request's known continuation.

    Args:
        answers: prompt to output, as a run without drafts gave them.
        right: how many drafts of a step are right, by the number of the step.
    """

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], right: Callable[[int], int]) -> None:
        self.answers = answers
        self.right = right
        self.steps = 0
        self.engine: Engine | None = None
        self.accepted: Counter[int] = Counter()
        self.checks = True

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        assert self.engine is not None
        forward, count, drafts = batch.forward, batch.num_drafts, []
        starts = forward.query_starts.tolist()
        assert batch.hidden.shape == (starts[-1], self.engine.loaded.opened.model.shapes.hidden_size)
        right = self.right(self.steps)
        self.steps += 1
        for row, part in enumerate(self.engine.scheduler.in_flight[-1].requests):
            last = int(batch.last_rows[row])
            kept = part.count - (starts[row + 1] - 1 - last)  # tokens of the part that are the request's own
            if part.drafts:
                self.accepted[kept - 1] += 1
            answer = self.answers[tuple(part.request.prompt_token_ids)]
            text = [*part.request.prompt_token_ids, *answer, *[0] * (count + 2)]
            if self.checks:
                known = len(part.request.prompt_token_ids) + len(answer)
                follows = batch.next_token_ids[starts[row] : last + 1].tolist()[: max(0, known - part.start - 1)]
                assert follows == text[part.start + 1 :][: len(follows)], "not the tokens that come next"
                assert forward.positions[last] == part.start + kept - 1
            self._poison(batch, row, part.start + kept, starts[row + 1] - 1 - last + count)
            next_drafts = text[part.start + kept + 1 :][:count]
            drafts.append(next_drafts[:right] + [NO_DRAFT] * (count - right))
        return torch.tensor(drafts).view(len(drafts), count)

    def _poison(self, batch: DraftBatch, row: int, first: int, count: int) -> None:
        forward = batch.forward
        for position in range(first, first + count):
            assert position // BLOCK < forward.block_tables.shape[1], "no place to look ahead"
            block = int(forward.block_tables[row, position // BLOCK])
            for layers in forward.cache.values():
                for layer in layers:
                    for entry in layer.values():
                        entry[block, position % BLOCK] = torch.nan


def options(blocks: int = 64) -> dict[str, Any]:
    memory = blocks * BLOCK * 2 * 2 * 16 * 4 * 2  # entries, heads, width, bytes, layers
    probe = {"block_size": BLOCK, "dtype": "float32", "device": "cpu", "max_model_len": 96}
    return {**probe, "kv_cache_memory": memory}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(str(tiny_llama), prefix_caching=False, **options())) as made:
        yield made


def longer(params: SamplingParams | list[SamplingParams]) -> SamplingParams | list[SamplingParams]:
    """What says how the output would go on: drafts may stand behind its end."""
    if isinstance(params, list):
        return [dataclasses.replace(one, max_tokens=(one.max_tokens or TOKENS) + 8) for one in params]
    return params if params.max_tokens is None else dataclasses.replace(params, max_tokens=params.max_tokens + 8)


@pytest.fixture
def drafting(plain: Engine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs prompts with an oracle: the outputs without drafts, those with them, the oracle and its engine."""
    made: list[Engine] = []

    def run(
        params: SamplingParams | list[SamplingParams],
        right: int | Callable[[int], int],
        count: int = 3,
        many: list[list[int]] | None = None,
        blocks: int = 64,
        changes: dict[str, Any] | None = None,
        endless: SamplingParams | None = None,
        **switches: Any,
    ) -> tuple[list[RequestOutput], list[RequestOutput], Oracle, Engine]:
        many = prompts() if many is None else many
        wanted = plain.generate(many, params)
        known = plain.generate(many, longer(params) if endless is None else endless)
        answers = {tuple(ids): output.outputs[0].token_ids for ids, output in zip(many, known, strict=True)}
        oracle = Oracle(answers, right if callable(right) else lambda step: right)
        monkeypatch.setattr(TransformerModel, "proposer", oracle)
        speculative = SpeculativeConfig(num_speculative_tokens=count, **changes or {})
        more = {name: switches.pop(name) for name in ("prefix_caching",) if name in switches}
        engine = Engine(EngineConfig(str(tiny_llama), speculative=speculative, **options(blocks), **more), **switches)
        made.append(engine)
        oracle.engine = engine
        oracle.checks = not changes
        return wanted, engine.generate(many, params), oracle, engine

    yield run
    for engine in made:
        engine.pool.check()
        assert engine.pool.num_referenced == 0


def told(outputs: list[RequestOutput], *, logprobs: bool = False) -> list[Any]:
    """What a user is told, without times, steps and cached tokens; log probabilities but for rounding."""
    rows = []
    for output in outputs:
        for one in output.outputs:
            entries = one.logprobs or ()
            found = [(e.token_id, round(e.logprob, 3), e.rank, [t for t, _ in e.top]) for e in entries]
            rows.append(
                (
                    one.token_ids,
                    one.text,
                    one.finish_reason,
                    one.stop_reason,
                    output.usage.completion_tokens,
                    found if logprobs else 0,
                )
            )
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_for_every_number_accepted(count: int, drafting: Callable[..., Any]) -> None:
    for right in range(count + 1):
        wanted, found, oracle, _ = drafting(GREEDY, right, count)
        assert told(found) == told(wanted)
        steps = [step for output in found for step in output.outputs[0].speculative or ()]
        assert all(step.num_accepted == min(right, step.num_drafts) for step in steps)
        assert oracle.accepted[right] > 10, "forced acceptance did not happen"
        assert sum(step.num_accepted + 1 for step in steps) >= sum(len(o.outputs[0].token_ids) for o in found)


@pytest.mark.parametrize(
    "switches",
    [
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 5},
        {"preempt_every": 2},
        {"preempt_every": 3, "max_chunk_tokens": 4},
        {"blocks": 13},
        {"blocks": 13, "prefix_caching": False},
    ],
)
def test_nothing_else_that_the_engine_does_matters(switches: dict[str, Any], drafting: Callable[..., Any]) -> None:
    for params in (GREEDY, SAMPLED):
        wanted, found, _, engine = drafting(params, lambda step: step % 5, 4, **switches)
        tokens = [output.outputs[0].token_ids for output in found]
        assert tokens == [output.outputs[0].token_ids for output in wanted]
        again = engine.generate(prompts(), params)  # with prefixes that were cached while drafting
        assert [output.outputs[0].token_ids for output in again] == tokens


@pytest.mark.parametrize("params", [SAMPLED, EDITED, dataclasses.replace(EDITED, temperature=0.7, seed=5)])
def test_sampled_and_edited_runs_give_the_very_tokens_of_plain_ones(
    params: SamplingParams, drafting: Callable[..., Any]
) -> None:
    params = dataclasses.replace(params, logprobs=2, prompt_logprobs=1)
    wanted, found, oracle, _ = drafting(params, lambda step: step % 4)
    assert told(found, logprobs=True) == told(wanted, logprobs=True)
    assert oracle.accepted[3] and oracle.accepted[0]
    for one, other in zip(found, wanted, strict=True):
        assert [e and e.token_id for e in one.prompt_logprobs or ()] == [
            e and e.token_id for e in other.prompt_logprobs or ()
        ]


def test_neighbours_do_not_matter(drafting: Callable[..., Any]) -> None:
    each = [GREEDY, SAMPLED, EDITED, dataclasses.replace(SAMPLED, seed=12), SAMPLED, GREEDY]
    wanted, found, _, engine = drafting(each, 2)
    assert told(found) == told(wanted)
    alone = [engine.generate([ids], params)[0] for ids, params in zip(prompts(), each, strict=True)]
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.parametrize("place", [0, 1, 2, 3, 6, 7])
def test_an_end_inside_the_accepted_run_drops_what_follows(
    place: int, plain: Engine, drafting: Callable[..., Any]
) -> None:
    [ids] = prompts()[4:5]
    [free] = plain.generate([ids], GREEDY)[0].outputs
    stop = free.token_ids[place]
    assert stop not in free.token_ids[:place]
    cases = [
        dataclasses.replace(GREEDY, stop_token_ids=(stop,)),
        dataclasses.replace(GREEDY, stop_token_ids=(stop,), min_tokens=place),
        dataclasses.replace(GREEDY, max_tokens=place + 1),
        dataclasses.replace(GREEDY, stop=(free.text[place : place + 2],), logprobs=0),
    ]
    for params in cases:
        wanted, found, _, _ = drafting(params, 3, many=[ids], endless=GREEDY)
        assert told(found) == told(wanted)
        assert len(found[0].outputs[0].logprobs or ()) == len(wanted[0].outputs[0].logprobs or ())


def test_the_context_is_used_to_its_end(drafting: Callable[..., Any]) -> None:
    wanted, found, _, engine = drafting(SamplingParams(ignore_eos=True), 3, many=[prompts()[4]], blocks=13)
    assert engine.max_model_len == 96
    assert told(found) == told(wanted)
    assert found[0].usage.prompt_tokens + found[0].usage.completion_tokens == 96


def test_the_look_ahead_is_taken_off_a_context_that_the_cache_bounds(drafting: Callable[..., Any]) -> None:
    engine = drafting(GREEDY, 3, many=[prompts()[0]], blocks=12)[3]
    assert engine.max_model_len == 12 * BLOCK - 3


def test_abort_in_the_middle(drafting: Callable[..., Any]) -> None:
    _, _, _, engine = drafting(GREEDY, 3, many=[prompts()[4]])
    request_id = engine.add_request([*prompts()[4]], GREEDY, stream=True)
    engine.step()
    engine.step()
    assert engine.abort(request_id)
    outputs = engine.step() if engine.has_work else []
    assert not engine.scheduler.has_work and all(output.finished for output in outputs)


def test_a_mask_forbids_before_acceptance(plain: Engine, drafting: Callable[..., Any]) -> None:
    allowed = sorted(random.Random(0).sample(range(VOCABULARY), 40))
    limited = dataclasses.replace(SAMPLED, allowed_token_ids=tuple(allowed))
    want, known = plain.generate(prompts(), limited), plain.generate(prompts(), longer(limited))
    _, _, oracle, engine = drafting(SAMPLED, 3)
    oracle.answers = {tuple(ids): one.outputs[0].token_ids for ids, one in zip(prompts(), known, strict=True)}
    for right in (0, 3):
        oracle.right = lambda step, right=right: right  # type: ignore[misc]
        found = engine.generate(prompts(), SAMPLED, grammar=Rule(lambda output: allowed))
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]


def test_logits_that_are_no_numbers_end_a_request(drafting: Callable[..., Any]) -> None:
    _, _, _, engine = drafting(GREEDY, 3, many=[prompts()[4]])
    model = engine.loaded.opened.model
    compute = model.compute_logits
    model.compute_logits = lambda hidden: compute(hidden) * torch.nan  # type: ignore[method-assign]
    [output] = engine.generate([prompts()[4]], GREEDY)
    assert output.outputs[0].finish_reason == "error" and output.error


@pytest.mark.parametrize("ends", [True, False])
def test_no_token_after_accepted_drafts(ends: bool, drafting: Callable[..., Any]) -> None:
    """As where a grammar is at its end: the drafts count, and only a request that goes on behind them fails."""
    last = 10
    [want], _, oracle, engine = drafting(GREEDY, 3, many=[prompts()[4]])
    tokens = list(want.outputs[0].token_ids)
    stop = tokens.index(tokens[last])
    oracle.checks = False
    params = dataclasses.replace(GREEDY, stop_token_ids=(tokens[last],)) if ends else GREEDY
    [output] = engine.generate([prompts()[4]], params, grammar=Rule(lambda output: None if len(output) <= stop else ()))
    assert list(output.outputs[0].token_ids) == tokens[: stop + 1]
    assert output.outputs[0].finish_reason == ("stop" if ends else "error")


BEGIN, END = 300, 301


@pytest.mark.parametrize(
    ("prompt", "params", "relaxed"),
    [
        ([BEGIN, 5], SAMPLED, True),
        ([BEGIN, END, 5], SAMPLED, False),
        ([END, BEGIN], SAMPLED, True),
        ([5, 6], SAMPLED, False),
        ([BEGIN, 5], GREEDY, False),
    ],
)
def test_relaxed_acceptance_while_a_sampled_request_thinks(
    prompt: list[int], params: SamplingParams, relaxed: bool, drafting: Callable[..., Any]
) -> None:
    """With all tokens among the likeliest, every draft is accepted, right or wrong: the wrong ones are the output."""
    changes = {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": VOCABULARY,
        "relaxed_delta": 1.0,
        "think_token_ids": (BEGIN, END),
    }
    params = dataclasses.replace(params, logprobs=0, logit_bias={BEGIN: -100.0, END: -100.0, NO_DRAFT: -100.0})
    wanted, found, _, _ = drafting(params, 0, many=[prompt], changes=changes)
    steps = found[0].outputs[0].speculative or ()
    verified = [step for step in steps if step.num_drafts]
    assert all(step.num_accepted == (step.num_drafts if relaxed else 0) for step in verified) and verified
    one = found[0].outputs[0]
    assert (NO_DRAFT in one.token_ids) is relaxed
    assert [entry.token_id for entry in one.logprobs or ()] == list(one.token_ids)
    if not relaxed:
        assert told(found) == told(wanted)


def test_thinking_ends_with_its_token(drafting: Callable[..., Any]) -> None:
    changes = {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": VOCABULARY,
        "relaxed_delta": 1.0,
        "think_token_ids": (BEGIN, NO_DRAFT),  # the wrong draft itself ends the thought
    }
    params = dataclasses.replace(SAMPLED, logit_bias={BEGIN: -100.0, NO_DRAFT: -100.0})
    _, found, _, _ = drafting(params, 0, many=[[BEGIN, 5]], changes=changes)
    counts = [step.num_accepted for step in found[0].outputs[0].speculative or ()]
    assert counts[:2] == [0, 3] and not any(counts[2:]), "the phase is that of the step's begin"


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_synthetic_acceptance(rate: float, drafting: Callable[..., Any]) -> None:
    many = [[number + 1, 2, 3] for number in range(20)]
    _, found, _, _ = drafting(GREEDY, 0, many=many, changes={"synthetic_acceptance_rate": rate})
    steps = [step for output in found for step in output.outputs[0].speculative or () if step.num_drafts == 3]
    share = sum(step.num_accepted for step in steps) / (3 * len(steps))
    assert abs(share - rate) < (0.08 if 0 < rate < 1 else 1e-9)


class Drawing(Proposer):
    """Draws from logits of its own, by the last token."""

    def __init__(self) -> None:
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2))
        self.asks = True

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        tokens, drafts = batch.next_token_ids[batch.last_rows], []
        for step in range(batch.num_drafts):
            logits = self.logits[tokens]
            tokens = batch.choose(logits, step) if self.asks else logits.argmax(dim=-1)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)


@pytest.fixture
def sampled(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Drawing]]:
    proposer = Drawing()
    monkeypatch.setattr(TransformerModel, "proposer", proposer)
    speculative = SpeculativeConfig(num_speculative_tokens=2, draft_proposal="sampled")
    with Engine(EngineConfig(str(tiny_llama), speculative=speculative, **options())) as engine:
        yield engine, proposer


def test_sampled_proposals_have_the_plain_runs_distribution(plain: Engine, sampled: tuple[Engine, Drawing]) -> None:
    """Triples of three tokens each, counted over many seeds, with and without drafts."""
    engine, proposer = sampled
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.5, allowed_token_ids=(5, 6, 7), n=64)
    proposer.logits[:, 5:8] += 8.0
    counts = []
    for one in (plain, engine):
        found: Counter[Any] = Counter()
        for seed in range(10):
            [output] = one.generate([[1, 2, 3]], dataclasses.replace(params, seed=seed + (1000 if one is plain else 0)))
            found.update(o.token_ids[:3] for o in output.outputs)
            if one is engine:
                steps = [s for o in output.outputs for s in o.speculative or () if s.num_drafts]
                assert 0.2 < sum(s.num_accepted > 0 for s in steps) / len(steps) < 0.98
        counts.append(found)
    keys = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 10]
    statistic = sum((counts[0][key] - counts[1][key]) ** 2 / (counts[0][key] + counts[1][key]) for key in keys)
    assert len(keys) > 8
    assert statistic < len(keys) + 4.5 * (2 * len(keys)) ** 0.5


def test_sampled_proposals_leave_greedy_requests_alone(plain: Engine, sampled: tuple[Engine, Drawing]) -> None:
    engine, _ = sampled
    assert told(engine.generate(prompts(), GREEDY)) == told(plain.generate(prompts(), GREEDY))


def test_a_proposer_that_does_not_ask_cannot_be_sampled(sampled: tuple[Engine, Drawing]) -> None:
    engine, proposer = sampled
    proposer.asks = False
    [output] = engine.generate([[1, 2, 3]], SAMPLED)
    assert output.outputs[0].finish_reason == "error"
    assert "DraftBatch.choose" in (output.error or "")


def test_mtp_needs_a_draft(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="ngram"):
        Engine(EngineConfig(str(tiny_llama), speculative=SpeculativeConfig(), **options()))


def test_relaxed_acceptance_needs_the_tokens_of_thinking(tiny_llama: Path) -> None:
    speculative = SpeculativeConfig(method="ngram", use_relaxed_acceptance_for_thinking=True)
    with pytest.raises(UsageError, match="<think>"):
        Engine(EngineConfig(str(tiny_llama), speculative=speculative, **options()))


def test_the_tokens_of_thinking_come_from_the_tokenizer(plain: Engine) -> None:
    speculative = SpeculativeConfig(method="ngram", use_relaxed_acceptance_for_thinking=True)
    config = dataclasses.replace(plain.config, speculative=speculative)
    settled = settle_speculation(config, {"<think>": 3, "</think>": 4}.get).speculative
    assert settled == dataclasses.replace(speculative, think_token_ids=(3, 4))
    given = dataclasses.replace(speculative, think_token_ids=(7, 5))
    kept = settle_speculation(dataclasses.replace(config, speculative=given), {"<think>": 3, "</think>": 4}.get)
    assert kept.speculative == given


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_tokens_are_the_cpus(plain: Engine, tiny_llama: Path) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4, ngram_min=1)
    own = options() | {"device": "cuda", "block_size": 16}
    with Engine(EngineConfig(str(tiny_llama), speculative=speculative, **own)) as engine:
        for params in (GREEDY, SAMPLED, EDITED):
            assert told(engine.generate(prompts(), params)) == told(plain.generate(prompts(), params))
