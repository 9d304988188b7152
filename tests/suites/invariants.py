"""What must hold after every suite, whatever it did. Each function gives the faults that it finds, as texts.

For an engine in this process: `idle_faults` (I1 to I4), `Probe` (I6), and I13, which `DrivenLoop.run` watches.
For a server: `engine_faults` and `Census` in its engine process (I1 to I4), `Resources` (I5), `reply_faults` of
`leak_faults` (I8) and `status_faults` (I9), `metrics_faults` (I10).
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import torch
from prometheus_client.parser import text_string_to_metric_families

from hookline import Engine
from hookline.execution.device_runner import DeviceRunner
from hookline.execution.sampling_state import SamplingState
from hookline.scheduling.request import Request
from tests.suites.raw_client import Reply, Told

if TYPE_CHECKING:  # an engine process that is watched needs none of a rig
    from tests.suites.rig import DrivenLoop

# What shows that a text was made for us and not for a client. Paths have two parts at least; JSON escapes quotes.
_LEAKS = re.compile(
    r"Traceback|File \\?\"|0x[0-9a-f]{6,}|(?<![\w.:/~])/(?:[\w.-]+/)+[\w.-]+\.(?:py|so|json|safetensors)"
)
# Seconds of a normal request, at most (I7).
SLOWEST = 2.0


class Census:
    """Counts the objects that an engine makes for each request (I3). Made before the engine."""

    def __init__(self) -> None:
        self._before = self._living()

    def faults(self, allowed: int) -> list[str]:
        """More such objects than `allowed`: an engine keeps those of its last step until the next one."""
        gc.collect()
        known = {id(item) for item in self._before}
        found = [item for item in self._living() if id(item) not in known]
        counts = {kind.__name__: sum(type(item) is kind for item in found) for kind in (Request, SamplingState)}
        return [f"I3: {count} {name} objects are left" for name, count in counts.items() if count > allowed]

    @staticmethod
    def _living() -> list[object]:
        return [item for item in gc.get_objects() if type(item) in (Request, SamplingState)]


def idle_faults(loop: DrivenLoop) -> list[str]:
    """`engine_faults` of an engine that is driven by hand, and whether its loop has forgotten all requests."""
    faults = engine_faults(loop.engine)
    if loop.open_numbers():
        faults.append(f"I3: requests {sorted(loop.open_numbers())[:9]} never ended")
    if loop._loop._ids or loop._loop._numbers:
        faults.append(f"I3: the loop still knows {len(loop._loop._ids)} numbers")
    return faults


def engine_faults(engine: Engine) -> list[str]:
    """I1 to I4 of an engine that has nothing to do: blocks, owners, requests, slots."""
    faults = list[str]()
    engine.settle()
    load = engine.load
    for name in ("running", "waiting", "used_blocks"):
        if getattr(load, name):
            faults.append(f"I1, I3: {name} is {getattr(load, name)} while nothing runs")
    try:
        engine.scheduler.check()
    except Exception as error:
        faults.append(f"I1, I2: {error}")
    if engine.scheduler.in_flight or engine._states or engine._outputs.request_ids() or engine._outputs.has_news:
        faults.append("I3: the engine still keeps steps, states or reports")
    return faults + slot_faults(engine)


def slot_faults(engine: Engine) -> list[str]:
    """I4: every slot of the device is free."""
    runner: Any = engine._runner
    if not isinstance(runner, DeviceRunner):
        return []
    batch = runner.batch
    free, held = sorted(batch._free), [*batch._slots, *batch._stays, *runner._reporting, *runner._limited]
    faults = [f"I4: {len(held)} requests are in slots"] if held else []
    if free != list(range(engine.config.max_running)):
        faults.append(f"I4: {len(free)} of {engine.config.max_running} slots are free, or some twice")
    return faults


class Poison:
    """What slots hold that are free (I4): only what gives a slot to a request may write there.

    Attributes:
        slots: how many there are; 0 where steps are not scheduled ahead.
    """

    _VALUE = -77

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine._runner
        self._kept: dict[str, torch.Tensor] = {}
        self._given = _Given()
        self.slots = 0
        if isinstance(runner, DeviceRunner):
            # The last slot is nobody's: rows of padding write there.
            self.slots = engine.config.max_running
            kept = runner.batch.kept
            self._kept = {item.name: getattr(kept, item.name)[: self.slots] for item in fields(kept)}
            self._given = runner.batch._slots = _Given(runner.batch._slots)
        self._given.slots = set(range(self.slots))

    def put(self) -> None:
        """Poisons all slots, none of which may be taken."""
        for values in self._kept.values():
            values.fill_(self._VALUE)
        self._given.slots.clear()

    def faults(self) -> list[str]:
        """What was written since to slots that nobody had."""
        free = sorted(set(range(self.slots)) - self._given.slots)
        wrong = [name for name, values in self._kept.items() if bool((values[free] != self._VALUE).any())]
        return [f"I4: {name} of slots that are free was written" for name in wrong]


class _Given(dict[Request, int]):
    """The slots of requests, and all that were given since somebody cleared them."""

    slots: set[int]

    def __setitem__(self, request: Request, slot: int) -> None:
        self.slots.add(slot)
        super().__setitem__(request, slot)


class Probe:
    """A prompt whose tokens are known (I6)."""

    PROMPT = tuple(range(40, 59))
    _LENGTH = 10

    def __init__(self, engine: Engine) -> None:
        from tests.suites.rig import DrivenLoop

        self._number = -1
        self._expected = self._ask(DrivenLoop(engine))

    def faults(self, loop: DrivenLoop) -> list[str]:
        """Whether the tokens are what they were."""
        found = self._ask(loop)
        return [] if found == self._expected else [f"I6: the probe gives {found}, not {self._expected}"]

    def _ask(self, loop: DrivenLoop) -> list[int]:
        self._number -= 1
        loop.submit(self._number, list(self.PROMPT), max_tokens=self._LENGTH, ignore_eos=True)
        loop.run()
        served = loop.served.pop((self._number, 0), None)
        return [] if served is None else served.token_ids


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process holds (I5). `tasks` are those of the running event loop, if there is one."""

    tasks: int
    threads: int
    handles: int
    children: int

    @classmethod
    def of(cls, pid: int | None = None) -> Resources:
        """Of a process, or of this one."""
        process = psutil.Process(pid)
        try:
            tasks = 0 if pid else len(asyncio.all_tasks())
        except RuntimeError:
            tasks = 0
        return cls(tasks, process.num_threads(), process.num_fds(), len(process.children(recursive=True)))

    def faults(self, now: Resources) -> list[str]:
        """What `now` has more of than this, which was taken after warm-up."""
        pairs = ((name, getattr(self, name), getattr(now, name)) for name in self.__slots__)
        return [f"I5: {name} were {before} and are {after}" for name, before, after in pairs if after > before]


def reply_faults(reply: Reply | Told, *, injected: bool = False) -> list[str]:
    """I8 and I9 of an answer, or of as much of a stream as has come: its head, its texts and its error.

    Args:
        injected: whether it is of a request that a fault was put into.
    """
    if isinstance(reply, Reply):
        body = reply.body.decode("utf-8", "replace")
    else:
        body = "\n".join([*map(reply.text, reply.pieces), *([str(reply.error)] if reply.error else [])])
    faults = [*leak_faults(body, reply.headers), *status_faults(reply.status, reply.headers, injected=injected)]
    return [f"{fault}: {body[:200]}" for fault in faults]


def leak_faults(body: str, headers: Mapping[str, str], secrets: Iterable[str] = ()) -> list[str]:
    """I8: nothing of our inside in a reply, and none of `secrets`."""
    text = "\n".join([body, *(f"{name}: {value}" for name, value in headers.items())])
    found = [match[0] for match in _LEAKS.finditer(text)] + ["a secret" for secret in secrets if secret in text]
    return [f"I8: a reply holds {what!r}" for what in found[:3]]


def status_faults(status: int, headers: Mapping[str, str], *, injected: bool = False) -> list[str]:
    """I9: no 5xx but a 503 that says when to come again, and a 500 where a fault was put in.

    Args:
        status: 0 where no head has come.
        headers: with names in lower case, or of a mapping that does not care.
    """
    if status < 500 or (status == 503 and "retry-after" in headers) or (injected and status == 500):
        return []
    return [f"I9: a reply has the status {status}"]


def metrics_faults(before: str, now: str, *, ledger: int | None = None, load: Sequence[str] = ()) -> list[str]:
    """I10: counters only grow, gauges are not negative, the series are the same.

    Args:
        before, now: the metrics in Prometheus' text format.
        ledger: requests that are open, which the gauges `load` together must tell.
    """
    old, new = _samples(before), _samples(now)
    faults = [f"I10: the series {name} came or went" for name in sorted(old.keys() ^ new.keys())[:3]]
    for name, (kind, value) in new.items():
        if kind in ("counter", "histogram") and value < old.get(name, (kind, value))[1]:
            faults.append(f"I10: {name} fell from {old[name][1]:g} to {value:g}")
        if kind == "gauge" and value < 0:
            faults.append(f"I10: {name} is {value:g}")
    told = sum(value for name, (_, value) in new.items() if name.partition("{")[0] in load)
    if ledger is not None and told != ledger:
        faults.append(f"I10: {told:g} requests run or wait by the metrics, {ledger} by the ledger")
    return faults


def _samples(text: str) -> dict[str, tuple[str, float]]:
    """Kind and value of each series."""
    found: dict[str, tuple[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            kind = "time" if sample.name.endswith("_created") else family.type
            found[f"{sample.name}{{{labels}}}"] = kind, float(sample.value)
    return found
