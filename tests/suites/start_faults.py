"""K5: what keeps a server from starting is one clear line and the documented exit code, soon, and nothing is left.

A full disk is a file system of its own with room for the folder of the engine's socket, but not for the socket: that is
all that a start has to write. Kernels that no cache has room for are done without. There is no case for a rank that
dies while it starts: until there are ranks it is the engine, which K1 kills then.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.raw_client import ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import PROBE, launched, serving
from tests.suites.watch import judge

_SECONDS = 30.0
# Each start takes most of a processor.
_TOGETHER = 2
_WEIGHTS = "model.safetensors"
# Room for a disk's root, the folder for temporary files, and one that is made there.
_INODES = 3
_PR_GET_SECUREBITS, _PR_SET_SECUREBITS, _SECBIT_NOROOT = 27, 28, 1  # of prctl(2), and of capabilities(7)


@dataclass(frozen=True, slots=True)
class _Case:
    """A start that fails.

    Attributes:
        code: the exit code.
        says: in the line that tells it.
        breaks: what is done to a copy of the model's folder.
        temporary: the folder for temporary files.
        powerless: whether root is to start it as if it were anybody.
    """

    code: int
    says: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    breaks: Callable[[Path], object] | None = None
    temporary: str = "tmp"
    powerless: bool = False


def _lose_shard(model: Path) -> None:
    (model / _WEIGHTS).rename(model / "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _forbid_config(model: Path) -> None:
    (model / "config.json").chmod(0)


def _put_folder(model: Path) -> None:
    (model / _WEIGHTS).unlink()
    (model / _WEIGHTS).mkdir()


def _rename_architecture(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodyForCausalLM"))


_NO_SOCKET = "the engine's socket cannot be made"
_CASES: Mapping[str, _Case] = {
    "an address of another": _Case(8, "cannot listen on 203.0.113.1", ("--host", "203.0.113.1")),
    "no model": _Case(3, "no model or file", breaks=shutil.rmtree),
    "a shard is missing": _Case(1, "model-00001-of-00002.safetensors is missing", breaks=_lose_shard),
    "weights cut short": _Case(1, "has 50,000 bytes", breaks=lambda model: os.truncate(model / _WEIGHTS, 50_000)),
    "weights are a folder": _Case(1, "is not a regular file", breaks=_put_folder),
    "no plugin": _Case(4, "NobodyForCausalLM", breaks=_rename_architecture),
    "config is no JSON": _Case(1, "config.json", breaks=lambda model: (model / "config.json").write_text("{")),
    "cache too small": _Case(6, "needs a cache of", ("--kv-cache-memory", "100")),
    "memory that there is not": _Case(6, "that was asked for does not fit", ("--kv-cache-memory", "9000000GiB")),
    "context too long": _Case(2, "max_model_len is 100,000", ("--max-model-len", "100000")),
    "more devices than one": _Case(2, "tensor_parallel_size is 3", ("--tensor-parallel-size", "3")),
    "an option out of range": _Case(2, "'--max-running'", ("--max-running", "0")),
    "a limit out of range": _Case(2, "--max-n is 0", ("--max-n", "0")),
    "a key too short": _Case(2, "an API key is too short", environment={"HOOKLINE_API_KEYS": "abc"}),
    "keys that cannot be read": _Case(2, "cannot be read", ("--api-key-file", "/")),
    "no such parser": _Case(2, "no tool parser called 'nobodys'", ("--tool-parser", "nobodys")),
    "no such device": _Case(7, "cuda:99", ("--device", "cuda:99")),
    # The path of a Unix socket has 107 bytes at most.
    "no place for a socket": _Case(8, _NO_SOCKET, temporary="x" * 120),
    "no right to read": _Case(1, "Permission denied", breaks=lambda model: (model / _WEIGHTS).chmod(0), powerless=True),
    "no right to read the config": _Case(1, "config.json cannot be read", breaks=_forbid_config, powerless=True),
}
# At T1 not those that fail where another one does.
_CUT = {"an address of another", "weights are a folder", "config is no JSON", "a limit out of range"}
_CUT |= {"keys that cannot be read", "cache too small", "no right to read the config"}
_FULL_CACHE = "served beside a full cache"


def run(tier: Tier, seed: int) -> SuiteReport:
    cases = {name: case for name, case in _CASES.items() if tier is Tier.T2 or name not in _CUT}
    with _full_disk() as disk, _powerless() as is_powerless:
        has_disk = disk is not None  # who may make none goes without
    if not is_powerless:  # root, who may read everything and may not give that up
        cases = {name: case for name, case in cases.items() if not case.powerless}
    forced = [*cases, "a port that is taken", *(["no space"] if has_disk else [])]
    forced += [_FULL_CACHE] if has_disk and tier is Tier.T2 else []
    tally = Tally("K5", tier, seed, len(forced), forced)
    asyncio.run(_run(tally, cases))
    return tally.report()


async def _run(tally: Tally, cases: Mapping[str, _Case]) -> None:
    room = asyncio.Semaphore(_TOGETHER)
    with tiny_model() as model, socket.create_server(("127.0.0.1", 0)) as listener, _full_disk() as disk:
        port = listener.getsockname()[1]
        taken = _Case(8, f"cannot listen on 127.0.0.1:{port}: Address already in use", ("--port", str(port)))
        every = {**cases, "a port that is taken": taken}
        if disk is not None:
            every["no space"] = _Case(8, f"{_NO_SOCKET}: No space left on device", temporary=str(disk / "tmp"))
        await asyncio.gather(*(_one(tally, room, model, name, case) for name, case in every.items()))
        if _FULL_CACHE in tally.events:
            await _serve_beside_full_cache(tally, model)


async def _one(tally: Tally, room: asyncio.Semaphore, model: Path, name: str, case: _Case) -> None:
    async with room:
        with tally.case(name):
            own = model.parent / f"{model.name}-{name.replace(' ', '-')}"
            shutil.copytree(model, own)
            try:
                if case.breaks is not None:
                    case.breaks(own)
                await _start(tally, own, name, case)
            finally:
                shutil.rmtree(own, ignore_errors=True)


async def _start(tally: Tally, model: Path, name: str, case: _Case) -> None:
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        with _powerless() if case.powerless else nullcontext():  # no other start comes between
            start = launched(model, *case.options, temporary=case.temporary, environment=case.environment)
            served = await stack.enter_async_context(start)
        code = await served.exit_code(_SECONDS)
        seconds, said = time.monotonic() - began, served.said
        tally.expect(
            code == case.code, f"{name}: the exit code is {code} after {seconds:.0f} s, not {case.code}: {said}"
        )
        lines = [line for line in said.splitlines() if line.startswith("Error: ")]
        clear = len(lines) == 1 and case.says in lines[0] and "Traceback" not in said
        tally.expect(clear, f"{name}: no one clear line with {case.says!r}: {said}")
        tally.event(name, code not in (None, 0))
        for fault in await served.left_faults(2.0):
            tally.fail(f"{name}: {fault}")


async def _serve_beside_full_cache(tally: Tally, model: Path) -> None:
    """Kernels cannot be kept, which is no reason not to serve."""
    with _full_disk() as disk, tally.case(_FULL_CACHE):
        names = ("TRITON_CACHE_DIR", "HOOKLINE_CACHE_DIR")
        async with serving(model, environment=dict.fromkeys(names, str(disk))) as served:
            reply = await ask(served.port, "/v1/completions", PROBE)
            judge(tally, _FULL_CACHE, reply)
            tally.event(_FULL_CACHE, tally.expect(reply.status == 200, f"beside a full cache: {reply}"))


@contextmanager
def _full_disk() -> Iterator[Path | None]:
    """A file system with almost no room; None where we may not make one."""
    mount, options = shutil.which("mount"), f"size=16k,nr_inodes={_INODES}"
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        command = [mount or "", "-t", "tmpfs", "-o", options, "suite", folder]
        if mount is None or subprocess.run(command, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def _powerless() -> Iterator[bool]:
    """What this thread starts within has no right beyond its user's own, also where that is root; False if it has."""
    if os.geteuid() != 0:
        yield True
        return
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0)
    done = prctl(_PR_SET_SECUREBITS, before | _SECBIT_NOROOT, 0, 0, 0) == 0
    try:
        yield done
    finally:
        if done:
            prctl(_PR_SET_SECUREBITS, before, 0, 0, 0)
