"""The page at the end of a pytest run. tests/conftest.py imports the hook from here.

A test of a suite records its report as a property, which comes to the process that writes the summary also from the
workers of pytest-xdist.
"""

from __future__ import annotations

import pytest

from tests.suites.report import SuiteReport, page

PROPERTY = "suite_report"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the page where any suite ran."""
    tests = [test for kind in ("passed", "failed") for test in terminalreporter.stats.get(kind, ())]
    found = [str(value) for test in tests for name, value in test.user_properties if name == PROPERTY]
    reports = sorted((SuiteReport.from_json(text) for text in found), key=lambda report: report.suite)
    if reports:
        terminalreporter.section("reliability suites")
        for line in page(reports):
            terminalreporter.write_line(line)
