"""An `engine` process that can be interrupted, wherever the tests run, and that never outlives its test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 120
# A parent in the background hands down an ignored SIGINT; this process must hear it.
CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from hookline.cli.main import main; main()"
)


@contextmanager
def running_engine(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`engine` with these arguments and its outputs as pipes; killed at the end, and after two minutes in any case."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options}
    with subprocess.Popen([sys.executable, "-c", CODE, *arguments], **pipes) as process:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()
