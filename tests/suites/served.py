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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.suites.invariants import Resources, leak_faults, metrics_faults, status_faults
from tests.suites.raw_client import Reply, Told, ask, stream
from tests.suites.report import Tally
from tests.suites.rig import BLOCK, BLOCKS, MAX_MODEL_LEN, TOKEN_BYTES
from tests.suites.watched_front import LOOKS

START_SECONDS = 120.0
# By rule 4.2 of the plan (Q7): after the loss of a process.
UNREADY_SECONDS, ENDED_SECONDS = 5.0, 10.0
# To look at all processes takes a while.
_LOOK_AGAIN, _SCAN_AGAIN = 0.02, 0.1
# Threads that asyncio makes for large bodies when they come, and keeps.
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
_READY = re.compile(r"^Serving on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_COMMAND = (sys.executable, "-m", "tests.suites.watched_front", "serve")
# Seconds until a process has looked at itself; the engine does when nothing runs, and wakes once a second.
_LOOK_SECONDS = 5.0
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
        port: 0 until it says that it serves.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    looks: Path
    log: Path
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

    def signal(self, number: signal.Signals) -> None:
        """To the HTTP process."""
        self.process.send_signal(number)

    async def exit_code(self, seconds: float) -> int | None:
        """Waits for the end; None if it does not come in time."""
        await until(lambda: self.process.poll() is not None, seconds)
        return self.process.poll()

    async def left_faults(self, seconds: float = UNREADY_SECONDS) -> list[str]:
        """Processes and files that are still there so long after its end."""
        await until(lambda: not any(self.folder.iterdir()) and not self.processes(), seconds, _SCAN_AGAIN)
        orphans = [" ".join(process.cmdline()[-3:]) for process in self.processes()]
        files = sorted(path.name for path in self.folder.iterdir())
        faults = [f"these processes are left: {orphans}"] if orphans else []
        return [*faults, f"these files are left: {files}"] if files else faults

    def end(self) -> None:
        """Ends all of it, whatever it does."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


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
        served = Served(process, folder, looks, Path(log.name), port)
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


class Watch:
    """The invariants of a server, as of its warm-up.

    Args:
        key: what the server asks for.

    Attributes:
        tally: learns of every fault.
        released: requests that were aborted while they held blocks, all of which were free two steps later.
    """

    def __init__(self, tally: Tally, served: Served, key: str = "") -> None:
        self.tally = tally
        self.served = served
        self._key = key
        self.released = 0
        self._probe = ""
        self._used = (0, 0)  # tokens of the probe's prompt and answer
        self._before = ""
        self._resources: dict[int, Resources] = {}
        self._processes = 0
        self._held: dict[str, dict[str, int]] = {}

    async def begin(self) -> None:
        """Notes what is to stay as it is, after some work that makes what is made once."""
        port = self.served.port
        grammar = {"structured_outputs": {"choice": ["a", "b"]}}
        await asyncio.gather(*(stream(port, {**PROBE, "n": 2, **grammar}, key=self._key) for _ in range(16)))
        found = await ask(port, "/v1/completions", PROBE, self._key)
        self._probe, self._used = found.text, _used(found.json["usage"])
        self.tally.expect(self._used[1] == PROBE["max_tokens"], f"I12: the probe made {self._used} tokens")
        await self.idle(10.0)
        self._before = await metrics(port, self._key)
        self._processes = len(self.served.processes())
        held = {process.pid: Resources.of(process.pid) for process in self.served.lasting()}
        self._resources = {pid: replace(value, threads=value.threads + _POOL_THREADS) for pid, value in held.items()}
        self._ask_for_looks("front", "engine")
        await self._look("engine")  # what the warm-up left does not count
        self._held = await self._look("front")

    def reply(self, label: str, reply: Reply | Told) -> None:
        """I8 and I9 of one reply."""
        body = reply.body.decode("utf-8", "replace") if isinstance(reply, Reply) else str(reply.error or "")
        for fault in [*leak_faults(body, reply.headers), *status_faults(reply.status, reply.headers)]:
            self.tally.fail(f"{label}: {fault}: {body[:200]}")

    async def idle(self, seconds: float = 2.0) -> bool:
        """Waits until nothing runs, nothing waits and no block is held (I1, I3)."""
        port = self.served.port

        async def rests() -> bool:
            return not any((await load(port, self._key)).values())

        return await until_true(rests, seconds)

    async def check(self, label: str) -> None:
        """I1 to I7 and I10 to I14; I8 and I9 are those of each reply."""
        tally, served, port = self.tally, self.served, self.served.port
        tally.expect(await self.idle(), f"{label}: I1, I3: at rest the load is {await load(port, self._key)}")
        self._ask_for_looks("engine")  # which looks when it rests behind the probes that follow
        began = time.monotonic()
        found = await ask(port, "/v1/completions", PROBE, self._key)
        seconds = time.monotonic() - began
        sound = found.status == 200 and found.text == self._probe
        tally.expect(sound, f"{label}: I6: the probe gives {found.body!r:.200}, not {self._probe!r}")
        tally.expect(seconds < 2.0, f"{label}: I7: a normal request took {seconds:.1f} s")
        told = await stream(port, {**PROBE, "stream_options": {"include_usage": True}}, key=self._key)
        tally.expect(sound and told.text() == found.text, f"{label}: I11: streamed, the probe gives {told.text()!r}")
        for given in (found.json.get("usage") if sound else None, told.usage):
            tally.expect(_used(given) == self._used, f"{label}: I12: the usage is {given}, not {self._used}")
        for remote in self._strangers():
            tally.fail(f"{label}: I14: there is a connection to {remote}")
        ready = await ask(port, "/readyz")
        tally.expect(ready.status == 200, f"{label}: I7: ready is {ready.status}: {ready.body!r:.200}")
        await self.idle()
        tally.expect(await until_true(self._all_ended, 2.0), f"{label}: I3: not every request that came has ended")
        now = await metrics(port, self._key)
        tally.expect(metric(now, "kv_cache_usage_perc") == 0, f"{label}: I1: the cache is in use at rest")
        names = ("hookline:num_requests_running", "hookline:num_requests_waiting")
        for fault in metrics_faults(_stable(self._before), _stable(now), ledger=0, load=names):
            tally.fail(f"{label}: {fault}")
        tally.expect(served.process.poll() is None, f"{label}: the HTTP process has ended")
        lasting = {process.pid for process in served.lasting()}
        tally.expect(lasting == self._resources.keys(), f"{label}: a process was replaced: {lasting}")
        for fault in await self._resource_faults():
            tally.fail(f"{label}: {fault}")
        files = sorted(path.name for path in served.folder.iterdir() if not path.name.startswith("hookline-"))
        tally.expect(not files, f"{label}: I14: there are files {files}")
        tally.expect("Traceback" not in served.said, f"{label}: the log has a traceback: {served.said[-400:]}")
        await self._check_inside(label)

    async def _all_ended(self) -> bool:
        now = await metrics(self.served.port, self._key)
        return metric(now, "request_received_total") == metric(now, "request_success_total")

    def _ask_for_looks(self, *names: str) -> None:
        """Has processes look at themselves."""
        for name, process in zip(("front", "engine"), self.served.lasting(), strict=False):
            if name in names:
                (self.served.looks / f"{name}.json").unlink(missing_ok=True)
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)

    async def _look(self, name: str) -> dict[str, Any]:
        """What a process has seen of itself.

        Raises:
            RuntimeError: if it has not looked.
        """
        path = self.served.looks / f"{name}.json"
        if not await until(path.exists, _LOOK_SECONDS):
            raise RuntimeError(f"the {name} process has not looked at itself")
        found: dict[str, Any] = orjson.loads(path.read_bytes())
        return found

    async def _check_inside(self, label: str) -> None:
        """What the processes see of themselves: I1 to I4 and I13 of the engine, I3 and I5 of the front."""
        engine = await self._look("engine")
        self.released += engine["released"]
        for fault in engine["faults"]:
            self.tally.fail(f"{label}: {fault}")
        self._ask_for_looks("front")
        for kind, held in (await self._look("front")).items():
            more = {name: count for name, count in held.items() if count > self._held[kind].get(name, 0)}
            self.tally.expect(not more, f"{label}: I3, I5: {kind} were {self._held[kind]} and are more: {more}")

    def _strangers(self) -> list[str]:
        """Where processes of the server are connected to, beyond this machine."""
        found = list[str]()
        for process in self.served.processes():
            with suppress(psutil.Error):  # it may have ended
                remotes = [connection.raddr for connection in process.net_connections("inet") if connection.raddr]
                found += [str(remote) for remote in remotes if remote.ip not in ("127.0.0.1", "::1")]
        return found

    async def _resource_faults(self) -> list[str]:
        """I5; a connection that has just been closed may still be on its way out."""
        faults: list[str] = []

        def rests() -> bool:
            faults.clear()
            if (count := len(self.served.processes())) > self._processes:
                faults.append(f"I5: processes were {self._processes} and are {count}")
            for pid, before in self._resources.items():
                with suppress(psutil.NoSuchProcess):
                    faults.extend(before.faults(Resources.of(pid)))
            return not faults

        await until(rests, 3.0, _SCAN_AGAIN)
        return faults


def _stable(text: str) -> str:
    """Metrics without those of HTTP itself, whose series come with the first call of their kind."""
    return "\n".join(line for line in text.splitlines() if "http_request" not in line) + "\n"


def _used(usage: Mapping[str, Any] | None) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    return (0, 0) if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
