"""Where a decode step's time goes: a torch.profiler trace of some steps, and a table by kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hookline.benchmark.machine import synchronize
from hookline.benchmark.measure import Choice
from hookline.benchmark.report import table
from hookline.benchmark.workload import Lengths, fixed_lengths, make_prompts
from hookline.engine import Engine
from hookline.errors import HooklineError
from hookline.scheduling.output import RequestOutput

# Steps before the trace: every request must be past its prefill, and graphs and kernels past their first use.
_SETTLING_STEPS = 4
# Beyond those: a loop that runs ahead of the host has some tokens in flight.
_SPARE_TOKENS = 8
_NAME_WIDTH = 90
_ROWS = 40


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel's run, or one operator's own time on a CPU: microseconds."""

    name: str
    start: float
    end: float

    @property
    def microseconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One line of the table: of one name, calls and microseconds a step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a trace says of a step.

    Attributes:
        rows: by name, the longest first.
        steps: how many were traced.
        wall: microseconds of a step by the clock: for a GPU of as many steps just before, without the profiler, which
            makes the host slower than it is.
        busy: microseconds of a step in which the device, or a CPU's operators, ran.
        gap: median microseconds that a GPU was idle between two steps; None on a CPU.
    """

    rows: Sequence[KernelRow]
    steps: int
    wall: float
    busy: float
    gap: float | None

    def lines(self) -> Iterator[str]:
        """As a person reads it."""
        shown = [
            (row.name[:_NAME_WIDTH], f"{row.calls:.1f}", f"{row.microseconds:.1f}", f"{self._share(row):.1f} %")
            for row in self.rows[:_ROWS]
        ]
        yield from table(("kernel", "calls a step", "us a step", "share"), shown)
        if len(self.rows) > _ROWS:
            rest = sum(row.microseconds for row in self.rows[_ROWS:])
            yield f"and {len(self.rows) - _ROWS} more, {rest:.1f} us a step together"
        gap = "" if self.gap is None else f", GPU idle between steps {self.gap:.1f} us"
        yield f"{self.steps} steps: {self.wall:.1f} us a step by the clock, busy {self.busy:.1f} us{gap}"

    def _share(self, row: KernelRow) -> float:
        total = sum(row.microseconds for row in self.rows)
        return 100 * row.microseconds / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "steps": self.steps,
            "wall_us": self.wall,
            "busy_us": self.busy,
            "gap_us": self.gap,
            "kernels": [
                {"name": row.name, "calls": row.calls, "us": row.microseconds, "percent": self._share(row)}
                for row in self.rows
            ],
        }


def profile_decode(engine: Engine, batch: int, length: Lengths, choice: Choice, steps: int, file: Path) -> StepProfile:
    """Traces `steps` decode steps of a batch that has its prefill behind it, and writes the trace to `file`.

    The requests are reported at each token, so that it is known when all decode, and are aborted at the end.

    Raises:
        HooklineError: if a request ends too soon, because the context is too short or with an error.
    """
    device = engine.loaded.opened.model.device
    budget = engine.config.max_batch_tokens
    prefill_steps = -(-batch * length.prompt // max(1, budget - batch)) + 1  # in which the first ones decode already
    longest = min(engine.max_model_len - length.prompt, prefill_steps + _SETTLING_STEPS + 2 * steps + _SPARE_TOKENS)
    prompts = make_prompts(fixed_lengths(batch, length.prompt, longest), engine.vocab_size)
    ids = [engine.add_request(prompt, choice.params(longest, n), stream=True) for n, prompt in enumerate(prompts)]
    try:
        _settle(engine, ids)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        plain = _time_steps(engine, steps, device)
        with profile(activities=activities) as trace:
            traced = _time_steps(engine, steps, device)
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    trace.export_chrome_trace(str(file))
    spans = list(_device_spans(trace)) if device.type == "cuda" else []
    if spans:
        return from_spans(spans, steps, plain)
    return _from_operators(trace, steps, traced)


def _time_steps(engine: Engine, steps: int, device: torch.device) -> float:
    """Microseconds of so many steps."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        _step(engine)
    synchronize(device)
    return (time.perf_counter() - start) * 1e6


def _settle(engine: Engine, ids: Iterable[str]) -> None:
    """Steps until every request has had a token, and a few times more."""
    waiting = set(ids)
    while waiting:
        waiting -= {output.request_id for output in _step(engine) if output.usage.completion_tokens}
    for _ in range(_SETTLING_STEPS):
        _step(engine)


def _step(engine: Engine) -> list[RequestOutput]:
    """A step in which no request may end: the table would be of a smaller batch, or of none."""
    outputs = engine.step()
    ended = [output for output in outputs if output.finished]
    if ended or not engine.has_work:
        raise HooklineError(
            f"{len(ended)} requests ended before the decode steps were traced: {ended[0].error if ended else None}",
            hint="Without an error there: raise --max-model-len, or profile a smaller batch or shorter prompts.",
        )
    return outputs


def _device_spans(trace: profile) -> Iterator[Span]:
    """What ran on the GPU: kernels, copies and fills; ranges that only carry a name run nothing."""
    events: Iterable[Any] = trace.events() or ()  # type: ignore[no-untyped-call]
    for event in events:
        on_device = event.device_type.name != "CPU"
        if on_device and not getattr(event, "is_user_annotation", False):
            yield Span(event.name, event.time_range.start, event.time_range.end)


def from_spans(spans: Sequence[Span], steps: int, wall: float) -> StepProfile:
    """A GPU's profile.

    Args:
        spans: of `steps` steps, in any order; at least one.
        steps: how many steps they are of.
        wall: microseconds of all steps by the clock.
    """
    idle, busy, end = list[float](), 0.0, min(span.start for span in spans)
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > end:
            idle.append(span.start - end)
        busy += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    # Steps follow each other on the device in no marked way, but the host lets it wait longest between them.
    between = [*sorted(idle, reverse=True), *[0.0] * steps][: max(1, steps - 1)]
    gap = statistics.median(between)
    times = [(span.name, 1, span.microseconds) for span in spans]
    return StepProfile(_rows(times, steps), steps, wall / steps, busy / steps, gap)


def _from_operators(trace: profile, steps: int, wall: float) -> StepProfile:
    """A CPU's profile: each operator's own time, its callees' left out."""
    times = [(one.key, one.count, one.self_cpu_time_total) for one in trace.key_averages()]
    busy = sum(microseconds for _, _, microseconds in times)
    times.append(("(Python, and kernels of our own)", steps, max(0.0, wall - busy)))
    return StepProfile(_rows(times, steps), steps, wall / steps, busy / steps, None)


def _rows(times: Iterable[tuple[str, int, float]], steps: int) -> list[KernelRow]:
    calls, total = defaultdict[str, int](int), defaultdict[str, float](float)
    for name, count, microseconds in times:
        calls[name] += count
        total[name] += microseconds
    order = sorted(total, key=lambda name: -total[name])
    return [KernelRow(name, calls[name] / steps, total[name] / steps) for name in order]
