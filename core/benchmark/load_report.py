"""Figures of serving under load by the names that the field's own tools have, and the report of a run over HTTP.

vLLM's `vllm bench serve` calls them so: https://docs.vllm.ai/en/latest/cli/bench/serve.html
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.benchmark.open_loop import Serving, percentile
from hookline.benchmark.report import SCHEMA, Figure, number, table


def load_figures(found: Serving, first_floor: float | None = None, step_floor: float | None = None) -> list[Figure]:
    """Throughput, goodput and times: to the first token, for a token, between tokens, and to the end (E2EL).

    Args:
        first_floor, step_floor: the least seconds to a first token and for each further one, where they are known.
    """
    requests, seconds = len(found.ttfts), found.seconds
    total = found.input_tokens + found.output_tokens
    times = (
        ("ttft", found.ttfts, first_floor),
        ("tpot", found.tpots, step_floor),
        ("itl", found.gaps, step_floor),
        ("e2el", found.e2els, None),
    )
    return [
        Figure("completed", requests, "requests"),
        Figure("duration", seconds, "s"),
        Figure("total_input_tokens", found.input_tokens, "tokens"),
        Figure("total_output_tokens", found.output_tokens, "tokens"),
        Figure("request_throughput", requests / seconds, "requests/s"),
        Figure("request_goodput", found.goodput, "requests/s"),
        Figure("good_requests", 100 * found.good / requests, "%"),
        Figure("output_throughput", found.output_tokens / seconds, "tokens/s"),
        Figure("total_token_throughput", total / seconds, "tokens/s"),
        *(figure for name, values, floor in times for figure in _times(name, values, floor)),
    ]


def _times(name: str, seconds: Sequence[float], floor: float | None) -> list[Figure]:
    if not seconds:
        return []
    least = floor and 1e3 * floor
    values = {"mean": statistics.fmean(seconds), "median": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    return [Figure(f"{kind}_{name}_ms", 1e3 * value, "ms", least) for kind, value in values.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A run over HTTP.

    Attributes:
        server: its address, and the model by the name that it serves.
        workload: the settings.
        figures: what came out.
        failures: how often each error occurred.
        notes: what a reader must know to read the figures right.
    """

    server: Mapping[str, Any]
    workload: Mapping[str, Any]
    figures: Sequence[Figure]
    failures: Mapping[str, int]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "schema": SCHEMA,
            "measure": "serve",
            "server": dict(self.server),
            "settings": {"workload": dict(self.workload)},
            "results": {figure.name: figure.to_dict() for figure in self.figures},
            "failures": dict(self.failures),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """As a person reads it."""
        yield f"serve of {self.server['model']} at {self.server['url']}"
        yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.workload.items())
        yield ""
        rows = [(figure.name.replace("_", " "), number(figure.value), figure.unit) for figure in self.figures]
        yield from table(("", "value", "unit"), rows)
        yield ""
        for error, count in self.failures.items():
            yield f"failed {count} times: {error}"
        yield from self.notes
