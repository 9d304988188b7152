"""Figures, numbers and tables."""

from __future__ import annotations

import pytest

from hookline.benchmark.report import Figure, number, percent, table


def test_percent_of_the_floor() -> None:
    assert Figure("tpot", 5.0, "ms", 4.0).percent == 80
    assert Figure("rate", 80.0, "tokens/s", 100.0, is_rate=True).percent == 80
    assert Figure("tpot", 5.0, "ms").percent is None
    assert Figure("tpot", -0.1, "ms", 1.0).percent is None
    assert Figure("tpot", 5.0, "ms", 4.0).to_dict() == {
        "value": 5.0,
        "unit": "ms",
        "floor": 4.0,
        "percent_of_floor": 80.0,
    }


@pytest.mark.parametrize(
    ("value", "text"), [(None, "n/a"), (4.8123, "4.812"), (0.00312, "0.00312"), (11593.4, "11,593"), (999.94, "999.9")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "n/a"), (84.6, "85 %"), (0.123, "0.12 %")])
def test_percents(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_table_lines_up() -> None:
    assert list(table(("a", "value"), [("long name", "1"), ("b", "12,345")])) == [
        "a           value",
        "long name       1",
        "b          12,345",
    ]
