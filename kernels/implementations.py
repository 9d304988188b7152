"""The small table of implementations that a kernel file keeps, and the choice from it.

A table is a tuple of `Implementation` in order of preference. `supports(query)` answers `None`, or the reason why this
implementation cannot take the call; the query is a tuple of what the file's rows decide by, the input tensor first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import triton

Query = TypeVar("Query")
Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[Query, Run]):
    """One way to compute an operation: its name, when it can be used, and the function."""

    name: str
    supports: Callable[[Query], str | None]
    run: Run


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation a call takes, and why those before it in the table were passed over."""

    name: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return f"{self.name} ({reasons})" if reasons else self.name


def choose(table: Sequence[Implementation[Query, Run]], query: Query, forced: str | None = None) -> Run:
    """The function of the first row that supports the query, or of the row that is named by `forced`.

    Raises:
        ValueError: no row has that name, the named one does not support the query, or none does.
    """
    if forced is None:
        for row in table:
            if row.supports(query) is None:
                return row.run
    for row in table:
        if row.name == forced:
            reason = row.supports(query)
            if reason is None:
                return row.run
            raise ValueError(f"implementation {forced!r} cannot be used here: {reason}")
    if forced is not None:
        known = ", ".join(row.name for row in table)
        raise ValueError(f"unknown implementation {forced!r}; known here: {known}")
    reasons = "; ".join(f"{row.name}: {row.supports(query)}" for row in table)
    raise ValueError(f"no implementation can be used here: {reasons}")


def explain(table: Sequence[Implementation[Query, Run]], query: Query, forced: str | None = None) -> Choice:
    """What `choose` would choose and why; raises as it does."""
    run = choose(table, query, forced)
    passed_over: list[tuple[str, str]] = []
    for row in table:
        if row.run is run and forced in (None, row.name):
            return Choice(row.name, tuple(passed_over))
        passed_over.append((row.name, row.supports(query) or f"{forced!r} was asked for"))
    raise AssertionError("choose answers with a row of the table")


def on_cpu(query: tuple[Any, ...]) -> str | None:
    """For rows that are written for the CPU."""
    device = query[0].device
    return None if device.type == "cpu" else f"it is for the CPU and the tensor is on {device}"


def by_triton(query: tuple[Any, ...]) -> str | None:
    """For rows that run a Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    x = query[0]
    if x.is_cuda or triton.knobs.runtime.interpret:
        return None
    return f"Triton needs a GPU and the tensor is on {x.device}"


def anywhere(query: tuple[Any, ...]) -> str | None:
    """For references, which run on every device."""
    return None
