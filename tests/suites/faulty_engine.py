"""An engine process with a fault in it: `AsyncEngine(command=(sys.executable, "-m", THIS_MODULE, FAULT))`.

FAULT is JSON, the fields of `faults.Fault`. It strikes requests of clients alone, not the warm-up.
"""

from __future__ import annotations

import json
import sys

from hookline import Engine
from hookline.serving.process import engine_process
from tests.suites.faults import Fault, installed


def main(fault: Fault, path: str, parent: int) -> int:
    """As the engine process's own, with the fault in its loop."""
    run = engine_process.EngineLoop.run

    def faulty(self: engine_process.EngineLoop) -> None:
        engine: Engine = self._engine
        with installed(engine, fault):
            run(self)

    engine_process.EngineLoop.run = faulty  # type: ignore[method-assign]
    return engine_process.main(path, parent)


if __name__ == "__main__":
    sys.exit(main(Fault(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
