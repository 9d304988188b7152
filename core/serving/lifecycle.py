"""The life of a server as clients and the terminal see it: stages of the start, ready, draining, dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["starting", "ready", "draining", "dead"]

# A ready engine gives a sign of life several times a second; after so many seconds without one nobody is sent here.
FRESH_SECONDS = 5.0


@dataclass(slots=True)
class _Stage:
    """A stage of the start.

    Attributes:
        begun, ended: by the clock; `ended` is None while it goes on.
        done, total: how far it is, in units of its own; total 0 where that is not known.
    """

    name: str
    begun: float
    ended: float | None = None
    done: int = 0
    total: int = 0


class Lifecycle:
    """What state a server is in. It knows no clock, engine or socket of its own: it is told.

    Args:
        clock: monotonic, in seconds.

    Attributes:
        draining: whether it takes no new requests because it ends.
        cause: why it is dead; "" while it is not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stages: list[_Stage] = []
        self._ready_at: float | None = None
        self._heard = clock()
        self.draining = False
        self.cause = ""

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """The start is at this stage, which may be a new one."""
        if not self._stages or self._stages[-1].name != name:
            self._end_stage()
            self._stages.append(_Stage(name, self._clock()))
        self._stages[-1].done, self._stages[-1].total = done, total

    def ready(self) -> None:
        """The start is done."""
        self._end_stage()
        self._ready_at = self._heard = self._clock()

    def heard(self) -> None:
        """The engine has given a sign of life."""
        self._heard = self._clock()

    def drain(self) -> None:
        """No new requests from here on."""
        self.draining = True

    def die(self, cause: str) -> None:
        """The engine is gone; the first cause is kept."""
        self.cause = self.cause or cause

    @property
    def state(self) -> State:
        """Dead before draining, draining before all else."""
        if self.cause:
            return "dead"
        if self.draining:
            return "draining"
        return "starting" if self._ready_at is None else "ready"

    @property
    def silent_seconds(self) -> float:
        """How long ago the engine last gave a sign of life."""
        return self._clock() - self._heard

    @property
    def is_ready(self) -> bool:
        """Whether new requests are to be sent here."""
        return self.state == "ready" and self.silent_seconds < FRESH_SECONDS

    @property
    def stage_seconds(self) -> dict[str, float]:
        """The stages of the start so far to the seconds that each took, the one that goes on included."""
        now = self._clock()
        seconds: dict[str, float] = {}
        for stage in self._stages:
            end = now if stage.ended is None else stage.ended
            seconds[stage.name] = seconds.get(stage.name, 0.0) + end - stage.begun
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """As the probes show it; names of ours and numbers alone."""
        shown: dict[str, Any] = {"status": self.state}
        if shown["status"] == "ready" and not self.is_ready:
            shown["status"] = "stalled"
        if self._stages:
            last = self._stages[-1]
            shown["stage"] = "ready" if self._ready_at is not None else last.name
            if self._ready_at is None and last.total:
                shown["progress"] = round(min(last.done / last.total, 1.0), 4)
            shown["stages"] = {name: round(seconds, 3) for name, seconds in self.stage_seconds.items()}
        return shown

    def _end_stage(self) -> None:
        if self._stages and self._stages[-1].ended is None:
            self._stages[-1].ended = self._clock()
