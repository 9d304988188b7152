"""`python -m tests.suites --tier 2`: runs suites one after the other, and ends with 1 if any failed.

With `--lanes`, which wants two processors, those that may run beside each other do, and come first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# As in tests/conftest.py: before anything imports triton or asks the hub.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.suites.registry import DEFAULT_SEED, LANES, SUITES, run_suite
from tests.suites.report import SuiteReport, Tier, page


def main(arguments: list[str] | None = None) -> int:
    """Runs what the arguments name; answers with the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description="Runs reliability suites.")
    parser.add_argument("--tier", type=int, choices=[int(tier) for tier in Tier], default=int(Tier.T1))
    parser.add_argument("--suite", nargs="+", action="extend", choices=sorted(SUITES), help="all where none is named")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--lanes", action="store_true", help="run suites beside each other where no clock judges")
    parser.add_argument("--reports", type=Path, help="append reports to this file, as lines of JSON; print no page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small models run faster so
    names = options.suite or list(SUITES)
    reports: list[SuiteReport] = []
    if options.lanes:
        lanes = [[name for name in lane if name in names] for lane in LANES]
        reports += _run_lanes([lane for lane in lanes if lane], options.tier, options.seed)
        names = [name for name in names if not any(name in lane for lane in lanes)]
    for name in names:
        report = run_suite(name, Tier(options.tier), options.seed)
        reports.append(report)
        print(f"{name}: {len(report.faults)} faults in {report.cases:,} cases, {report.seconds:.1f} s", flush=True)
        if options.reports is not None:
            with options.reports.open("a", encoding="utf-8") as out:
                out.write(report.to_json() + "\n")
    if options.reports is None:
        print("\n".join(page(reports)))
    return 1 if any(report.faults for report in reports) else 0


def _run_lanes(lanes: Sequence[Sequence[str]], tier: int, seed: int) -> Iterator[SuiteReport]:
    """The reports of suites, each lane of which a process runs.

    Raises:
        RuntimeError: if a process ended without the reports of all its suites.
    """
    with tempfile.TemporaryDirectory(prefix="suites-") as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(lanes))]
        command = [sys.executable, "-m", "tests.suites", "--tier", str(tier), "--seed", str(seed)]
        running = [
            subprocess.Popen([*command, "--suite", *lane, "--reports", str(path)])
            for lane, path in zip(lanes, paths, strict=True)
        ]
        for process in running:
            process.wait()
        for lane, path in zip(lanes, paths, strict=True):
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if len(lines) < len(lane):
                raise RuntimeError(f"the process of {', '.join(lane)} ended with {len(lines)} reports of {len(lane)}")
            yield from map(SuiteReport.from_json, lines)


if __name__ == "__main__":
    sys.exit(main())
