"""K4: an error in each stage, for one request, for a whole step, and three times in a row.

Who is hit ends with an error, and nobody else: the others' tokens are those of an engine without faults. A step that is
lost three times in a row, and a ledger that cannot be trusted, end the engine: every open answer gets an error then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookline.errors import ServerError
from hookline.sampling_params import SamplingParams
from hookline.serving.process.answer import Answer
from hookline.serving.process.async_engine import AsyncEngine
from hookline.serving.requests.validated import ValidatedRequest
from tests.suites.faults import ALONE, LEDGER, SHARED, STAGES, Fault, InjectedError, installed
from tests.suites.invariants import Probe, idle_faults
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import DrivenLoop, Served, small_config, small_engine, tiny_model

_PLANNED = {Tier.T1: 36, Tier.T2: 36}
_ROUNDS = {Tier.T1: 1, Tier.T2: 40}
_RUNNERS: tuple[dict[str, Any], ...] = ({}, {"overlap": True})
# Fewer than requests, so that some are not in the step that is lost.
_RUNNING = 6
_REQUESTS = 16
_TOKENS = 8


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = [f"errors in {stage}" for stage in STAGES]
    forced += ["answers that others' errors did not touch", "engines that ended", "processes that ended"]
    tally = Tally("K4", tier, seed, _PLANNED[tier], forced)
    with tiny_model() as model:
        for _ in range(_ROUNDS[tier]):
            for options in _RUNNERS:
                _every_stage(tally, model, options, whole=tier is Tier.T2 or not options)
        with tally.case("a process whose model fails three times"):
            asyncio.run(_in_a_process(tally, model))
    return tally.report()


def _every_stage(tally: Tally, model: Path, options: dict[str, Any], *, whole: bool) -> None:
    """Each stage once for one request; if `whole`, also for any and three times in a row."""
    many = prompts(tally)
    expected = DrivenLoop(small_engine(model, max_running=_RUNNING, **options)).serve(many, **params())
    for stage in (*ALONE, *SHARED):
        for marker in (many[5][0], None)[: 1 + whole]:
            label = f"{stage}, {options}, {'one' if marker else 'all'}"
            with tally.case(label):
                loop = DrivenLoop(small_engine(model, max_running=_RUNNING, **options))
                probe = Probe(loop.engine)
                fault = Fault(stage, marker, after=tally.random.randint(0, 5) if stage != "add_request" else 0)
                _one(tally, loop, fault, many, expected, label)
                for found in [*probe.faults(loop), *idle_faults(loop)]:
                    tally.fail(f"{label}: {found}")
    for stage in STAGES if whole else ():
        with tally.case(f"{stage}, {options}, three times"):
            _three(tally, model, stage, many, options)


def prompts(tally: Tally) -> list[list[int]]:
    """Prompts that begin with different tokens."""
    return [[first, *(tally.random.randrange(256) for _ in range(first % 9 + 1))] for first in range(1, _REQUESTS + 1)]


def params() -> dict[str, Any]:
    """Options that lead through every stage."""
    return {"max_tokens": _TOKENS, "ignore_eos": True, "stop": ["no such text"], "logprobs": 1, "presence_penalty": 0.5}


def _one(
    tally: Tally, loop: DrivenLoop, fault: Fault, many: list[list[int]], expected: list[Served], label: str
) -> None:
    """One error; those it struck fail, and the others never learn of it."""
    with installed(loop.engine, fault):
        for number, ids in enumerate(many):
            loop.submit(number, ids, **params())
        loop.run()
    tally.event(f"errors in {fault.stage}", len(fault.struck))
    failed = {number for number in range(len(many)) if _has_failed(loop, number)}
    struck = len(fault.struck[0]) if fault.struck else 0
    most = 1 if fault.stage in ALONE else _RUNNING
    tally.expect(0 < len(failed) <= most, f"{label}: {len(failed)} requests failed, {struck} were struck")
    if fault.marker is not None:
        own = next(number for number, ids in enumerate(many) if ids[0] == fault.marker)
        tally.expect(own in failed, f"{label}: requests {sorted(failed)} failed, not number {own}")
    for number, due in enumerate(expected):
        if number not in failed:
            _same(tally, loop.served.get((number, 0)), due, f"{label}, request {number}")


def _has_failed(loop: DrivenLoop, number: int) -> bool:
    refused, served = loop.refused.get(number), loop.served.get((number, 0))
    return (refused is not None and refused.kind == "fault") or (served is not None and served.finish_reason == "error")


def _same(tally: Tally, found: Served | None, due: Served, label: str) -> None:
    same = found is not None and (found.token_ids, found.text, found.finish_reason) == (
        due.token_ids,
        due.text,
        due.finish_reason,
    )
    tally.expect(same, f"{label}: gives {found}, not {due}")
    tally.event("answers that others' errors did not touch", same)


def _three(tally: Tally, model: Path, stage: str, many: list[list[int]], options: dict[str, Any]) -> None:
    """Three errors in a row: of one request each they end nobody else, of a step they end the engine."""
    engine = small_engine(model, max_running=_RUNNING, **options)
    loop, fault = DrivenLoop(engine), Fault(stage, times=3)
    ended = False
    with installed(engine, fault):
        for number, ids in enumerate(many):
            loop.submit(number, ids, **params())
        try:
            loop.run()
        except InjectedError:
            ended = True
    tally.event(f"errors in {stage}", len(fault.struck))
    tally.event("engines that ended", ended)
    tally.expect(ended is (stage not in ALONE), f"{stage}, {options}: the engine {'ended' if ended else 'went on'}")
    if not ended:
        failed = sum(_has_failed(loop, number) for number in range(len(many)))
        tally.expect(failed == 3, f"{stage}, {options}: {failed} requests failed at 3 errors")
    tally.expect(len(fault.struck) == (1 if stage in LEDGER else 3), f"{stage}: struck {len(fault.struck)} times")


async def _in_a_process(tally: Tally, model: Path) -> None:
    """The engine process ends; nobody waits for ever, and it says why."""
    fault = json.dumps({"stage": "forward", "after": 3, "times": 99})
    command = (sys.executable, "-m", "tests.suites.faulty_engine", fault)
    async with AsyncEngine(small_config(model, max_running=2), command=command) as engine:
        request = ValidatedRequest((1, 2, 3), SamplingParams(max_tokens=50, ignore_eos=True))
        answers = [engine.submit(request) for _ in range(_REQUESTS)]
        ends = await asyncio.wait_for(asyncio.gather(*map(_end_of, answers)), 30)
        failed = await asyncio.wait_for(engine.wait_dead(), 10)
        tally.expect("InjectedError" in failed.message, f"the process ended with {failed.message!r}")
        tally.expect(not engine.is_alive, "the engine calls itself alive")
    tally.expect(ends.count("error") + ends.count("dead") == _REQUESTS, f"the answers ended with {ends}")
    tally.expect(ends.count("error") >= 1 and ends.count("dead") >= 1, f"the answers ended with {ends}")
    tally.event("processes that ended")


async def _end_of(answer: Answer) -> str:
    ends: Sequence[str | None] = ()
    while not answer.finished:
        try:
            ends = [delta.finish_reason for delta in await answer.deltas()]
        except ServerError:
            return "dead"
    return str(ends[-1])
