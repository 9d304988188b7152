"""The states of a server, and what its probes say of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI

from hookline.scheduling.output import Load
from hookline.serving import probes
from hookline.serving.lifecycle import FRESH_SECONDS, Lifecycle
from tests.serving.wire import serving

PATHS = ("/health", "/readyz", "/livez", "/ping", "/startup")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def life(clock: Clock) -> Lifecycle:
    return Lifecycle(clock)


def ready(life: Lifecycle) -> bool:
    return life.is_ready


def start(life: Lifecycle, clock: Clock) -> None:
    for name, seconds in (("importing", 2.0), ("loading", 10.0), ("starting", 0.5)):
        life.stage(name)
        clock.now += seconds
    life.ready()


def test_stages_are_timed(life: Lifecycle, clock: Clock) -> None:
    assert not ready(life)
    assert life.to_dict() == {"status": "starting"}
    life.stage("importing")
    clock.now += 2
    life.stage("loading", 0, 8)
    clock.now += 1
    life.stage("loading", 2, 8)
    shown = life.to_dict()
    assert shown["stage"] == "loading"
    assert shown["progress"] == 0.25
    assert shown["stages"] == {"importing": 2.0, "loading": 1.0}
    clock.now += 5
    life.ready()
    clock.now += 1
    assert ready(life)
    assert life.to_dict() == {"status": "ready", "stage": "ready", "stages": {"importing": 2.0, "loading": 6.0}}


def test_readiness_falls_with_the_engines_silence_and_comes_again(life: Lifecycle, clock: Clock) -> None:
    start(life, clock)
    clock.now += FRESH_SECONDS - 0.1
    assert ready(life)
    clock.now += 0.2
    assert not ready(life)
    assert life.to_dict()["status"] == "stalled"
    assert life.silent_seconds == pytest.approx(FRESH_SECONDS + 0.1)
    life.heard()
    assert ready(life)


def test_a_stage_that_comes_again_adds_up(life: Lifecycle, clock: Clock) -> None:
    for name in ("loading", "starting", "loading"):
        life.stage(name)
        clock.now += 3
    life.ready()
    assert life.stage_seconds == {"loading": 6.0, "starting": 3.0}


def test_draining_and_death_are_final(life: Lifecycle, clock: Clock) -> None:
    start(life, clock)
    life.drain()
    life.heard()
    assert life.to_dict()["status"] == "draining" and life.draining and not ready(life)
    life.die("the process ended with signal 9")
    life.die("another cause")
    assert life.to_dict()["status"] == "dead" and life.cause == "the process ended with signal 9"
    assert "signal" not in str(life.to_dict())


def test_probes_tell_the_state(life: Lifecycle, clock: Clock) -> None:
    app = FastAPI()
    app.include_router(probes.make_router(life, lambda: Load(running=3, waiting=4)))

    async def run() -> None:
        async with serving(app) as wire:

            async def statuses() -> tuple[int, ...]:
                return tuple([(await wire.get(path)).status for path in PATHS])

            async def shown(path: str = "/startup") -> Any:
                return (await wire.get(path)).json

            life.stage("loading", 1, 2)
            assert await statuses() == (503, 503, 200, 200, 503)
            assert (await shown("/health"))["stage"] == "loading" and (await shown())["progress"] == 0.5
            assert (await wire.get("/health")).headers["retry-after"]
            life.ready()
            assert await statuses() == (200,) * 5
            assert (await wire.get("/health", method="HEAD")).body == b""
            clock.now += FRESH_SECONDS + 1
            assert await statuses() == (503, 503, 200, 200, 200)
            life.heard()
            life.drain()
            assert await statuses() == (503, 503, 200, 200, 200)
            assert (await shown("/health"))["status"] == "draining"
            life.die("killed")
            assert await statuses() == (503, 503, 200, 200, 503)
            assert await shown("/load") == {"server_load": 7, "running": 3, "waiting": 4, "used_blocks": 0}

    asyncio.run(run())
