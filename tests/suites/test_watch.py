"""The watch itself: of a sound server it tells nothing, and of each fault that is put in it tells by its name."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import pytest

from tests.suites import served as served_module
from tests.suites import watch as watch_module
from tests.suites.invariants import Poison, reply_faults
from tests.suites.raw_client import Connection, Reply, Told, ask
from tests.suites.report import Tally, Tier
from tests.suites.rig import DrivenLoop, small_engine, tiny_model
from tests.suites.served import Served, load, metrics, serving, until_true
from tests.suites.watch import Watch

Patch = pytest.MonkeyPatch

_LONG = {"prompt": "a", "max_tokens": 240, "ignore_eos": True, "stream": True}
# Talks with somebody whom the watch does not know for this machine, and waits.
_TALK = 'import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(("127.0.0.2", 9)); '
_HOLD = "import sys; held = open(sys.argv[1]); "
_WAIT = "print(flush=True); sys.stdin.read()"


def _be_slow(watch: Watch, patch: Patch) -> None:
    """Whatever it takes is too long."""
    patch.setattr(watch_module, "SLOWEST", 0.0)
    patch.setattr(watch_module, "_STEP_SECONDS", 0.0)


def _change_looks(watch: Watch, patch: Patch) -> None:
    """The engine tells of what it alone sees, and the front held less after its warm-up than it did."""
    look = watch._look

    async def changed(name: str) -> dict[str, Any]:
        found = await look(name)
        return {**found, "faults": ["I4: a slot is taken"]} if name == "engine" else found

    patch.setattr(watch, "_look", changed)
    less = {kind: {name: count - 1 for name, count in held.items()} for kind, held in watch._held.items()}
    patch.setattr(watch, "_held", less)


def _lower_resources(watch: Watch, patch: Patch) -> None:
    """All processes held less after the warm-up, and somebody who has gone left a name of shared memory."""
    known = {pid: replace(held, threads=0, handles=1, children=-1) for pid, held in watch._resources.items()}
    patch.setattr(watch, "_resources", known)
    patch.setattr(watch, "_processes", 1)
    names = watch.served.looks / "names"
    names.mkdir()
    (names / "psm_left").touch()
    patch.setattr(served_module, "_SHARED", names)


def _change_metrics(watch: Watch, patch: Patch) -> None:
    """They tell of a request that has not ended; one of them was higher, and another one was there too."""

    def put(text: str, name: str, value: float) -> str:
        return re.sub(rf"(?m)^(hookline:{name}\S*) .*", rf"\1 {value}", text)

    async def changed(port: int, key: str = "") -> str:
        found = put(await metrics(port, key), "kv_cache_usage_perc", 0.5)
        return put(put(found, "num_requests_running", 1), "request_received_total", 9e9)

    before = put(watch._before, "prompt_tokens_total", 9e9)
    patch.setattr(watch, "_before", f"{before}# TYPE gone gauge\ngone 1.0\n")
    patch.setattr(watch_module, "metrics", changed)


def _change_replies(watch: Watch, patch: Patch) -> None:
    """The server is ready no more, and says to everybody what that is inside."""

    async def changed(port: int, path: str, body: object = None, key: str = "") -> Reply:
        reply = await ask(port, path, body, key)
        return Reply(500, {}, b'{"error": "<Engine at 0x7f00aa11>"}') if path == "/readyz" else reply

    patch.setattr(watch_module, "ask", changed)


def _leave_traces(watch: Watch, patch: Patch) -> None:
    """A file, a line in the log, and another engine than there was."""
    (watch.served.folder / "left").touch()
    log = watch.served.looks / "said"
    log.write_text("Traceback (most recent call last):")
    patch.setattr(watch.served, "log", log)
    pid = watch.served.process.pid
    patch.setattr(watch, "_resources", {pid: watch._resources[pid]})


# What is put in, and the beginnings of all that must be told of it.
FAULTS: Mapping[str, tuple[Callable[[Watch, Patch], object], Sequence[str]]] = {
    "another text": (
        lambda watch, patch: patch.setattr(watch, "_probe", "another"),
        ("I6: the probe gives", "I11: streamed", "I12: the usage is None"),
    ),
    "another usage": (lambda watch, patch: patch.setattr(watch, "_used", (12, 11)), ["I12: the usage is {"] * 2),
    "slow ones": (_be_slow, ["I7: a normal request took", "I13: a step took"]),
    "other replies": (
        _change_replies,
        ("I7: ready is 500", "I8: a reply holds '0x7f00aa11'", "I9: a reply has the status 500"),
    ),
    "within": (
        _change_looks,
        ["I4: a slot is taken", *(f"I3, I5, I10, I14: {kind} were" for kind in ("tasks", "objects", "places"))],
    ),
    "more resources": (
        _lower_resources,
        (
            *("I5: processes were 1", "I5: names of shared memory were 0"),
            *("I5: threads were", "I5: handles were", "I5: children were") * 2,
        ),
    ),
    "other metrics": (
        _change_metrics,
        (
            *("I1: the cache is in use", "I3: not every request", "I10: 1 requests run"),
            *("I10: hookline:prompt_tokens_total", "I10: the series gone"),
        ),
    ),
    "traces": (
        _leave_traces,
        ["I14: there are files ['left']", "the log has a traceback", "a process was replaced"],
    ),
}


def test_a_watch_tells_each_fault_by_its_name() -> None:
    with tiny_model() as model:
        asyncio.run(_put_in_faults(model))


async def _put_in_faults(model: Path) -> None:
    async with serving(model) as served:
        watch = Watch(Tally("T", Tier.T1, 0, 0, []), served)
        await watch.begin(grammars=False)
        assert await _told(watch) == []
        for name, (put_in, due) in FAULTS.items():
            with Patch.context() as patch:
                patch.setattr(watch, "_before", watch._before)  # what a changed one tells is forgotten
                put_in(watch, patch)
                _compare(name, await _told(watch), due)
            (served.folder / "left").unlink(missing_ok=True)
        async with _open_stream(watch):
            _compare("an open stream", await _told(watch), ["I1, I3: at rest the load is"])
        with _process(served.folder, _TALK), Patch.context() as patch:
            patch.setattr(watch, "_processes", 99)
            _compare("a stranger", await _told(watch), ["I14: there is a connection to addr(ip='127.0.0.2'"])
        assert await _told(watch) == []
        with Patch.context() as patch, pytest.raises(RuntimeError, match="the engine process has not looked at itself"):
            patch.setattr(watch, "_ask_for_looks", lambda *names: None)
            patch.setattr(watch_module, "_LOOK_SECONDS", 0.0)
            (served.looks / "engine.json").unlink()
            await watch.check("nobody looks")


async def _told(watch: Watch) -> list[str]:
    watch.tally = Tally("T", Tier.T1, 0, 0, [])
    await watch.check("it")
    return [fault.removeprefix("it: ") for fault in watch.tally.report().failures]


def _compare(name: str, found: list[str], due: Sequence[str]) -> None:
    """All that is due was told, and nothing else."""
    pairs = zip(sorted(found), sorted(due), strict=False)
    assert len(found) == len(due) and all(fault.startswith(start) for fault, start in pairs), f"{name}: {found}"


@asynccontextmanager
async def _open_stream(watch: Watch) -> AsyncIterator[None]:
    """A stream whose engine stands still until the watch has waited for its end."""
    port, engine = watch.served.port, cast(psutil.Process, watch.served.engine())
    followers = list[asyncio.Task[None]]()

    async def stands() -> bool:
        """Whether the engine was stopped in the midst of a stream."""
        followers.append(asyncio.create_task(_follow(port, told := Told())))
        await until_true(lambda: _has_begun(told), 5.0)
        engine.suspend()
        if any((await load(port)).values()):
            return True
        engine.resume()
        return False

    async def idle(seconds: float = 2.0) -> bool:
        stopped = engine.status() == psutil.STATUS_STOPPED
        rests = await Watch.idle(watch, 0.1 if stopped else seconds)
        engine.resume()
        return rests

    with Patch.context() as patch:
        patch.setattr(watch, "idle", idle)
        assert await until_true(stands, 10.0)
        yield
    await asyncio.gather(*followers)


async def _has_begun(told: Told) -> bool:
    return told.events > 0


async def _follow(port: int, told: Told) -> None:
    async with Connection(port) as connection:
        connection.send("POST", "/v1/completions", _LONG)
        await connection.follow(told)


def _process(folder: Path, does: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that counts as one of the server whose folder this is, and ends when it is left."""
    process = subprocess.Popen(
        [sys.executable, "-E", "-S", "-c", does + _WAIT, *arguments],
        env={"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    cast(Any, process.stdout).readline()
    return process


def test_names_of_shared_memory_are_a_servers_while_it_holds_them_or_nobody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, folder = tmp_path / "names", tmp_path / "tmp"
    for path in (names, folder):
        path.mkdir()
    monkeypatch.setattr(served_module, "_SHARED", names)
    served = Served(cast(Any, None), folder, tmp_path, tmp_path / "log", frozenset({"psm_before"}))
    for name in ("psm_before", "psm_new", "of others", "held"):
        (names / name).touch()
    with (names / "psm_new").open(), _process(folder, _HOLD, str(names / "held")):
        assert served.shared_names() == {"held"}
    assert served.shared_names() == {"psm_new"}
    assert asyncio.run(served.left_faults(0.0)) == ["these names of shared memory are left: ['psm_new']"]
    (names / "psm_new").unlink()
    assert asyncio.run(served.left_faults(0.0)) == []


def test_a_reply_is_judged_by_its_head_its_body_and_the_error_in_a_stream() -> None:
    assert reply_faults(Reply(200, {"x": "y"}, b"all is well")) == reply_faults(Told()) == []
    assert reply_faults(Reply(503, {"retry-after": "1"})) == []
    [unavailable] = reply_faults(Reply(503, {}, b"later"))
    [failed] = reply_faults(Told(status=500))
    assert unavailable == "I9: a reply has the status 503: later" and failed.startswith(
        "I9: a reply has the status 500"
    )
    assert reply_faults(Told(status=500), injected=True) == []
    assert len(reply_faults(Told(status=502), injected=True)) == 1
    told = Told(status=200)
    told.take({"choices": [{"index": 0, "text": "a word", "finish_reason": None}]})
    assert reply_faults(told) == []
    told.take({"error": {"message": "Traceback (most recent call last)"}})
    assert [fault[:2] for fault in reply_faults(told, injected=True)] == ["I8"]
    told = Told(status=200, pieces={1: ["at 0x7f", "00aa11"]}, headers={"x": "/a/b/c.py"})
    assert [fault.partition(": at")[0] for fault in reply_faults(told)] == [
        "I8: a reply holds '0x7f00aa11'",
        "I8: a reply holds '/a/b/c.py'",
    ]
    assert len(reply_faults(Reply(400, {}, b'{"message": "File \\"<stdin>\\", line 1"}'))) == 1


def test_what_is_written_to_a_free_slot_is_told() -> None:
    with tiny_model() as model:
        engine = small_engine(model, overlap=True)
        poison = Poison(engine)
        assert poison.slots == engine.config.max_running
        poison.put()
        loop = DrivenLoop(engine)
        loop.serve([[1, 2, 3], [4, 5]], max_tokens=3, ignore_eos=True)
        engine.settle()
        assert poison.faults() == []
        cast(Any, engine._runner).batch.kept.last_tokens[poison.slots - 1] = 1
        assert poison.faults() == ["I4: last_tokens of slots that are free was written"]
        poison.put()
        assert poison.faults() == []
