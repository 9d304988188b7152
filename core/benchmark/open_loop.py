"""An open loop: requests come when they are due, whether the engine keeps up or not. In-process, without HTTP."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hookline.benchmark.measure import Choice, Clock, Server, check_complete, run_all
from hookline.benchmark.workload import Lengths, make_prompts, poisson_arrivals
from hookline.errors import HooklineError
from hookline.scheduling.output import RequestOutput

# Of a request's gaps between tokens, the share that must keep the objective.
_GOOD_SHARE = 0.99
# A request is due when the clock is so near: sleeping for less may not move it.
_CLOCK_STEP = 1e-6


@dataclass(slots=True)
class Trace:
    """One request's moments, in seconds from the start of the run.

    Attributes:
        due: when it was to come; waiting counts from here, also while a long step kept it from being submitted.
        length: its tokens.
        reports: when each report with new tokens came.
        tokens: how many there were at the last report.
    """

    due: float
    length: Lengths
    reports: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.reports[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between reports with new tokens."""
        return [later - sooner for sooner, later in zip(self.reports, self.reports[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level: most seconds to the first token, and between two tokens for 99 % of a request's gaps."""

    ttft: float
    itl: float

    def kept_by(self, trace: Trace) -> bool:
        """Whether a request was served well."""
        gaps = trace.gaps
        return trace.ttft <= self.ttft and (not gaps or percentile(gaps, _GOOD_SHARE) <= self.itl)


@dataclass(frozen=True, slots=True)
class Serving:
    """What an open loop gave, without its warm-up.

    Attributes:
        ttfts, gaps: in seconds: of each request, and between tokens of all.
        good: how many requests kept the objectives.
        seconds: from the first counted request to the end of the last.
        output_tokens: of the counted requests.
    """

    ttfts: Sequence[float]
    gaps: Sequence[float]
    good: int
    seconds: float
    output_tokens: int

    @property
    def goodput(self) -> float:
        """Requests a second that kept the objectives."""
        return self.good / self.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` (0 to 1) of them do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("percentile of nothing")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measure_serving(
    server: Server,
    vocab_size: int,
    work: Sequence[Lengths],
    rate: float,
    warmup: int,
    objectives: Objectives,
    choice: Choice,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Serving:
    """Sends `work` at Poisson arrivals and follows every token.

    Args:
        rate: requests a second on average.
        warmup: how many of the first requests are sent and not counted; a few more run before the clock starts.
        clock, sleep: of time, for tests.

    Raises:
        HooklineError: if a request ended early or with an error.
        UsageError: if the rate is no positive number.
    """
    dues, prompts = poisson_arrivals(len(work), rate, seed), make_prompts(work, vocab_size, seed)
    warm = [choice.params(min(4, length.output)) for length in work[:8]]
    run_all(server, prompts[:8], warm, clock)
    traces = _follow(server, prompts, [Trace(*pair) for pair in zip(dues, work, strict=True)], choice, clock, sleep)
    return summarise(traces[warmup:], objectives)


def _follow(
    server: Server,
    prompts: Sequence[list[int]],
    traces: Sequence[Trace],
    choice: Choice,
    clock: Clock,
    sleep: Callable[[float], None],
) -> Sequence[Trace]:
    """Submits each request when it is due, and steps while there is work."""
    start, sent = clock(), 0
    running: dict[str, Trace] = {}
    while sent < len(traces) or running:
        now = clock() - start
        while sent < len(traces) and traces[sent].due <= now + _CLOCK_STEP:
            params = choice.params(traces[sent].length.output, sent)
            running[server.add_request(prompts[sent], params, stream=True)] = traces[sent]
            sent += 1
        if server.has_work:
            outputs = server.step()
            _note(outputs, running, clock() - start)
        elif running:
            raise HooklineError(f"{len(running)} requests have not ended; the engine has no more work")
        else:
            sleep(max(0.0, traces[sent].due - now))
    return traces


def _note(outputs: Sequence[RequestOutput], running: dict[str, Trace], now: float) -> None:
    for output in outputs:
        trace, tokens = running[output.request_id], output.usage.completion_tokens
        if tokens > trace.tokens:
            trace.reports.append(now)
            trace.tokens = tokens
        if output.finished:
            check_complete(output, trace.length.output)
            del running[output.request_id]


def summarise(traces: Sequence[Trace], objectives: Objectives) -> Serving:
    """The figures of finished requests; there must be at least one."""
    return Serving(
        ttfts=[trace.ttft for trace in traces],
        gaps=[gap for trace in traces for gap in trace.gaps],
        good=sum(objectives.kept_by(trace) for trace in traces),
        seconds=max(trace.reports[-1] for trace in traces) - min(trace.due for trace in traces),
        output_tokens=sum(trace.tokens for trace in traces),
    )
