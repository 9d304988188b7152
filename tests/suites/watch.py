"""The invariants of a server that runs, looked at from outside and from within its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
import psutil  # type: ignore[import-untyped]

from tests.suites.invariants import SLOWEST, Resources, metrics_faults, reply_faults
from tests.suites.raw_client import Reply, Told, ask, stream
from tests.suites.report import Tally
from tests.suites.served import PROBE, SCAN_AGAIN, Served, load, metric, metrics, until, until_true

# Threads that asyncio makes for large bodies when they come, and torch for large batches; they stay.
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
# Seconds until a process has looked at itself; the engine does when nothing runs, and wakes once a second.
_LOOK_SECONDS = 5.0
# I13: while anything waits or runs.
_STEP_SECONDS = 30.0


def judge(tally: Tally, label: str, reply: Reply | Told, *, injected: bool = False) -> None:
    """I8 and I9 of one reply; `injected` as of `reply_faults`."""
    for fault in reply_faults(reply, injected=injected):
        tally.fail(f"{label}: {fault}")


class Watch:
    """The invariants of a server, as of its warm-up.

    Args:
        key: what the server asks for.
        slots: whether its requests have slots, as all have but those with drafts from n-grams.

    Attributes:
        tally: learns of every fault.
        released: requests that were aborted while they held blocks, all of which were free within two steps.
        left_preempted: requests that were aborted while they waited for blocks that had been taken from them.
    """

    def __init__(self, tally: Tally, served: Served, key: str = "", *, slots: bool = True) -> None:
        self.tally = tally
        self.served = served
        self._key = key
        self._slots = slots
        self.released = self.left_preempted = 0
        self._probe = ""
        self._used = (0, 0)  # tokens of the probe's prompt and answer
        self._before = ""
        self._resources: dict[int, Resources] = {}
        self._processes = self._names = 0  # of shared memory
        self._held: dict[str, dict[str, int]] = {}

    async def begin(self, *, grammars: bool = True) -> None:
        """Notes what is to stay as it is, after some work that makes what is made once.

        Args:
            grammars: whether any will be compiled; to start the process that does takes three seconds of a processor.
        """
        port = self.served.port
        grammar = {"structured_outputs": {"choice": ["a", "b"]}} if grammars else {}
        warm = await asyncio.gather(*(stream(port, {**PROBE, "n": 2, **grammar}, key=self._key) for _ in range(16)))
        self._ask_for_looks("engine")
        found = await ask(port, "/v1/completions", PROBE, self._key)
        for told in warm:
            self.reply("the warm-up", told)
        self.reply("the warm-up", found)
        self._probe, self._used = found.text, _used(found.json["usage"])
        ids = (await ask(port, "/tokenize", {"prompt": PROBE["prompt"]}, self._key)).json["tokens"]
        counted = (len(ids), PROBE["max_tokens"])
        self.tally.expect(self._used == counted, f"I12: the usage is {self._used}, not {counted}")
        await self.idle(10.0)
        self._before = await metrics(port, self._key)
        self._processes, self._names = len(self.served.processes()), len(self.served.shared_names())
        held = {process.pid: Resources.of(process.pid) for process in self.served.lasting()}
        self._resources = {pid: replace(value, threads=value.threads + _POOL_THREADS) for pid, value in held.items()}
        self._ask_for_looks("front")
        slots = (await self._look("engine"))["slots"]  # what else the warm-up left does not count
        self.tally.expect(bool(slots) is self._slots, f"I4: there are {slots} slots to look at")
        self._held = await self._look("front")

    def reply(self, label: str, reply: Reply | Told) -> None:
        """I8 and I9 of one reply."""
        judge(self.tally, label, reply)

    async def idle(self, seconds: float = 2.0) -> bool:
        """Waits until nothing runs, nothing waits and no block is held (I1, I3)."""
        port = self.served.port

        async def rests() -> bool:
            return not any((await load(port, self._key)).values())

        return await until_true(rests, seconds)

    async def check(self, label: str) -> None:
        """I1 to I14; I8 and I9 of its own replies, as those of all others are for `reply`."""
        tally, served, port = self.tally, self.served, self.served.port
        tally.expect(await self.idle(), f"{label}: I1, I3: at rest the load is {await load(port, self._key)}")
        self._ask_for_looks("engine")  # which looks when it rests behind the probes that follow
        began = time.monotonic()
        found = await ask(port, "/v1/completions", PROBE, self._key)
        seconds = time.monotonic() - began
        sound = found.status == 200 and found.text == self._probe
        tally.expect(sound, f"{label}: I6: the probe gives {found.body!r:.200}, not {self._probe!r}")
        tally.expect(seconds < SLOWEST, f"{label}: I7: a normal request took {seconds:.1f} s")
        told = await stream(port, {**PROBE, "stream_options": {"include_usage": True}}, key=self._key)
        tally.expect(sound and told.text() == found.text, f"{label}: I11: streamed, the probe gives {told.text()!r}")
        for given in (found.json.get("usage") if sound else None, told.usage):
            tally.expect(_used(given) == self._used, f"{label}: I12: the usage is {given}, not {self._used}")
        for remote in self._strangers():
            tally.fail(f"{label}: I14: there is a connection to {remote}")
        ready = await ask(port, "/readyz")
        tally.expect(ready.status == 200, f"{label}: I7: ready is {ready.status}: {ready.body!r:.200}")
        for reply in (found, told, ready):
            self.reply(label, reply)
        await self.idle()
        tally.expect(await until_true(self._all_ended, 2.0), f"{label}: I3: not every request that came has ended")
        now = await metrics(port, self._key)
        tally.expect(metric(now, "kv_cache_usage_perc") == 0, f"{label}: I1: the cache is in use at rest")
        names = ("hookline:num_requests_running", "hookline:num_requests_waiting")
        for fault in metrics_faults(_stable(self._before), _stable(now), ledger=0, load=names):
            tally.fail(f"{label}: {fault}")
        self._before = now
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
        """What the processes see of themselves: I1 to I4, I13, I14 of the engine, I3, I5, I10, I14 of the front."""
        engine = await self._look("engine")
        self.released += engine["released"]
        self.left_preempted += engine["left_preempted"]
        for fault in engine["faults"]:
            self.tally.fail(f"{label}: {fault}")
        slowest = engine["slowest_step"]
        self.tally.expect(slowest <= _STEP_SECONDS, f"{label}: I13: a step took {slowest:.1f} s")
        self._ask_for_looks("front")
        for kind, held in (await self._look("front")).items():
            more = {name: count for name, count in held.items() if count > self._held[kind].get(name, 0)}
            what = f"{label}: I3, I5, I10, I14: {kind} were {self._held[kind]} and are more: {more}"
            self.tally.expect(not more, what)

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
            if len(names := self.served.shared_names()) > self._names:
                faults.append(f"I5: names of shared memory were {self._names} and are {sorted(names)}")
            for pid, before in self._resources.items():
                with suppress(psutil.NoSuchProcess):
                    faults.extend(before.faults(Resources.of(pid)))
            return not faults

        await until(rests, 3.0, SCAN_AGAIN)
        return faults


def _stable(text: str) -> str:
    """Metrics without those of HTTP itself, whose series come with the first call of their kind."""
    return "\n".join(line for line in text.splitlines() if "http_request" not in line) + "\n"


def _used(usage: Mapping[str, Any] | None) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    return (0, 0) if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
