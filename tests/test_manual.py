"""Driving by hand: logits equal the scheduler's own, every refusal really occurs and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.errors import InvalidRequestError
from hookline.manual import SchedulingError, SchedulingResult

BLOCK = 8
TOKEN_BYTES = 2 * 2 * 16 * 4 * 2  # k and v, 2 heads of 16, fp32, 2 layers


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    """A pool of 10 blocks of 8 tokens; 4 requests, 32 tokens a batch, 40 tokens a request."""
    config = EngineConfig(
        str(tiny_llama),
        device="cpu",
        block_size=BLOCK,
        kv_cache_memory=10 * BLOCK * TOKEN_BYTES,
        max_running=4,
        max_batch_tokens=32,
        max_model_len=40,
        prefix_caching=False,
    )
    with Engine(config) as run:
        yield run


def greedy_by_hand(engine: Engine, prompt: list[int], count: int) -> list[int]:
    logits = engine.put(["by hand"], [prompt])
    found = [int(logits[0].argmax())]
    while len(found) < count:
        found.append(int(engine.put(["by hand"], [[found[-1]]])[0].argmax()))
    engine.flush("by hand")
    return found


def test_gives_the_same_tokens_as_generate(engine: Engine) -> None:
    prompt = list(range(40, 60))
    want = engine.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs[0].token_ids
    assert greedy_by_hand(engine, prompt, 12) == list(want)
    assert engine.pool.num_referenced == 0


def test_rows_come_in_the_callers_order(engine: Engine) -> None:
    """A prompt before a single token: the batch runs them the other way round."""
    engine.put(["short"], [[5, 6, 7]])
    mixed = engine.put(["long", "short"], [[9, 8, 7, 6], [11]])
    for uid in ("long", "short"):
        engine.flush(uid)
    alone = torch.cat([engine.put(["a"], [[9, 8, 7, 6]]), engine.put(["b"], [[5, 6, 7, 11]])])
    torch.testing.assert_close(mixed, alone, rtol=1e-4, atol=1e-4)


def test_earlier_logits_stay_as_they_were(engine: Engine) -> None:
    first = engine.put(["a"], [[1, 2, 3]])
    kept = first.clone()
    engine.put(["a"], [[4]])
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("uids", "lengths", "result"),
    [
        (["a"], [32], SchedulingResult.SUCCESS),
        (["a", "b", "c", "d", "e"], [1, 1, 1, 1, 1], SchedulingResult.ENGINE_REQUEST_LIMIT),
        (list(range(33)), [1] * 33, SchedulingResult.BATCH_REQUEST_LIMIT),
        (["a", "b"], [20, 13], SchedulingResult.BATCH_TOKEN_LIMIT),
        (["held", "b"], [9, 1], SchedulingResult.REQUEST_TOKEN_LIMIT),
        (["b", "c", "d"], [9, 9, 9], SchedulingResult.CACHE_LIMIT),
    ],
)
def test_every_result_occurs(engine: Engine, uids: list[object], lengths: list[int], result: SchedulingResult) -> None:
    engine.put(["held"], [[1] * 32])
    if result is SchedulingResult.CACHE_LIMIT:
        engine.put(["held"], [[1] * 8])  # 5 blocks held, 5 free, 6 wanted
    if result is SchedulingResult.SUCCESS:
        engine.flush("held")
    assert engine.can_schedule(uids, lengths) is result
    before = engine.pool.num_referenced
    if result is not SchedulingResult.SUCCESS:
        with pytest.raises(SchedulingError) as caught:
            engine.put(uids, [[1] * n for n in lengths])
        assert caught.value.result is result
        assert engine.pool.num_referenced == before


def test_each_uid_has_one_length(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="2 uids and 1 lengths"):
        engine.can_schedule(["a", "b"], [1])


def test_query_tells_what_fits(engine: Engine) -> None:
    assert engine.query("new", 100, 100) == (40, 5)
    assert engine.query("new", 100, 2) == (16, 2)
    engine.put(["a"], [[1] * 5])
    assert engine.query("a", 3, 100) == (3, 0)
    assert engine.query("a", 4, 100) == (4, 1)
    assert engine.query("a", 100, 0) == (3, 0)
    for uid in "bcd":
        engine.put([uid], [[1]])
    assert engine.query("new", 100, 100) == (0, 0)


@pytest.mark.parametrize("tokens", [[], [-1], [320], [True], [1.0]])
def test_bad_tokens_are_refused_and_change_nothing(engine: Engine, tokens: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        engine.put(["good", "bad"], [[1, 2], tokens])
    assert engine.pool.num_referenced == 0
    with pytest.raises(InvalidRequestError, match="not tracked"):
        engine.flush("good")


def test_a_failed_forward_takes_everything_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put(["a"], [[1] * 7])

    def broken(batch: object) -> torch.Tensor:
        raise RuntimeError("no forward")

    with monkeypatch.context() as patch:
        patch.setattr(engine.loaded.opened.model, "forward", broken)
        with pytest.raises(RuntimeError, match="no forward"):
            engine.put(["a", "b"], [[2, 3, 4], [5]])
    assert engine.pool.num_referenced == 1
    engine.pool.check()
    continued = engine.put(["a"], [[9]])
    engine.flush("a")
    assert torch.allclose(continued, engine.put(["c"], [[1] * 7 + [9]]), atol=1e-4)
