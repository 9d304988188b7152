"""An engine process that looks at itself when it is asked: what of I1 to I4 and I13 shows from within alone.

SIGUSR1 asks, and the answer is there when nothing runs any more after another step, in a file of the folder that the
environment names.
Steps are scheduled ahead, as on a GPU: so requests have slots, and blocks are held until the steps in flight are over.
Drafts from n-grams are the exception. What free slots hold is poisoned at rest, and must be so when it rests again.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hookline.serving.process import engine_process, messages
from tests.suites.watched_front import Outside, tell

if TYPE_CHECKING:  # what takes long to import comes when the engine's own has come
    from hookline import Engine
    from hookline.scheduling.request import Request

# Steps between the arrival of an abort and the release of its blocks.
_RELEASE_STEPS = 2
# Requests whose objects an engine keeps until its next step: those of the last ones.
_KEPT = 2


class WatchedChannel(engine_process.Channel):
    """The engine's end of the sockets, which changes the configuration on its way."""

    def receive(self, seconds: float) -> Iterator[messages.ToEngine]:
        for message in super().receive(seconds):
            if isinstance(message, messages.Start):
                message = messages.Start(dataclasses.replace(message.config, overlap=True))
            yield message


class WatchedLoop(engine_process.EngineLoop):
    """The loop, with an eye on it."""

    def __init__(self, engine: Engine, channel: engine_process.Channel) -> None:
        from tests.suites.invariants import Census, Poison

        super().__init__(engine, channel)
        self._census = Census()
        self._poison = Poison(engine)
        self._outside: Outside | None = None
        self._asked: int | None = None
        self._leaving: list[tuple[Request, int]] = []
        self._left_preempted = 0
        self._released = self._slowest_release = 0
        self._slowest_step = 0.0

    def run(self) -> None:
        self._outside = Outside()
        signal.signal(signal.SIGUSR1, self.ask)
        super().run()

    def ask(self, *_: object) -> None:
        """Has it look at itself when it rests after another step: until then it keeps what the last ones were of."""
        self._asked = self._steps

    def turn(self) -> None:
        super().turn()
        asked = self._asked is not None and self._steps > self._asked
        if asked and not self._engine.has_work and not self._held:
            self._asked = None
            tell("engine", self.seen())

    def _take(self, command: messages.ToEngine) -> None:
        request_id = self._ids.get(command.number) if isinstance(command, messages.Abort) else None
        known = [] if request_id is None else self._engine._outputs.unfinished(request_id)
        left = [request for request in known if request.block_table]
        self._left_preempted += sum(bool(request.preemptions) and not request.block_table for request in known)
        super()._take(command)
        self._leaving += [(request, self._steps) for request in left]
        self._follow()

    def _step(self) -> Any:
        began = time.monotonic()
        news = super()._step()
        self._slowest_step = max(self._slowest_step, time.monotonic() - began)
        self._follow()
        return news

    def _follow(self) -> None:
        """Looks who of those that were aborted holds no blocks any more."""
        gone = [steps for request, steps in self._leaving if not request.block_table]
        if gone:
            self._released += len(gone)
            self._slowest_release = max(self._slowest_release, self._steps - min(gone))
            self._leaving = [(request, steps) for request, steps in self._leaving if request.block_table]

    def seen(self) -> dict[str, Any]:
        """What is wrong at rest, and the seconds of the slowest step since the last look."""
        from tests.suites.invariants import engine_faults

        faults = engine_faults(self._engine) + self._census.faults(_KEPT) + self._poison.faults()
        if self._outside is not None:
            faults += [f"I14: the engine {deed}" for deed in self._outside.deeds]
        if self._ids or self._numbers:
            faults.append(f"I3: the loop still knows {len(self._ids)} requests")
        if self._leaving:
            faults.append(f"I1: {len(self._leaving)} aborted requests hold blocks")
        if self._slowest_release > _RELEASE_STEPS:
            faults.append(f"blocks of an aborted request came back after {self._slowest_release} steps")
        self._poison.put()
        counts = {"slots": self._poison.slots, "released": self._released, "left_preempted": self._left_preempted}
        seen = {"faults": faults, "slowest_step": self._slowest_step, **counts}
        self._released = self._slowest_release = self._left_preempted = 0
        self._slowest_step = 0.0
        return seen


if __name__ == "__main__":
    engine_process.EngineLoop = WatchedLoop  # type: ignore[misc]
    engine_process.Channel = WatchedChannel  # type: ignore[misc]
    sys.exit(engine_process.main(sys.argv[1], int(sys.argv[2])))
