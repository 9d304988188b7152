"""Steps of decodes alone are decided a short way; they must be the very steps that the long way decides."""

from __future__ import annotations

import random
from collections import deque

import pytest

from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.request import Request, ScheduledBatch
from hookline.scheduling.scheduler import Scheduler
from hookline.scheduling.steady import SteadyBatch

NEVER = 10**9


class Twin:
    """One of two schedulers that are told the same."""

    def __init__(self, blocks: int, in_flight: int, preempt_every: int | None) -> None:
        self.pool = BlockPool(blocks, 4)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=40,
            max_running=6,
            max_model_len=64,
            max_in_flight=in_flight,
            preempt_every=preempt_every,
        )
        self.flights: deque[ScheduledBatch] = deque()
        self.steady = 0

    def launch(self) -> list[object]:
        batch = self.scheduler.schedule()
        if batch.requests:
            self.flights.append(batch)
        self.steady += isinstance(batch, SteadyBatch)
        parts = [(p.request.request_id, p.start, p.count, p.samples, *p.request.block_table) for p in batch.requests]
        return [*parts, batch.num_decodes, batch.num_tokens, batch.num_samples, batch.version is None]

    def collect(self, tokens: list[int]) -> list[object]:
        batch = self.flights.popleft()
        results = self.scheduler.update(batch, [[token] for token in tokens[: batch.num_samples]])
        self.scheduler.check()
        counters = (self.pool.num_free, self.pool.num_cached, self.pool.counters.hit_tokens)
        return [*((r.request_id, list(new), r.finish_reason, list(r.output_token_ids)) for r, new in results), counters]


@pytest.mark.parametrize("in_flight", (1, 2))
@pytest.mark.parametrize("blocks", (24, 200))
def test_the_short_way_decides_as_the_long_one(blocks: int, in_flight: int) -> None:
    rng = random.Random(blocks + in_flight)
    short, long = Twin(blocks, in_flight, None), Twin(blocks, in_flight, NEVER)
    names: list[str] = []
    for step in range(1500):
        if rng.random() < 0.15:
            names.append(str(len(names)))
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(max_tokens=rng.randint(1, 40), min_tokens=1, stop_token_ids=(9,))
            for twin in (short, long):
                twin.scheduler.add(Request(names[-1], list(prompt), params, 64))
        if names and rng.random() < 0.02:
            name = rng.choice(names)
            assert bool(short.scheduler.abort(name)) == bool(long.scheduler.abort(name))
        while len(short.flights) < in_flight:
            decided = short.launch()
            assert decided == long.launch(), step
            if len(decided) == 4:
                break
        if short.flights:
            tokens = [9 if rng.random() < 0.01 else rng.randrange(3) for _ in range(6)]
            assert short.collect(tokens) == long.collect(tokens), step
    assert short.steady > 100
    assert long.steady == 0


def test_parts_are_made_when_looked_at() -> None:
    twin = Twin(50, 1, None)
    for name in "ab":
        twin.scheduler.add(Request(name, [1, 2], SamplingParams(max_tokens=20), 64))
    for _ in range(6):
        twin.launch()
        twin.collect([5, 5])
    batch = twin.scheduler.schedule()
    assert isinstance(batch, SteadyBatch)
    assert [part.start for part in batch.requests] == [batch.requests[0].start, batch.requests[1].start] == [7, 7]
    assert [part.request.request_id for part in batch.requests[1:]] == ["b"]
    twin.scheduler.retract(batch)
    again = twin.scheduler.schedule()
    assert [part.start for part in again.requests] == [7, 7]
    assert again.version != batch.version


def test_more_tokens_than_one_leave_the_short_way() -> None:
    twin = Twin(50, 1, None)
    twin.scheduler.add(Request("a", [1, 2], SamplingParams(max_tokens=20), 64))
    for _ in range(4):
        twin.launch()
        twin.collect([5])
    batch = twin.scheduler.schedule()
    assert isinstance(batch, SteadyBatch)
    twin.scheduler.update(batch, [[5, 6]])
    (part,) = twin.scheduler.schedule().requests
    assert (part.start, part.count) == (6, 2)
