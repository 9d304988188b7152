"""What a suite did, and the page that tells of all of them.

A suite is a module with `run(tier, seed) -> SuiteReport`. It says beforehand what it is going to force; a suite in
which one of these never happened has shown nothing, and counts as failed.
"""

from __future__ import annotations

import enum
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.suites.plan import told_cut

# Failures that a report keeps; it counts them all.
_MOST_KEPT = 12
_MOST_CHARACTERS = 600


class Tier(enum.IntEnum):
    """How much a suite does: T1 with each change, T2 when there are hours."""

    T1 = 1
    T2 = 2


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """What one suite did.

    Attributes:
        suite: its id, such as `F3`.
        planned: cases that the plan has for this tier.
        cases: cases that ran.
        events: what was forced, by name, and how often it occurred.
        failures: the first of them.
        failed: how many there were.
        seconds: of wall time.
        cpu_seconds: of this process and of those that it started and saw end; not of a killed server's engine.
    """

    suite: str
    tier: int
    seed: int
    planned: int
    cases: int
    events: dict[str, int]
    failures: tuple[str, ...]
    failed: int
    seconds: float
    cpu_seconds: float

    @property
    def faults(self) -> list[str]:
        """Why the suite did not pass; empty if it did."""
        missing = [f"the forced event {name!r} never occurred" for name, count in self.events.items() if not count]
        few = [] if self.cases >= max(self.planned, 1) else [f"{self.cases:,} of {self.planned:,} cases ran"]
        kept = list(self.failures)
        if self.failed > len(kept):
            kept.append(f"... and {self.failed - len(kept)} more")
        return [*kept, *missing, *few]

    def to_json(self) -> str:
        """For another process to read."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SuiteReport:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"failures": tuple(values["failures"])})


class Tally:
    """Keeps count while a suite runs.

    Args:
        suite: its id.
        planned: cases that the plan has for this tier.
        forced: the events without which the suite shows nothing.

    Attributes:
        random: all of the suite's chance comes from here.
    """

    def __init__(self, suite: str, tier: Tier, seed: int, planned: int, forced: Iterable[str]) -> None:
        self.suite = suite
        self.tier = tier
        self.seed = seed
        self.random = random.Random(f"{suite} {seed}")
        self.cases = 0
        self.events: Counter[str] = Counter(dict.fromkeys(forced, 0))
        self._planned = planned
        self._failures: list[str] = []
        self._failed = 0
        self._begun = time.monotonic()
        self._cpu_begun = _cpu_seconds()

    def event(self, name: str, times: int = 1) -> None:
        """Something that was forced has occurred."""
        self.events[name] += times

    def expect(self, holds: bool, what: str) -> bool:
        """A failure, unless it holds."""
        if not holds:
            self.fail(what)
        return holds

    def fail(self, what: str) -> None:
        """Notes a failure."""
        self._failed += 1
        if len(self._failures) < _MOST_KEPT:
            self._failures.append(what[:_MOST_CHARACTERS])

    @contextmanager
    def case(self, label: str) -> Iterator[None]:
        """One case; an error that leaves it is its failure, and the suite goes on."""
        self.cases += 1
        try:
            yield
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = "" if trace is None else f" ({_short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
            self.fail(f"{label}: {type(error).__name__}: {error}{place}")

    def report(self) -> SuiteReport:
        """What has been counted."""
        return SuiteReport(
            suite=self.suite,
            tier=int(self.tier),
            seed=self.seed,
            planned=self._planned,
            cases=self.cases,
            events=dict(self.events),
            failures=tuple(self._failures),
            failed=self._failed,
            seconds=time.monotonic() - self._begun,
            cpu_seconds=_cpu_seconds() - self._cpu_begun,
        )


def page(reports: Sequence[SuiteReport]) -> list[str]:
    """The reports as the lines of one page: a table, and below it what failed and what the plan has beyond it."""
    rows = [("suite", "tier", "cases / plan", "seed", "wall s", "cpu s", "failed", "forced events")]
    for report in reports:
        events = ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))
        rows.append(
            (
                report.suite,
                f"T{report.tier}",
                f"{report.cases:,} / {report.planned:,}",
                str(report.seed),
                f"{report.seconds:.1f}",
                f"{report.cpu_seconds:.1f}",
                str(len(report.faults) if not report.failed else report.failed),
                events,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
    for report in reports:
        lines += [f"{report.suite} FAILED: {fault}" for fault in report.faults]
    lines += filter(None, (told_cut(report.suite, report.tier, report.planned) for report in reports))
    seconds, cases = sum(report.seconds for report in reports), sum(report.cases for report in reports)
    return [*lines, f"{len(reports)} suites, {cases:,} cases, {seconds:.0f} s of wall time together"]


def _cpu_seconds() -> float:
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])
