"""`python -m tests.suites --tier 2`: runs suites one after the other, and ends with 1 if any failed."""

from __future__ import annotations

import argparse
import os
import sys

# As in tests/conftest.py: before anything imports triton or asks the hub.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.suites.registry import DEFAULT_SEED, SUITES, run_suite
from tests.suites.report import SuiteReport, Tier, page


def main(arguments: list[str] | None = None) -> int:
    """Runs what the arguments name; answers with the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description="Runs reliability suites.")
    parser.add_argument("--tier", type=int, choices=[int(tier) for tier in Tier], default=int(Tier.T1))
    parser.add_argument("--suite", nargs="+", action="extend", choices=sorted(SUITES), help="all where none is named")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small models run faster so
    reports: list[SuiteReport] = []
    for name in options.suite or SUITES:
        report = run_suite(name, Tier(options.tier), options.seed)
        reports.append(report)
        print(f"{name}: {len(report.faults)} faults in {report.cases:,} cases, {report.seconds:.1f} s", flush=True)
    print("\n".join(page(reports)))
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
