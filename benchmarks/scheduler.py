"""Host cost of scheduling: microseconds of `schedule` and `update` a step, with all requests decoding.

Run `python benchmarks/scheduler.py`. Each line: running requests, median and 99th percentile of a step in
microseconds, then the medians of the two halves.
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
STEPS = 1_000


def make_scheduler(running: int) -> Scheduler:
    """A scheduler with `running` requests past their prefill, at random places in their blocks."""
    rng = random.Random(running)
    length = 256 + STEPS + 64
    pool = BlockPool(running * (length // BLOCK_SIZE + 1), BLOCK_SIZE)
    scheduler = Scheduler(pool, max_batch_tokens=8192, max_running=running, max_model_len=length)
    for number in range(running):
        prompt = [rng.randrange(50_000) for _ in range(rng.randint(100, 200))]
        scheduler.add(Request(str(number), prompt, SamplingParams(), length, frozenset({50_000, 50_001})))
    while scheduler.num_waiting:
        batch = scheduler.schedule()
        scheduler.update(batch, [[1] for part in batch.requests if part.samples])
    return scheduler


def measure(running: int) -> tuple[list[float], list[float]]:
    """Microseconds of `schedule` and of `update` in each of STEPS decode steps."""
    scheduler = make_scheduler(running)
    rng = random.Random(0)
    schedules, updates = [], []
    for _ in range(STEPS):
        sampled = [[rng.randrange(50_000)] for _ in range(running)]
        start = time.perf_counter()
        batch = scheduler.schedule()
        middle = time.perf_counter()
        scheduler.update(batch, sampled)
        end = time.perf_counter()
        if batch.num_decodes != running:
            raise RuntimeError(f"{batch.num_decodes} of {running} requests decoded")
        schedules.append((middle - start) * 1e6)
        updates.append((end - middle) * 1e6)
    return schedules, updates


def main() -> None:
    gc.collect()
    gc.freeze()
    print(f"{'running':>8} {'step_us':>9} {'p99_us':>9} {'schedule':>9} {'update':>9}")
    for running in (1, 16, 64, 256):
        schedules, updates = measure(running)
        steps = [a + b for a, b in zip(schedules, updates, strict=True)]
        p99 = statistics.quantiles(steps, n=100)[98]
        medians = [statistics.median(values) for values in (steps, schedules, updates)]
        print(f"{running:>8} {medians[0]:>9.1f} {p99:>9.1f} {medians[1]:>9.1f} {medians[2]:>9.1f}")


if __name__ == "__main__":
    main()
