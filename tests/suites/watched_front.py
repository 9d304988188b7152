"""`engine serve`, whose processes look at themselves when they are asked: `python -m tests.suites.watched_front serve`.

SIGUSR1 asks the front for what it holds: tasks of its event loop and objects of requests (I3, I5), places of answers
that are taken (I10), and what it did outside its folder (I14). `watched_engine` answers for the engine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

# The folder where answers are put, of the environment.
LOOKS = "SUITE_LOOKS"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Outside:
    """What this process does beyond its temporary folder and this machine (I14).

    Attributes:
        deeds: files that it opened to write, and addresses that it connected to or looked up.
    """

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self._own = tuple(str(Path(os.environ[name]).resolve()) for name in ("TMPDIR", LOOKS) if name in os.environ)
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & _WRITES:
            path = str(Path(os.fsdecode(arguments[0])).resolve())
            if not path.startswith((*self._own, "/dev/", "/proc/self/")) and "__pycache__" not in path:
                self.deeds.append(f"wrote {path}")
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            if arguments[1][0] not in ("127.0.0.1", "::1"):
                self.deeds.append(f"connected to {arguments[1]}")
        elif event == "socket.getaddrinfo" and arguments[0] not in (None, "127.0.0.1", "::1", "localhost"):
            self.deeds.append(f"looked up {arguments[0]}")


def tell(name: str, seen: dict[str, Any]) -> None:
    """Puts an answer where it is looked for, whole or not at all."""
    folder = Path(os.environ[LOOKS])
    draft = folder / f"{name}.new"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"{name}.json")


def _look(outside: Outside) -> None:
    from hookline.serving.process.answer import Answer
    from hookline.serving.replies.calls import CallClock, Calls, RunningCall
    from hookline.serving.requests.validated import ValidatedCall, ValidatedRequest

    gc.collect()
    living = gc.get_objects()
    kinds = Counter(type(item) for item in living)
    of_requests = (Answer, CallClock, RunningCall, ValidatedCall, ValidatedRequest)
    tasks = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    [calls] = [item for item in living if type(item) is Calls]
    tell(
        "front",
        {
            "tasks": tasks,
            "objects": {kind.__name__: kinds[kind] for kind in of_requests},
            "places": {"in the engine": calls._open, "unread": calls._unread_answers},
            "outside": Counter(outside.deeds),
        },
    )


if __name__ == "__main__":
    seen = Outside()

    from hookline.cli.main import main
    from hookline.serving import server
    from hookline.serving.process.async_engine import AsyncEngine

    command = (sys.executable, "-m", "tests.suites.watched_engine")
    server.AsyncEngine = partial(AsyncEngine, command=command)  # type: ignore[assignment, attr-defined]
    signal.signal(signal.SIGUSR1, lambda *_: _look(seen))
    main()
