"""How many cases are planned for each suite, and why one does fewer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# By suite, at T1 and at T2; where the plan names one count it holds at both, and 0 where it names none.
# F5's follow from the routes there are.
DUE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "F1": (2_000, 100_000),
        "F2": (500, 20_000),
        "F3": (5_000, 200_000),
        "F4": (60, 5_060),
        "C1": (1_000, 20_000),
        "C2": (200, 1_000),
        "C3": (0, 128),
        "K1": (0, 100),
        "K2": (0, 10),
        "K3": (6, 6),
        "K4": (36, 36),
        "K5": (12, 12),
        "E1": (50, 50),
        "E2": (300, 20_000),
        "G1": (240, 20_040),
        "G2": (0, 5_000),
        "G3": (40, 40),
        "X1": (500, 500),
        "X2": (5_000, 500_000),
        "S1": (0, 172_800),
        "S2": (4, 4),
    }
)
_WHY: Mapping[tuple[str, int], str] = MappingProxyType(
    {
        ("K1", 2): "there are no worker ranks yet, which are three of its five targets",
    }
)


def told_cut(suite: str, tier: int, planned: int) -> str:
    """The line that says what a suite leaves out of the plan, and why; "" if it leaves out nothing."""
    due = DUE.get(suite, (0, 0))[tier - 1]
    if planned >= due:
        return ""
    why = _WHY.get((suite, tier), "nobody says why")
    return f"{suite} at T{tier}: planned: {due:,}; cut to {planned:,}: {why}"
