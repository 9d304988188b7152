"""`engine serve`, whose processes look at themselves when they are asked: `python -m tests.suites.watched_front serve`.

SIGUSR1 asks the front for what it holds: tasks of its event loop and objects of requests (I3, I5); `watched_engine`
answers for the engine.
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
# Classes whose objects each stand for a request.
_OF_REQUESTS = ("Answer", "ValidatedRequest", "ValidatedCall")


def tell(name: str, seen: dict[str, Any]) -> None:
    """Puts an answer where it is looked for, whole or not at all."""
    folder = Path(os.environ[LOOKS])
    draft = folder / f"{name}.new"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"{name}.json")


def _look(*_: object) -> None:
    gc.collect()
    kinds = Counter(type(item).__name__ for item in gc.get_objects())
    tasks = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    tell("front", {"tasks": tasks, "objects": {name: kinds[name] for name in _OF_REQUESTS}})


if __name__ == "__main__":
    from hookline.cli.main import main
    from hookline.serving import server
    from hookline.serving.process.async_engine import AsyncEngine

    command = (sys.executable, "-m", "tests.suites.watched_engine")
    server.AsyncEngine = partial(AsyncEngine, command=command)  # type: ignore[assignment, attr-defined, misc]
    signal.signal(signal.SIGUSR1, _look)
    main()
