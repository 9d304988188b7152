"""Every suite at its T1 size. What it did is on the page at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.suites.registry import SUITES, run_suite
from tests.suites.report import Tier
from tests.suites.reporting import PROPERTY


@pytest.mark.parametrize("name", SUITES)
def test_suite(name: str, record_property: Callable[[str, object], None]) -> None:
    report = run_suite(name, Tier.T1)
    record_property(PROPERTY, report.to_json())
    assert not report.faults, "\n".join(report.faults)
