"""A server for suites: `engine serve` of a tiny model as real processes, with a folder for all that it leaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from tests.suites.raw_client import ask
from tests.suites.rig import BLOCK, BLOCKS, MAX_MODEL_LEN, TOKEN_BYTES
from tests.suites.watched_front import LOOKS

START_SECONDS = 120.0
# By rule 4.2 of the plan (Q7): after the loss of a process.
UNREADY_SECONDS, ENDED_SECONDS = 5.0, 10.0
# To look at all processes takes a while.
_LOOK_AGAIN, SCAN_AGAIN = 0.02, 0.1
# Where shared memory has its names, and how those of torch, of Python and of OpenMP begin.
_SHARED = Path("/dev/shm")
_SHARED_NAMES = ("torch_", "psm_", "pym-", "sem.", "__KMP")
_READY = re.compile(r"^Serving on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_COMMAND = (sys.executable, "-m", "tests.suites.watched_front", "serve")
SMALL = (
    *("--device", "cpu", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--block-size", str(BLOCK), "--kv-cache-memory", str(BLOCKS * BLOCK * TOKEN_BYTES)),
    *("--max-batch-tokens", "64", "--max-running", "16", "--served-model-name", "tiny"),
)
PROBE: dict[str, Any] = {"prompt": "A probe, and", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@dataclass(slots=True)
class Served:
    """A server that runs, or has run.

    Attributes:
        process: the HTTP process; the engine process is its child.
        folder: its temporary files; also the mark by which its processes are found.
        looks: the folder where its processes put what they see of themselves.
        log: its stderr.
        before: names of shared memory that were there before it.
        port: 0 until it says that it serves.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    looks: Path
    log: Path
    before: frozenset[str]
    port: int = 0

    @property
    def said(self) -> str:
        """What is on its stderr."""
        return self.log.read_text(errors="replace")

    def find_port(self) -> int:
        """The port, if it has said that it serves."""
        found = _READY.search(self.said)
        self.port = int(found[1]) if found else self.port
        return self.port if found else 0

    def processes(self) -> list[psutil.Process]:
        """Those that it consists of, also when nobody is their parent any more."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("TMPDIR") == str(self.folder):
                    found.append(process)
        return found

    def engine(self) -> psutil.Process | None:
        """The engine process, if there is one."""
        for process in self.processes():
            with suppress(psutil.Error):
                if "tests.suites.watched_engine" in process.cmdline():
                    return process
        return None

    def lasting(self) -> list[psutil.Process]:
        """The HTTP process and the engine's: what compiles grammars is replaced when a grammar takes too long."""
        engine = self.engine()
        front = [process for process in self.processes() if process.pid == self.process.pid]
        return front if engine is None else [*front, engine]

    def shared_names(self) -> set[str]:
        """Names of shared memory that its processes hold, and new ones that nobody does: who made them has ended."""
        if not (new := _shared_names() - self.before):
            return new
        own = {process.pid for process in self.processes()}
        held = {pid: _held_names(pid) & new for pid in psutil.pids()}
        lost = new.difference(*held.values())
        found = {name for pid in own & held.keys() for name in held[pid]}
        # Others come and go meanwhile.
        return _shared_names() & (found | {name for name in lost if name.startswith(_SHARED_NAMES)})

    def signal(self, number: signal.Signals) -> None:
        """To the HTTP process."""
        self.process.send_signal(number)

    async def exit_code(self, seconds: float) -> int | None:
        """Waits for the end; None if it does not come in time."""
        await until(lambda: self.process.poll() is not None, seconds)
        return self.process.poll()

    async def left_faults(self, seconds: float = UNREADY_SECONDS) -> list[str]:
        """Processes, files and names of shared memory that are still there so long after its end."""

        def gone() -> bool:
            return not any(self.folder.iterdir()) and not self.processes() and not self.shared_names()

        await until(gone, seconds, SCAN_AGAIN)
        orphans = [" ".join(process.cmdline()[-3:]) for process in self.processes()]
        files = sorted(path.name for path in self.folder.iterdir())
        left = {"processes": orphans, "files": files, "names of shared memory": sorted(self.shared_names())}
        return [f"these {what} are left: {found}" for what, found in left.items() if found]

    def end(self) -> None:
        """Ends all of it, whatever it does."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


def _shared_names() -> set[str]:
    return {path.name for path in _SHARED.iterdir()}


def _held_names(pid: int) -> set[str]:
    """Names of shared memory that a process has mapped or opened, if it is still there."""
    places, folder = list[str](), Path("/proc") / str(pid)
    with suppress(OSError):
        places += (line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines())
        for handle in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                places.append(str(handle.readlink()))
    return {place.removeprefix(f"{_SHARED}/") for place in places if place.startswith(f"{_SHARED}/")}


async def until(holds: Callable[[], bool], seconds: float, look_again: float = _LOOK_AGAIN) -> bool:
    """Waits until something holds, which tells nobody; false if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(look_again)
    return True


async def until_true(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """`until`, for what has to be asked."""
    deadline = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_LOOK_AGAIN)
    return True


@asynccontextmanager
async def launched(
    model: str | Path,
    *options: str,
    port: int = 0,
    temporary: str = "tmp",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Served]:
    """A server that has been started and may not be ready. Nothing of it is left afterwards.

    Args:
        temporary: name of the folder for its temporary files.
        environment: what it finds there beside our own.
    """
    before = frozenset(_shared_names())
    with tempfile.TemporaryDirectory(prefix="suite-") as parent:
        folder, looks = Path(parent) / temporary, Path(parent) / "looks"
        folder.mkdir()
        looks.mkdir()
        own = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOOKLINE_OFFLINE": "1"}
        own[LOOKS] = str(looks)
        with (Path(parent) / "stderr").open("wb") as log:
            process = subprocess.Popen(
                [*_COMMAND, str(model), "--port", str(port), *SMALL, *options],
                env=os.environ | own | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        served = Served(process, folder, looks, Path(log.name), before, port)
        try:
            yield served
        finally:
            served.end()


@asynccontextmanager
async def serving(
    model: str | Path, *options: str, port: int = 0, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Served]:
    """A server that is ready.

    Raises:
        RuntimeError: if it does not become so.
    """
    async with launched(model, *options, port=port, environment=environment) as served:
        await until(lambda: bool(served.find_port()) or served.process.poll() is not None, START_SECONDS)
        if not served.find_port():
            raise RuntimeError(f"the server does not start: {served.said}")
        yield served


async def load(port: int, key: str = "") -> dict[str, int]:
    """What the engine has to do."""
    found: dict[str, int] = (await ask(port, "/load", key=key)).json
    return found


async def metrics(port: int, key: str = "") -> str:
    """In Prometheus' text format."""
    return (await ask(port, "/metrics", key=key)).body.decode()


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels.

    Raises:
        KeyError: if there is none.
    """
    own = [line for line in text.splitlines() if line.startswith(f"hookline:{name}")]  # to read all takes long
    families = text_string_to_metric_families("".join(f"{line}\n" for line in own))
    samples = [sample for family in families for sample in family.samples]
    found = [x.value for x in samples if x.name == f"hookline:{name}" and labels.items() <= x.labels.items()]
    if not found:
        raise KeyError(name)
    return sum(found)
