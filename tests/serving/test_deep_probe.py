"""`/health/deep`: one token through the engine, seldom and for one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from hookline.errors import ServerError
from hookline.scheduling.output import OutputDelta
from hookline.serving.api_errors import ApiError
from hookline.serving.app import make_app
from hookline.serving.deep_probe import DeepProbe
from hookline.serving.requests.validated import ValidatedRequest
from tests.serving.fakes import FakeEngine, Rig, delta

PATH = "/health/deep"


def one_token(request: ValidatedRequest) -> list[OutputDelta]:
    assert request.params.max_tokens == 1 and len(request.token_ids) == 1
    return [delta("a", "length")]


def probe_of(engine: Any, **seconds: float) -> DeepProbe:
    return DeepProbe(engine, **seconds)


def test_a_token_is_asked_for_and_timed() -> None:
    rig = Rig(script=one_token)
    reply = asyncio.run(rig.get(PATH))
    assert reply.status == 200 and reply.headers["cache-control"] == "no-store"
    assert reply.json["status"] == "ok" and 0 <= reply.json["seconds"] < 5 and 0 <= reply.json["age_seconds"] < 5
    assert len(rig.engine.answers) == 1
    assert rig.metrics.arrived == 0  # no request of a client


def test_it_wants_a_key() -> None:
    rig = Rig(script=one_token)
    rig.front.config = dataclasses.replace(rig.config, api_keys=("a-key-of-the-test",))
    rig.app = make_app(rig.front)
    assert asyncio.run(rig.get(PATH)).status == 401
    assert rig.engine.answers == []
    assert asyncio.run(rig.get(PATH, headers=[("authorization", "Bearer a-key-of-the-test")])).status == 200


def test_many_who_ask_at_once_cost_one_token_and_the_next_come_too_early() -> None:
    async def run() -> None:
        engine = FakeEngine()
        probe = probe_of(engine, pause_seconds=60.0)
        asking = [asyncio.create_task(probe.ask()) for _ in range(20)]
        (await engine.answer()).feed(delta("a", "length"))
        outcomes = await asyncio.gather(*asking)
        assert len({outcome["seconds"] for outcome in outcomes}) == 1
        later = await probe.ask()
        assert later["seconds"] == outcomes[0]["seconds"] and later["age_seconds"] >= outcomes[0]["age_seconds"]
        assert len(engine.answers) == 1

    asyncio.run(run())


def test_after_the_pause_it_asks_again() -> None:
    async def run() -> None:
        engine = FakeEngine(one_token)
        probe = probe_of(engine, pause_seconds=0.0)
        for count in (1, 2, 3):
            await probe.ask()
            assert len(engine.answers) == count

    asyncio.run(run())


def test_who_asks_may_leave_and_the_others_learn_it_all_the_same() -> None:
    async def run() -> None:
        engine = FakeEngine()
        probe = probe_of(engine)
        first, second = asyncio.create_task(probe.ask()), asyncio.create_task(probe.ask())
        answer = await engine.answer()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        answer.feed(delta("a", "length"))
        assert (await second)["status"] == "ok"

    asyncio.run(run())


def test_a_token_that_does_not_come_is_a_503_and_is_given_up() -> None:
    async def run() -> None:
        engine = FakeEngine()
        probe = probe_of(engine, most_seconds=0.05, pause_seconds=60.0)
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await probe.ask()
            assert (error.value.status, error.value.code, error.value.retry_after) == (503, "no_token", 2)
        assert len(engine.answers) == 1 and engine.answers[0].aborted.is_set()

    asyncio.run(run())


def test_a_fault_of_ours_is_not_kept() -> None:
    def broken(request: ValidatedRequest) -> list[OutputDelta]:
        raise RuntimeError("boom")

    async def run() -> None:
        engine = FakeEngine(broken)
        probe = probe_of(engine, pause_seconds=0.0)
        with pytest.raises(ApiError, match="failed"):
            await probe.ask()
        engine.script = one_token
        assert (await probe.ask())["status"] == "ok"

    asyncio.run(run())


def test_an_engine_that_fails_is_a_503_without_details() -> None:
    def fault(request: ValidatedRequest) -> list[OutputDelta]:
        last = delta("", "error", token_ids=[])
        last.error = "NaN at /some/place"
        return [last]

    def late_fault(request: ValidatedRequest) -> list[OutputDelta]:
        return [delta("a", "error", error="NaN at /some/place")]

    for script in (fault, late_fault):
        reply = asyncio.run(Rig(script=script).get(PATH))
        assert (reply.status, reply.error["code"]) == (503, "no_token") and b"place" not in reply.body

    async def run() -> None:
        engine = FakeEngine()
        asking = asyncio.create_task(probe_of(engine).ask())
        (await engine.answer()).fail(ServerError("dead"))
        with pytest.raises(ApiError, match="failed"):
            await asking

    asyncio.run(run())


@pytest.mark.parametrize(("change", "code"), [("drain", "shutting_down"), ("die", "engine_dead"), ("load", "loading")])
def test_a_server_that_does_not_serve_is_not_asked(change: str, code: str) -> None:
    rig = Rig(script=one_token)
    if change == "drain":
        rig.lifecycle.drain()
    elif change == "die":
        rig.engine.is_alive = False
    else:
        rig.front.served = None
    reply = asyncio.run(rig.get(PATH))
    assert (reply.status, reply.error["code"]) == (503, code) and reply.headers["retry-after"]
    assert rig.engine.answers == []
