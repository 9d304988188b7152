"""Lengths at every border: each request is served to its end, or refused at once with the numbers."""

from __future__ import annotations

import itertools

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.request import FinishReason, Request
from hookline.scheduling.scheduler import Scheduler

SIZE, BLOCKS = 4, 5
POOL = SIZE * BLOCKS


def totals(max_len: int) -> list[int]:
    borders = {1, 2, SIZE - 1, SIZE, SIZE + 1, POOL - SIZE, POOL - 1, POOL, POOL + 1, max_len - 1, max_len, max_len + 1}
    return sorted(borders)


@pytest.mark.parametrize("max_len", [POOL - 3, POOL, POOL + 7])
@pytest.mark.parametrize(("chunk", "budget"), [(None, 64), (1, 64), (5, 7)])
@pytest.mark.parametrize("at_once", [1, 2])
def test_served_or_refused_at_every_border(max_len: int, chunk: int | None, budget: int, at_once: int) -> None:
    served = refused = 0
    for total, long_prompt in itertools.product(totals(max_len), (True, False)):
        prompt, new = (total - 1, 1) if long_prompt else (1, max(1, total - 1))
        scheduler = Scheduler(
            BlockPool(BLOCKS, SIZE),
            max_batch_tokens=budget,
            max_running=4,
            max_model_len=max_len,
            max_chunk_tokens=chunk,
        )
        requests = [Request(str(i), [i] * prompt, SamplingParams(max_tokens=new), max_len) for i in range(at_once)]
        for request in requests:
            fits = 1 <= prompt < max_len and min(prompt + new, max_len) <= POOL
            try:
                scheduler.add(request)
            except InvalidRequestError as error:
                assert not fits and error.field in ("prompt", "max_tokens")
                refused += 1
            else:
                assert fits
                served += 1
        for _ in range(3 * at_once * POOL):
            batch = scheduler.schedule()
            scheduler.update(batch, [[9] for part in batch.requests if part.samples]) if batch.requests else None
            scheduler.check()
        assert not scheduler.has_work
        for request in requests:
            if request.finish_reason is not None:
                assert request.finish_reason is FinishReason.LENGTH
                assert len(request.output_token_ids) == request.max_output_tokens
    assert served > 0 and refused > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message", "field"),
    [
        (0, None, "the prompt is empty", "prompt"),
        (40, None, "the prompt has 40 tokens; the context holds 40", "prompt"),
        (41, 1, "the prompt has 41 tokens; the context holds 40", "prompt"),
        (
            19,
            None,
            "19 prompt tokens and up to 21 new ones need 10 cache blocks of 4 tokens; the cache has 5",
            "prompt",
        ),
        (19, 2, "19 prompt tokens and up to 2 new ones need 6 cache blocks of 4 tokens; the cache has 5", "max_tokens"),
    ],
)
def test_refusals_name_the_numbers(prompt: int, max_tokens: int | None, message: str, field: str) -> None:
    scheduler = Scheduler(BlockPool(BLOCKS, SIZE), max_batch_tokens=8, max_running=4, max_model_len=40)
    request = Request("a", list(range(prompt)), SamplingParams(max_tokens=max_tokens), 1_000)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        scheduler.add(request)
    assert caught.value.field == field
    assert not scheduler.has_work and scheduler.abort("a") is None
