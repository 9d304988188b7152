"""Results as a table for people and as JSON of a fixed format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookline.benchmark.roofline import Limits

if TYPE_CHECKING:
    from hookline.benchmark.step_profile import StepProfile

SCHEMA = "hookline.bench/1"


@dataclass(frozen=True, slots=True)
class Figure:
    """One result.

    Attributes:
        name: what it is, as JSON's key.
        value: in `unit`.
        unit: `s`, `ms`, `tokens/s`, `requests/s` or another.
        floor: what the hardware allows: the least time, or for a rate the highest; None where it is not known.
        is_rate: whether more is better.
    """

    name: str
    value: float
    unit: str
    floor: float | None = None
    is_rate: bool = False

    @property
    def percent(self) -> float | None:
        """How much of what the hardware allows was reached; over 100 the floor or the measure is wrong."""
        if not self.floor or self.value <= 0:
            return None
        return 100 * (self.value / self.floor if self.is_rate else self.floor / self.value)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"value": self.value, "unit": self.unit, "floor": self.floor, "percent_of_floor": self.percent}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run: what was measured, on what, with which settings, and what came out.

    Attributes:
        measure: `latency`, `throughput` or `serve`.
        model: name, source (`checkpoint`, `shape` or `config`), the fields of its config, its costs.
        settings: of the engine and of the workload.
        memory: the memory plan's fields, in bytes.
        limits: what the floors were computed with.
        notes: what a reader must know to read the figures right.
        profile: where a decode step's time goes, if that was asked for.
    """

    measure: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]
    limits: Limits
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    profile: StepProfile | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "schema": SCHEMA,
            "measure": self.measure,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "model": dict(self.model),
            "settings": dict(self.settings),
            "memory": dict(self.memory),
            "limits": dataclasses.asdict(self.limits),
            "results": {figure.name: figure.to_dict() for figure in self.figures},
            "notes": list(self.notes),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }

    def lines(self) -> Iterator[str]:
        """As a person reads it."""
        machine, versions, settings = self.machine, self.versions, self.settings
        where = machine["gpu"] or machine["cpu"]
        yield f"{self.measure} of {self.model['name']}, {settings['dtype']}, on {where}"
        yield ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        work = settings["workload"]
        yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in work.items() if value is not None)
        yield ""
        yield from table(
            ("", "value", "unit", "floor", "% of floor"),
            [
                (f.name.replace("_", " "), number(f.value), f.unit, number(f.floor), percent(f.percent))
                for f in self.figures
            ],
        )
        yield ""
        yield _limits_line(self.limits)
        yield from self.notes
        if self.profile is not None:
            yield ""
            yield from self.profile.lines()


def number(value: float | None) -> str:
    """Four digits or more; `n/a` for what is not known."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """Whole percents, or two digits of less than one."""
    if value is None:
        return "n/a"
    return f"{value:.0f} %" if value >= 1 else f"{value:.2g} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, *rows):
        cells = [f"{line[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _limits_line(limits: Limits) -> str:
    if limits.bandwidth is None:
        return (
            "Floors need the device's bandwidth and peak, which are not known here: --measure-roofline measures them."
        )
    peak = "unknown" if limits.peak is None else f"{limits.peak / 1e12:.4g} TFLOP/s"
    return f"Floors with {limits.bandwidth / 1e12:.3g} TB/s and {peak} ({limits.source})."
