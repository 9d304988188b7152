"""Host cost of scheduling: microseconds of `schedule` and `update` a step, with all requests decoding.

Run `python benchmarks/scheduler.py`. A line gives the running requests, the median step of the best and of all rounds,
the 99th percentile of all, and the two halves in the best round. Rounds are short, so that one of them is likely to be
free of other load on the machine.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.request import Request
from hookline.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
ROUNDS, STEPS = 10, 100


def make_scheduler(running: int) -> Scheduler:
    """A scheduler with `running` requests past their prefill, at random places in their blocks."""
    rng = random.Random(running)
    length = 256 + ROUNDS * STEPS + 64
    pool = BlockPool(running * (length // BLOCK_SIZE + 1), BLOCK_SIZE)
    scheduler = Scheduler(pool, max_batch_tokens=8192, max_running=running, max_model_len=length)
    for number in range(running):
        prompt = [rng.randrange(50_000) for _ in range(rng.randint(100, 200))]
        scheduler.add(Request(str(number), prompt, SamplingParams(), length, frozenset({50_000, 50_001})))
    while scheduler.num_waiting:
        batch = scheduler.schedule()
        scheduler.update(batch, [[1] for part in batch.requests if part.samples])
    return scheduler


def measure(scheduler: Scheduler, running: int) -> list[tuple[float, float]]:
    """Microseconds of `schedule` and of `update` in each of STEPS decode steps."""
    rng = random.Random(0)
    times = []
    for _ in range(STEPS):
        sampled = [[rng.randrange(50_000)] for _ in range(running)]
        start = time.perf_counter()
        batch = scheduler.schedule()
        middle = time.perf_counter()
        scheduler.update(batch, sampled)
        end = time.perf_counter()
        if batch.num_decodes != running:
            raise RuntimeError(f"{batch.num_decodes} of {running} requests decoded")
        times.append(((middle - start) * 1e6, (end - middle) * 1e6))
    return times


def main() -> None:
    print(f"{'running':>8} {'best_us':>9} {'median_us':>9} {'p99_us':>9} {'schedule':>9} {'update':>9}")
    for running in (1, 16, 64, 256):
        scheduler = make_scheduler(running)
        gc.collect()
        gc.freeze()
        rounds = [measure(scheduler, running) for _ in range(ROUNDS)]
        best = min(rounds, key=lambda times: statistics.median(map(sum, times)))
        schedule, update = (statistics.median(half) for half in zip(*best, strict=True))
        steps = sorted(sum(pair) for times in rounds for pair in times)
        values = (
            statistics.median(map(sum, best)),
            statistics.median(steps),
            statistics.quantiles(steps, n=100)[98],
            schedule,
            update,
        )
        print(f"{running:>8} " + " ".join(f"{value:>9.1f}" for value in values))


if __name__ == "__main__":
    main()
