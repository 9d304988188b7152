"""K5: what keeps a server from starting is one clear line and the documented exit code, soon, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import launched

_SECONDS = 30.0
# Each start takes most of a processor.
_TOGETHER = 2
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Case:
    """A start that fails.

    Attributes:
        code: the exit code.
        says: in the line that tells it.
        breaks: what is done to a copy of the model's folder.
    """

    code: int
    says: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    breaks: Callable[[Path], object] | None = None


def _lose_shard(model: Path) -> None:
    (model / _WEIGHTS).rename(model / "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _put_folder(model: Path) -> None:
    (model / _WEIGHTS).unlink()
    (model / _WEIGHTS).mkdir()


def _rename_architecture(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodyForCausalLM"))


_CASES: Mapping[str, _Case] = {
    "an address of another": _Case(8, "cannot listen on 203.0.113.1", ("--host", "203.0.113.1")),
    "no model": _Case(3, "no model or file", breaks=shutil.rmtree),
    "a shard is missing": _Case(1, "model-00001-of-00002.safetensors is missing", breaks=_lose_shard),
    "weights cut short": _Case(1, "has 50,000 bytes", breaks=lambda model: os.truncate(model / _WEIGHTS, 50_000)),
    "weights are a folder": _Case(1, "is not a regular file", breaks=_put_folder),
    "no plugin": _Case(4, "NobodyForCausalLM", breaks=_rename_architecture),
    "config is no JSON": _Case(1, "config.json", breaks=lambda model: (model / "config.json").write_text("{")),
    "cache too small": _Case(6, "needs a cache of", ("--kv-cache-memory", "100")),
    "context too long": _Case(2, "max_model_len is 100,000", ("--max-model-len", "100000")),
    "more devices than one": _Case(2, "tensor_parallel_size is 3", ("--tensor-parallel-size", "3")),
    "an option out of range": _Case(2, "'--max-running'", ("--max-running", "0")),
    "a limit out of range": _Case(2, "the limit n is 0", ("--max-n", "0")),
    "a key too short": _Case(2, "an API key is too short", environment={"HOOKLINE_API_KEYS": "abc"}),
    "keys that cannot be read": _Case(2, "cannot be read", ("--api-key-file", "/")),
    "no such parser": _Case(2, "no tool parser called 'nobodys'", ("--tool-parser", "nobodys")),
    "no such device": _Case(7, "cuda:99", ("--device", "cuda:99")),
    "no place for a socket": _Case(8, "the engine's socket cannot be made"),
    "no right to read": _Case(1, "Permission denied", breaks=lambda model: (model / _WEIGHTS).chmod(0)),
}


# At T1 not those that fail where another one does.
_CUT = {"an address of another", "weights are a folder", "config is no JSON", "a limit out of range"}
_CUT |= {"keys that cannot be read"}


def run(tier: Tier, seed: int) -> SuiteReport:
    cases = {name: case for name, case in _CASES.items() if tier is Tier.T2 or name not in _CUT}
    if os.geteuid() == 0:  # who may read everything
        cases.pop("no right to read", None)
    tally = Tally("K5", tier, seed, len(cases) + 1, [*cases, "a port that is taken"])
    asyncio.run(_run(tally, cases))
    return tally.report()


async def _run(tally: Tally, cases: Mapping[str, _Case]) -> None:
    room = asyncio.Semaphore(_TOGETHER)
    with tiny_model() as model, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = _Case(8, f"cannot listen on 127.0.0.1:{port}: Address already in use", ("--port", str(port)))
        every = {**cases, "a port that is taken": taken}
        await asyncio.gather(*(_one(tally, room, model, name, case) for name, case in every.items()))


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
    # The path of a Unix socket has 107 bytes at most.
    temporary = "x" * 120 if name == "no place for a socket" else "tmp"
    began = time.monotonic()
    async with launched(model, *case.options, temporary=temporary, environment=case.environment) as served:
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
