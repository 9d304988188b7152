"""S2: the wall clock may jump; nothing that takes or limits time looks at it."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from hookline.scheduling.output import OutputDelta, Timing
from tests.source_tree import ROOT, read_modules
from tests.suites.invariants import Probe, idle_faults
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import DrivenLoop, small_engine, tiny_model

_JUMPS = {"an hour on": 3600.0, "an hour back": -3600.0, "a step on": 0.5, "a step back": -0.5}
_WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today"}


def run(tier: Tier, seed: int) -> SuiteReport:
    tally = Tally("S2", tier, seed, len(_JUMPS), ("jumps", "source files read", "rule tried"))
    for fault in _source_faults(tally):
        tally.fail(fault)
    for source, count in (("a = time.time() - b", 1), ("if time.time() > b: ...", 1), ("int(time.time())", 0)):
        tally.event("rule tried")
        tally.expect(len(list(_wall_clock_faults("x.py", ast.parse(source)))) == count, f"the rule fails at {source!r}")
    with tiny_model() as model:
        engine = small_engine(model)
        probe, loop, number = Probe(engine), DrivenLoop(engine), 0
        for name, seconds in _JUMPS.items():
            with tally.case(name):
                number += 1
                _jump(tally, loop, number, seconds)
                for fault in [*probe.faults(loop), *idle_faults(loop)]:
                    tally.fail(f"{name}: {fault}")
    return tally.report()


def _jump(tally: Tally, loop: DrivenLoop, number: int, seconds: float) -> None:
    """The clock jumps in the middle of a request; what it says of its time stays what it took."""
    began, real = time.monotonic(), time.time
    outputs = loop.engine._outputs
    take, timings = outputs.take_deltas, list[Timing]()

    def watched() -> tuple[list[str], list[OutputDelta]]:
        started, deltas = take()
        timings.extend(delta.timing for delta in deltas if delta.timing is not None)
        return started, deltas

    loop.submit(number, [1, 2, 3, number], max_tokens=20, ignore_eos=True)
    with patch.object(outputs, "take_deltas", watched):
        loop.turn()
        with patch("time.time", lambda: real() + seconds):
            tally.event("jumps")
            loop.run()
    took = time.monotonic() - began
    (timing,) = timings
    values = (timing.queued, timing.time_to_first_token, timing.total)
    sound = all(value is not None and 0 <= value <= took for value in values)
    tally.expect(sound, f"a request of {took:.3f} s says {values}")


def _source_faults(tally: Tally) -> Iterator[str]:
    for module in read_modules(Path(ROOT)).values():
        tally.event("source files read")
        yield from _wall_clock_faults(module.path, module.tree)


def _wall_clock_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """The wall clock may be told, as whole seconds or as text, or be compared with a file's time; nothing else."""
    allowed: set[int] = set()
    for node in ast.walk(tree):
        stamps = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("int", ".strftime"))
        files = isinstance(node, ast.BinOp | ast.Compare) and "st_mtime" in ast.unparse(node)
        if stamps or files:
            allowed.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _WALL_CLOCK and id(node) not in allowed:
            yield f"{path}:{node.lineno} takes {ast.unparse(node)}: intervals and deadlines use time.monotonic()"
