"""E1: numbers that are none, in logits and in the cache: who has them fails, and nobody else, then or later.

Where they are nobody's, nobody fails: in free blocks, in the block that fills block tables up (none is reserved for
that, so it has to be free), and in rows of padding. Of those there are some only where steps run on the device alone;
the plain runner's and the n-gram one's have a row for each token, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from hookline import Engine
from hookline.execution.device_runner import DeviceRunner
from tests.suites.faults import odd_logits, spoil_blocks, spoiled_padding
from tests.suites.invariants import Probe, idle_faults
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import DrivenLoop, Served, engines, tiny_model

_PLANNED = {Tier.T1: 50, Tier.T2: 2_000}
_TOKENS = 10
_REQUESTS = 16
# Of the tiny GLM, whose steps take many times as long on a CPU: requests, and the share of its cases.
_GLM_REQUESTS = 3
_GLM_CASES = 3
# Ways of running whose steps have rows of padding, and most requests of a case that spoils those: for so many there is
# no step of that size, nor for those of the tiny GLM.
_PADDED = ("overlapped", "tiny GLM")
_PADDED_REQUESTS = 11
# What block tables are filled up with.
_FILLER = 0


def _all_nan(row: int, logits: torch.Tensor) -> None:
    logits[row % len(logits)] = math.nan


def _one_nan(row: int, logits: torch.Tensor) -> None:
    logits[row % len(logits), row] = math.nan


def _one_infinity(row: int, logits: torch.Tensor) -> None:
    logits[row % len(logits), row] = math.inf


def _nothing(row: int, logits: torch.Tensor) -> None:
    logits[row % len(logits)] = -math.inf


_LOGITS = {"all NaN": _all_nan, "one NaN": _one_nan, "one infinity": _one_infinity, "all -infinity": _nothing}


def run(tier: Tier, seed: int) -> SuiteReport:
    with tiny_model() as model:
        makers = engines(model)
        forced = [f"failed rows, {way}" for way in makers] + [f"failed caches, {way}" for way in makers]
        forced += [f"spoiled rows of padding, {way}" for way in _PADDED]
        forced += ["blocks that went on to others", "spoiled free blocks", "a spoiled block that fills tables up"]
        tally = Tally("E1", tier, seed, _PLANNED[tier], forced)
        light = [way for way in makers if way != "tiny GLM"]
        left = _PLANNED[tier] - _GLM_CASES
        counts = {way: -(-left // len(light)) for way in light} | {"tiny GLM": _GLM_CASES}
        for way, make in makers.items():
            _one_way(tally, way, make, counts[way])
    return tally.report()


def _one_way(tally: Tally, way: str, make: Callable[[], Engine], cases: int) -> None:
    requests = _REQUESTS if way != "tiny GLM" else _GLM_REQUESTS
    many = [[first, *(tally.random.randrange(256) for _ in range(8 + first % 11))] for first in range(1, requests + 1)]
    expected = _serve(DrivenLoop(make()), many)
    engine = make()
    engine.pool._free.sort()  # so that the filler is given out last, and can be spoiled until then
    probe = Probe(engine)
    kinds = ("cache", "logits", "padding") if isinstance(engine._runner, DeviceRunner) else ("cache", "logits")
    for case in range(cases):
        label = f"{way}, case {case}"
        with tally.case(label):
            loop, kind = DrivenLoop(engine), kinds[case % len(kinds)]
            value = math.inf if case // len(kinds) % 2 else math.nan
            failed, due = set[int](), expected
            if kind == "logits":
                failed = _spoil_logits(tally, loop, many, label)
                tally.event(f"failed rows, {way}", len(failed))
            elif kind == "cache":
                failed = _spoil_cache(tally, loop, many, label, value)
                tally.event(f"failed caches, {way}", len(failed))
            else:
                due = expected[:_PADDED_REQUESTS]
                tally.event(f"spoiled rows of padding, {way}", _spoil_padding(loop, many[: len(due)], value))
            _compare(tally, loop, due, failed, label)
            # The spoiled blocks are the next to be given out, and the failed prompts come again themselves.
            again = DrivenLoop(engine)
            _serve(again, many[::-1])
            tally.event("blocks that went on to others", len(failed))
            _compare(tally, again, expected[::-1], set(), f"{label}, again")
            for fault in [*probe.faults(loop), *idle_faults(loop)]:
                tally.fail(f"{label}: {fault}")


def _serve(loop: DrivenLoop, many: list[list[int]]) -> list[Served]:
    return loop.serve(many, max_tokens=_TOKENS, ignore_eos=True)


def _spoil_logits(tally: Tally, loop: DrivenLoop, many: list[list[int]], label: str) -> set[int]:
    """One row of one step."""
    kind, row = tally.random.choice(sorted(_LOGITS)), tally.random.randrange(200)
    after = tally.random.randint(0, 4) if len(many) == _REQUESTS else 0  # later calls may be a draft's own
    with odd_logits(loop.engine, partial(_LOGITS[kind], row), after=after) as hit:
        _serve(loop, many)
    failed = _failed(loop)
    tally.expect(len(hit) == 1 and len(failed) <= 1, f"{label}, {kind}: {len(failed)} requests failed")
    return failed


def _spoil_cache(tally: Tally, loop: DrivenLoop, many: list[list[int]], label: str, value: float) -> set[int]:
    """The first block of one request while it runs, and every block that is free."""
    engine = loop.engine
    for number, ids in enumerate(many, 1):
        loop.submit(number, ids, max_tokens=_TOKENS, ignore_eos=True)
    for _ in range(tally.random.randint(2, 4) if len(many) == _REQUESTS else 1):  # drafts lead soon to the end
        loop.turn()
    running = [r for r in engine.scheduler._running if engine.pool.references(r.block_table[0]) == 1]
    victim = tally.random.choice(running)
    own = next(number for number, ids in enumerate(many, 1) if ids == victim.prompt_token_ids)
    spoil_blocks(engine, victim.block_table[:1], value)
    spoil_blocks(engine, engine.pool._free, value)
    tally.event("spoiled free blocks", engine.pool.num_free)
    tally.event("a spoiled block that fills tables up", _FILLER in engine.pool._free)
    loop.run()
    failed = _failed(loop)
    tally.expect(failed <= {own}, f"{label}: requests {failed} failed, not {own} alone")
    return failed


def _spoil_padding(loop: DrivenLoop, many: list[list[int]], value: float) -> int:
    """Rows that are nobody's, wherever there are some; how many of their logits were no numbers."""
    with spoiled_padding(loop.engine, value) as hit:
        _serve(loop, many)
    return sum(hit)


def _failed(loop: DrivenLoop) -> set[int]:
    return {number for (number, _), served in loop.served.items() if served.finish_reason == "error"}


def _compare(tally: Tally, loop: DrivenLoop, expected: list[Served], failed: set[int], label: str) -> None:
    for number, due in enumerate(expected, 1):
        found = loop.served[number, 0]
        if number in failed:
            begins = found.token_ids == due.token_ids[: len(found.token_ids)]
            tally.expect(begins and bool(found.error), f"{label}: request {number} failed with {found}")
        else:
            same = (found.token_ids, found.finish_reason) == (due.token_ids, due.finish_reason)
            tally.expect(
                same, f"{label}: request {number} gives {found.token_ids} ({found.error}), not {due.token_ids}"
            )
