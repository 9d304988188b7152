"""Where a decode step's time goes: a torch.profiler trace of some steps, a table by kernel, and one by product."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hookline.benchmark.costs import expert_tensors, model_costs
from hookline.benchmark.machine import synchronize
from hookline.benchmark.measure import SETTLING_STEPS, SPARE_STEPS, Choice, settling_steps
from hookline.benchmark.products import ProductTime, time_products
from hookline.benchmark.report import table
from hookline.benchmark.roofline import Speculation
from hookline.benchmark.traffic import Traffic, decode_traffic
from hookline.benchmark.workload import Lengths, fixed_lengths, make_prompts
from hookline.engine import Engine
from hookline.errors import HooklineError
from hookline.execution.decode_step import bucket_sizes

_NAME_WIDTH = 70
_ROWS = 40
# What the vendor's library calls its matrix products, beside torch's names for them on a CPU.
_LIBRARY = re.compile(r"gemm|gemv|nvjet|cutlass|splitk|xmma|aten::(mm|addmm|bmm)$", re.IGNORECASE)


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
    """One line of the table, of one name.

    Attributes:
        calls, microseconds: a step.
        bytes: that its calls in a step are given, see `Traffic`; None where that is not known.
    """

    name: str
    calls: float
    microseconds: float
    bytes: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """What it reached."""
        return None if self.bytes is None or not self.microseconds else self.bytes / self.microseconds * 1e6


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
        library: the rows of the vendor library's products added up, since their bytes are only known together.
        products: each product of the step, timed alone.
    """

    rows: Sequence[KernelRow]
    steps: int
    wall: float
    busy: float
    gap: float | None
    library: KernelRow | None = None
    products: Sequence[ProductTime] = ()

    def lines(self) -> Iterator[str]:
        """As a person reads it."""
        rows = [*self.rows[:_ROWS], *([] if self.library is None else [self.library])]
        shown = [
            (
                *(row.name[:_NAME_WIDTH], f"{row.calls:.1f}", f"{row.microseconds:.1f}", f"{self._share(row):.1f} %"),
                *_speed(row.bytes, row.bytes_per_second),
            )
            for row in rows
        ]
        yield from table(("kernel", "calls a step", "us a step", "share", "MB a step", "TB/s"), shown)
        if len(self.rows) > _ROWS:
            rest = sum(row.microseconds for row in self.rows[_ROWS:])
            yield f"and {len(self.rows) - _ROWS} more, {rest:.1f} us a step together"
        gap = "" if self.gap is None else f", GPU idle between steps {self.gap:.1f} us"
        yield f"{self.steps} steps: {self.wall:.1f} us a step by the clock, busy {self.busy:.1f} us{gap}"
        if self.products:
            yield ""
            yield from self._product_lines()

    def _product_lines(self) -> Iterator[str]:
        shown = [
            (
                *(one.name, str(one.rows), f"[{one.shape[0]}, {one.shape[1]}]", str(one.count)),
                f"{one.microseconds:.1f}",
                *(f"{one.count * one.microseconds:.1f}", *_speed(one.bytes, one.bytes_per_second)),
            )
            for one in self.products
        ]
        header = ("product, alone", "rows", "weight", "calls a step", "us", "us a step", "MB", "TB/s")
        yield from table(header, shown)

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
            "kernels": [self._row(row) for row in self.rows],
            "library": None if self.library is None else self._row(self.library),
            "products": [
                {**dataclasses.asdict(one), "bytes_per_second": one.bytes_per_second} for one in self.products
            ],
        }

    def _row(self, row: KernelRow) -> dict[str, Any]:
        return {
            "name": row.name,
            "calls": row.calls,
            "us": row.microseconds,
            "percent": self._share(row),
            "bytes": row.bytes,
            "bytes_per_second": row.bytes_per_second,
        }


def _speed(nbytes: float | None, bytes_per_second: float | None) -> tuple[str, str]:
    """Megabytes and terabytes a second."""
    if nbytes is None or bytes_per_second is None:
        return "", ""
    return f"{nbytes / 1e6:.4g}", f"{bytes_per_second / 1e12:.3g}"


def profile_decode(engine: Engine, batch: int, length: Lengths, choice: Choice, steps: int, file: Path) -> StepProfile:
    """Traces `steps` decode steps of a batch that has its prefill behind it, and writes the trace to `file`.

    The requests are reported at each token, so that it is known when all decode, and are aborted at the end. Then the
    bytes of each kernel are counted in a step without a graph, and the products timed alone.

    Raises:
        HooklineError: if a request ends too soon, because the context is too short or with an error.
    """
    device, speculative = engine.loaded.opened.model.device, engine.config.speculative
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    settling = settling_steps(batch, length.prompt, drafts, engine.config.max_batch_tokens)
    most = (settling + 2 * steps + SPARE_STEPS) * (1 + drafts)
    longest = min(engine.max_model_len - length.prompt, most)
    prompts = make_prompts(fixed_lengths(batch, length.prompt, longest), engine.vocab_size)
    ids = [engine.add_request(prompt, choice.params(longest, n), stream=True) for n, prompt in enumerate(prompts)]
    counts = dict.fromkeys(ids, 0)
    try:
        _settle(engine, counts)
        before = statistics.fmean(counts.values())
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        plain = _time_steps(engine, steps, counts)
        with profile(activities=activities) as trace:
            traced = _time_steps(engine, steps, counts)
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    trace.export_chrome_trace(str(file))
    spans = list(_device_spans(trace)) if device.type == "cuda" else []
    found = from_spans(spans, steps, plain) if spans else _from_operators(trace, steps, traced)
    half_way = (before + 3 * statistics.fmean(counts.values())) / 4  # of the traced steps, which are the second half
    return _with_bytes(found, engine, batch, length.prompt + round(half_way), drafts)


def _with_bytes(found: StepProfile, engine: Engine, batch: int, context: int, drafts: int) -> StepProfile:
    """The same with the bytes of each kernel, for contexts of so many tokens, and with each product."""
    opened, config = engine.loaded.opened, engine.config
    padded = batch
    if opened.model.device.type == "cuda" and config.cuda_graphs:
        padded = next(size for size in bucket_sizes(config.max_running) if size >= batch)
    costs = model_costs(opened)
    choices = Speculation(drafts, config.expert_routing == "correlated").choices(batch)
    experts = dict[int, int]()
    for is_draft, rows in ((False, choices), (True, batch)):
        share = costs.expert_share(rows)
        for one in expert_tensors(opened, is_draft):
            experts[one.data_ptr()] = int(share * one.numel() * one.element_size())
    longest, block_size = engine.max_model_len, config.block_size
    traffic = decode_traffic(opened.model, batch, padded, context, longest, block_size, experts, drafts)
    return dataclasses.replace(with_traffic(found, traffic), products=time_products(opened, padded, drafts))


def with_traffic(found: StepProfile, traffic: Traffic) -> StepProfile:
    """The same with the bytes of each kernel that is known, and with the library's products added up."""
    rows = [dataclasses.replace(row, bytes=traffic.kernels.get(row.name)) for row in found.rows]
    library = [row for row in rows if row.bytes is None and _LIBRARY.search(row.name)]
    if not library or not traffic.products:
        return dataclasses.replace(found, rows=rows)
    calls, microseconds = sum(row.calls for row in library), sum(row.microseconds for row in library)
    together = KernelRow("(the library's products together)", calls, microseconds, traffic.products)
    return dataclasses.replace(found, rows=rows, library=together)


def _time_steps(engine: Engine, steps: int, counts: dict[str, int]) -> float:
    """Microseconds of so many steps."""
    device = engine.loaded.opened.model.device
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        _step(engine, counts)
    synchronize(device)
    return (time.perf_counter() - start) * 1e6


def _settle(engine: Engine, counts: dict[str, int]) -> None:
    """Steps until every request has had a token, and a few times more."""
    settling = SETTLING_STEPS
    while settling:
        settling -= min(counts.values()) > 0
        _step(engine, counts)


def _step(engine: Engine, counts: dict[str, int]) -> None:
    """A step in which no request may end: the table would be of a smaller batch, or of none.

    Args:
        counts: output tokens of each request, brought up to date.
    """
    outputs = engine.step()
    ended = [output for output in outputs if output.finished]
    if ended or not engine.has_work:
        raise HooklineError(
            f"{len(ended)} requests ended before the decode steps were traced: {ended[0].error if ended else None}",
            hint="Without an error there: raise --max-model-len, or profile a smaller batch or shorter prompts.",
        )
    counts.update((output.request_id, output.usage.completion_tokens) for output in outputs)


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
