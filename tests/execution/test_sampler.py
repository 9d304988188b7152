"""The sampler against transformers' processors, and against itself: alone, in batches, with bad neighbours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as oracle

from hookline.errors import UsageError
from hookline.execution.sampler import Sampler, token_logprobs
from hookline.execution.sampling_state import SamplingState, derive_seed
from hookline.sampling_params import SamplingParams

EOS = (2, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "cold": {"temperature": 1e-4},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "top_k_wide": {"temperature": 2.0, "top_k": 900},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
    "top_p_tiny": {"temperature": 0.9, "top_p": 1e-6},
    "top_p_flat": {"temperature": 20.0, "top_p": 0.97},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all_filters": {"temperature": 1.5, "top_k": 200, "top_p": 0.8, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 1.0, "min_tokens": 4},
    "logit_bias": {"temperature": 1.0, "logit_bias": {7: 30.0, 8: 29.5, 9: -30.0}, "top_k": 4},
    "everything": {
        "temperature": 1.1, "top_k": 300, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 0.8, "min_tokens": 9,
        "logit_bias": {2: 50.0, 11: 3.0},
    },
}  # fmt: skip


def make_logits(rows: int, vocab: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_state(vocab: int, seed: int = 0, *, prompt: Any = (1, 9, 4), outputs: Any = (), bad: Any = (), **options: Any):  # type: ignore[no-untyped-def]
    return SamplingState(SamplingParams(**options), list(prompt), EOS, vocab, seed, bad, outputs)


def top_p_lowest_ids_first(top_p: float) -> Any:
    """Transformers' top-p leaves open which of level tokens it keeps; this one keeps the lowest ids."""

    def process(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        values, ids = scores.double().sort(dim=-1, descending=True, stable=True)
        probs = values.softmax(-1)
        removed = probs.cumsum(-1) - probs >= top_p
        return scores.masked_fill(torch.zeros_like(removed).scatter(-1, ids, removed), -torch.inf)

    return process


def oracle_scores(
    logits: torch.Tensor, tokens: list[int], prompt_len: int, bad: Any, options: Any, level: bool = False
) -> torch.Tensor:
    """What transformers leaves of one row of logits."""
    made: list[Any] = []
    if bad:
        made.append(oracle.NoBadWordsLogitsProcessor([list(ids) for ids in bad]))
    if options.get("min_tokens"):
        made.append(oracle.MinNewTokensLengthLogitsProcessor(prompt_len, options["min_tokens"], list(EOS)))
    if options.get("logit_bias"):
        made.append(oracle.SequenceBiasLogitsProcessor({(k,): v for k, v in options["logit_bias"].items()}))
    if "repetition_penalty" in options:
        made.append(oracle.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    made.append(oracle.TemperatureLogitsWarper(options["temperature"]))
    for name, warper in (
        ("top_k", oracle.TopKLogitsWarper),
        ("top_p", oracle.TopPLogitsWarper if not level else top_p_lowest_ids_first),
        ("min_p", oracle.MinPLogitsWarper),
    ):
        if name in options:
            made.append(warper(options[name]))
    scores = logits[None].clone()
    for process in made:
        scores = process(torch.tensor([tokens]), scores)
    return scores[0]


def draw_by_inverse_cdf(scores: torch.Tensor, uniform: float) -> int:
    running = scores.double().softmax(-1).cumsum(-1)
    return int((running <= uniform * running[-1]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_draws_from_what_transformers_leaves(name: str, dtype: torch.dtype) -> None:
    vocab, rows, options = 2999, 24, OPTIONS[name]
    logits = make_logits(rows, vocab, seed=len(name)).to(dtype)
    rng = random.Random(name)
    states, expected = [], []
    for row in range(rows):
        prompt = [rng.randrange(vocab) for _ in range(12)]
        outputs = [rng.randrange(vocab) for _ in range(row % 7)]
        state = make_state(vocab, seed=row, prompt=prompt, outputs=outputs, **options)
        level = dtype == torch.bfloat16
        scores = oracle_scores(logits[row].float(), prompt + outputs, len(prompt), (), options, level)
        states.append(state)
        expected.append(draw_by_inverse_cdf(scores, state.uniform()))
    result = Sampler(vocab).sample(logits, states)
    assert result.token_ids == expected
    assert result.bad_rows == []
    assert len(set(expected)) > 1 or name == "cold"


def test_bad_words_ban_what_transformers_bans() -> None:
    vocab, bad = 40, [(7,), (3, 8), (1, 3, 9), (4, 4, 10)]
    logits = torch.zeros(vocab)
    logits[[7, 8, 9, 10, 11]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    sampler = Sampler(vocab)
    for context in ([0], [3], [1, 3], [4, 4], [2, 3], [1, 0]):
        for cut in range(len(context) + 1):
            state = make_state(vocab, prompt=[0, *context[:cut]], outputs=context[cut:], bad=bad)
            scores = oracle_scores(logits, [0, *context], 1 + cut, bad, {"temperature": 1.0})
            assert sampler.sample(logits[None], [state]).token_ids == [int(scores.argmax())]


def test_penalties_follow_their_definitions() -> None:
    vocab, rows = 50, 40
    logits = make_logits(rows, vocab, seed=3)
    outputs = [4, 4, 4, 9, 30]
    states = [make_state(vocab, outputs=outputs, presence_penalty=0.7, frequency_penalty=-1.2) for _ in range(rows)]
    expected = logits.clone()
    for token in set(outputs):
        expected[:, token] -= 0.7 - 1.2 * outputs.count(token)
    assert Sampler(vocab).sample(logits, states).token_ids == expected.argmax(-1).tolist()
    assert (expected.argmax(-1) != logits.argmax(-1)).any()
    # Over output tokens only: the prompt alone changes nothing.
    fresh = [make_state(vocab, prompt=range(vocab), presence_penalty=2.0) for _ in range(rows)]
    assert Sampler(vocab).sample(logits, fresh).token_ids == logits.argmax(-1).tolist()


def test_allowed_ids_and_min_tokens() -> None:
    vocab = 30
    logits = make_logits(3, vocab, seed=1)
    logits[:, 2] = 50.0
    states = [
        make_state(vocab, allowed_token_ids=(2, 6, 8), min_tokens=1),
        make_state(vocab, allowed_token_ids=(2, 6, 8)),
        make_state(vocab, stop_token_ids=(9,), min_tokens=3, outputs=(1, 1), logit_bias={9: 100.0}),
    ]
    first, second, third = Sampler(vocab).sample(logits, states).token_ids
    assert first == max((6, 8), key=lambda token: float(logits[0, token]))
    assert second == 2
    assert third not in (2, 5, 9)
    states[2].append(1)
    assert Sampler(vocab).sample(logits, states).token_ids[2] == 9


def test_state_that_grows_equals_state_made_anew() -> None:
    vocab = 200
    options = {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 30}
    grown, sampler, outputs = make_state(vocab, 7, bad=[(3, 4)], **options), Sampler(vocab), list[int]()
    for step in range(150):
        logits = make_logits(1, vocab, seed=step)
        anew = make_state(vocab, 7, bad=[(3, 4)], outputs=outputs, **options)
        token = sampler.sample(logits, [grown]).token_ids[0]
        assert Sampler(vocab).sample(logits, [anew]).token_ids[0] == token
        outputs.append(token)
        grown.append(token)


def random_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.0, 3.0])}
    for name, values in {
        "top_k": [3, 40, 700],
        "top_p": [0.1, 0.9, 0.999],
        "min_p": [0.1],
        "repetition_penalty": [1.2],
        "presence_penalty": [0.5],
        "logprobs": [0, 5],
        "min_tokens": [2],
    }.items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    return options


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_neighbours() -> None:
    vocab, rows, rng = 1301, 500, random.Random(5)
    logits = make_logits(rows, vocab, seed=5, scale=2.5)
    logits[::2] = logits[::2].bfloat16().float()
    states = [make_state(vocab, seed, outputs=(seed % vocab,), **random_options(rng)) for seed in range(rows)]
    sampler = Sampler(vocab)
    torch.set_num_threads(1)
    alone = [sampler.sample(logits[row : row + 1], [states[row]]) for row in range(rows)]
    torch.set_num_threads(2)
    order = list(range(rows))
    for size in (rows, 16):
        rng.shuffle(order)
        for start in range(0, rows, size):
            chosen = order[start : start + size]
            result = sampler.sample(logits[chosen], [states[row] for row in chosen])
            assert result.token_ids == [alone[row].token_ids[0] for row in chosen]
            for place, row in enumerate(chosen):
                entries = result.logprobs and result.logprobs[place]
                own = alone[row].logprobs
                assert entries == (own[0] if own else None)


def test_level_tokens_are_kept_lowest_id_first() -> None:
    vocab, draws = 5000, 400
    flat = torch.zeros(1, vocab)

    def drawn(**options: Any) -> set[int]:
        states = [make_state(vocab, seed, temperature=1.0, **options) for seed in range(draws)]
        return set(Sampler(vocab).sample(flat.expand(draws, -1), states).token_ids)

    assert drawn(top_p=0.01) == set(range(50))
    assert max(drawn(top_k=3)) > 2000  # all are level with the third, as transformers has it
    assert Sampler(vocab).sample(flat, [make_state(vocab)]).token_ids == [0]


@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_p": 0.9}], ids=str)
def test_frequencies_are_the_probabilities(options: dict[str, Any]) -> None:
    vocab, draws = 300, 10_000
    logits = make_logits(1, vocab, seed=11, scale=1.5)
    states = [make_state(vocab, derive_seed(99, number), temperature=1.0, **options) for number in range(draws)]
    tokens = Sampler(vocab).sample(logits.expand(draws, -1), states).token_ids
    scores = oracle_scores(logits[0], [1], 1, (), {"temperature": 1.0, **options})
    expected = scores.double().softmax(-1).numpy() * draws
    found = np.bincount(tokens, minlength=vocab)
    assert found[expected == 0].sum() == 0
    big = expected >= 5
    chi_square = ((found - expected)[big] ** 2 / expected[big]).sum()
    freedom = big.sum() - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_draws_depend_on_seed_and_position_alone() -> None:
    state = make_state(10, seed=4, temperature=1.0)
    draws = []
    for _ in range(2000):
        draws.append(state.uniform())
        state.append(3)
    assert make_state(10, seed=4, temperature=1.0, outputs=[9] * 1999).uniform() == draws[1999]
    assert make_state(10, seed=4).uniform(ahead=7) == draws[7]
    assert all(0 <= draw < 1 for draw in draws)
    assert len(set(draws)) == 2000
    assert abs(np.mean(draws) - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.06
    first = [make_state(10, seed=seed).uniform() for seed in range(2000)]
    assert abs(np.mean(first) - 0.5) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06
    children = {derive_seed(seed, number) for seed in range(50) for number in range(64)}
    assert len(children) == 50 * 64
    assert all(0 <= child < 2**63 for child in children)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_bad_rows_fail_alone(options: dict[str, Any]) -> None:
    vocab = 2000
    logits = make_logits(6, vocab, seed=2)
    states = [make_state(vocab, row, logprobs=2, **options) for row in range(6)]
    expected = Sampler(vocab).sample(logits, states)
    broken = logits.clone()
    broken[1, 77] = torch.nan
    broken[2] = -torch.inf
    broken[3, 5] = torch.inf
    states[4] = make_state(vocab, 4, allowed_token_ids=(8,), bad=[(8,)], **options)
    result = Sampler(vocab).sample(broken, states)
    assert result.bad_rows == [1, 2, 3, 4]
    assert result.token_ids == [expected.token_ids[0], -1, -1, -1, -1, expected.token_ids[5]]
    assert expected.logprobs is not None
    assert result.logprobs == [expected.logprobs[0], None, None, None, None, expected.logprobs[5]]


def test_tail_of_minus_infinity_and_huge_logits() -> None:
    vocab = 400
    logits = torch.full((2, vocab), -torch.inf)
    logits[0, 17] = 3.0
    logits[1, [3, 350]] = 1e38
    for options in ({"temperature": 1.0}, {"temperature": 2e-5, "top_p": 0.5}, {"temperature": 1.0, "top_k": 5}):
        states = [make_state(vocab, seed, **options) for seed in range(2)]
        result = Sampler(vocab).sample(logits, states)
        assert result.bad_rows == []
        assert result.token_ids[0] == 17
        assert result.token_ids[1] in (3, 350)


def test_tiny_temperature_is_greedy() -> None:
    logits = make_logits(4, 100, seed=8)
    states = [make_state(100, seed, temperature=1e-30) for seed in range(4)]
    assert Sampler(100).sample(logits, states).token_ids == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own() -> None:
    vocab = 700
    logits = make_logits(3, vocab, seed=6)
    states = [
        make_state(vocab, 1, temperature=3.0, top_k=600, repetition_penalty=1.4, logprobs=5),
        make_state(vocab, 2, temperature=1.0),
        make_state(vocab, 3, logprobs=0),
    ]
    result = Sampler(vocab).sample(logits, states)
    assert result.logprobs is not None
    first, second, third = result.logprobs
    assert first is not None
    assert third is not None
    assert second is None
    expected = logits.double().log_softmax(-1)
    values, ids = expected[0].topk(5)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert first.token_id == result.token_ids[0]
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]), abs=1e-6)
    assert first.rank == 1 + int((expected[0] > expected[0, first.token_id]).sum())
    assert (third.rank, third.top) == (1, ())


def test_logprobs_of_level_tokens_name_the_lowest_ids() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, 2500] = 1.0
    result = Sampler(3000).sample(logits, [make_state(3000, logprobs=4)])
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert [token for token, _ in result.logprobs[0].top] == [2500, 0, 1, 2]


def test_logprobs_of_given_tokens() -> None:
    logits = make_logits(11, 60, seed=9).bfloat16().float()
    next_ids = [int(i) for i in torch.randint(60, (11,), generator=torch.Generator().manual_seed(1))]
    entries = token_logprobs(logits, next_ids, top_n=2)
    assert entries == token_logprobs(logits[:4], next_ids[:4], 2) + token_logprobs(logits[4:], next_ids[4:], 2)
    expected = logits.double().log_softmax(-1)
    assert [entry.token_id for entry in entries] == next_ids
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[row, next_ids[row]]), abs=1e-6)
        assert len(entry.top) == 2


def test_leaves_its_arguments_alone_and_checks_the_shape() -> None:
    logits = make_logits(2, 64, seed=0)
    before = logits.clone()
    states = [make_state(64, 0, temperature=1.0, allowed_token_ids=(1, 2)), make_state(64, 1, top_k=3, temperature=1.0)]
    sampler = Sampler(64)
    assert sampler.sample(logits, states).token_ids == sampler.sample(logits, states).token_ids
    assert torch.equal(logits, before)
    with pytest.raises(UsageError, match=r"\(2, 64\); expected \(1, 64\)"):
        sampler.sample(logits, states[:1])
    with pytest.raises(UsageError, match=r"expected \(2, 63\)"):
        Sampler(63).sample(logits, states)


def test_an_interrupt_leaves_no_token_taken_in_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    state, tokens = make_state(64, 0, **options), [5, 9, 5, 2]
    state.follow(tokens[:2])
    assert state.counts is not None
    add, rest = type(state.counts).add, [None, None, KeyboardInterrupt]

    def interrupted(counts: Any, token_id: int) -> None:
        add(counts, token_id)
        error = rest.pop(0) if rest else None
        if error is not None:
            raise error

    monkeypatch.setattr(type(state.counts), "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.follow(tokens)
    state.follow(tokens)
    want, logits = make_state(64, 0, **options), make_logits(1, 64, seed=0)
    want.follow(tokens)
    assert state.counts.ids.tolist() == [5, 9, 2] and state.counts.counts.tolist() == [2.0, 1.0, 1.0]
    assert Sampler(64).sample(logits, [state]) == Sampler(64).sample(logits, [want])
