"""Serving under load, in-process and without HTTP.

In an open loop requests come when they are due, whether the engine keeps up or not; in a closed one a new request comes
when one ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hookline.benchmark.measure import Choice, Clock, Server, check_complete, run_all
from hookline.benchmark.workload import Lengths, make_prompts, poisson_arrivals
from hookline.errors import HooklineError, UsageError
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

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.reports[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where there is no more than one."""
        return (self.reports[-1] - self.reports[0]) / (self.tokens - 1) if self.tokens > 1 else None


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
    """What a loop gave, without its warm-up.

    Attributes:
        ttfts, e2els: in seconds, of each request, to its first and to its last token.
        tpots: seconds for a token after the first, of each request with more than one.
        gaps: seconds between tokens of all requests.
        good: how many requests kept the objectives.
        seconds: from the first counted request to the end of the last.
        input_tokens, output_tokens: of the counted requests.
    """

    ttfts: Sequence[float]
    e2els: Sequence[float]
    tpots: Sequence[float]
    gaps: Sequence[float]
    good: int
    seconds: float
    input_tokens: int
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
    rate: float | None,
    warmup: int,
    objectives: Objectives,
    choice: Choice,
    *,
    concurrency: int | None = None,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Serving:
    """Sends `work`, at Poisson arrivals or as others end, and follows every token.

    Args:
        rate: requests a second on average; None for a closed loop.
        concurrency: how many requests a closed loop has running at a time.
        warmup: how many of the first requests are sent and not counted; a few more run before the clock starts.
        clock, sleep: of time, for tests.

    Raises:
        HooklineError: if a request ended early or with an error.
        UsageError: if the rate is no positive number, or both or none of rate and concurrency are given.
    """
    traces, prompts = make_traces(work, rate, concurrency, seed), make_prompts(work, vocab_size, seed)
    warm = [choice.params(min(4, length.output)) for length in work[:8]]
    run_all(server, prompts[:8], warm, clock)
    _follow(server, prompts, traces, choice, concurrency, clock, sleep)
    return summarise(traces[warmup:], objectives)


def make_traces(work: Sequence[Lengths], rate: float | None, concurrency: int | None, seed: int = 0) -> list[Trace]:
    """A trace for each of `work`, due at Poisson arrivals; in a closed loop they are due when they are sent.

    Raises:
        UsageError: if the rate is no positive number, or both or none of rate and concurrency are given.
    """
    if (rate is None) == (concurrency is None):
        problem = "neither --rate nor --concurrency is" if rate is None else "--rate and --concurrency are both"
        raise UsageError(
            f"{problem} given", hint="Give --rate for requests that come when they are due, or --concurrency."
        )
    dues = [0.0] * len(work) if rate is None else poisson_arrivals(len(work), rate, seed)
    return [Trace(*pair) for pair in zip(dues, work, strict=True)]


def is_due(trace: Trace, concurrency: int | None, running: int, now: float) -> bool:
    """Whether to send a request, the next, while others run; in a closed loop it becomes due now."""
    if concurrency is None:
        return trace.due <= now + _CLOCK_STEP
    if running < concurrency:
        trace.due = now
    return running < concurrency


def _follow(
    server: Server,
    prompts: Sequence[list[int]],
    traces: Sequence[Trace],
    choice: Choice,
    concurrency: int | None,
    clock: Clock,
    sleep: Callable[[float], None],
) -> None:
    """Submits each request when it is due, and steps while there is work."""
    start, sent = clock(), 0
    running: dict[str, Trace] = {}
    while sent < len(traces) or running:
        now = clock() - start
        while sent < len(traces) and is_due(traces[sent], concurrency, len(running), now):
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
        e2els=[trace.e2el for trace in traces],
        tpots=[trace.tpot for trace in traces if trace.tpot is not None],
        gaps=[gap for trace in traces for gap in trace.gaps],
        good=sum(objectives.kept_by(trace) for trace in traces),
        seconds=max(trace.reports[-1] for trace in traces) - min(trace.due for trace in traces),
        input_tokens=sum(trace.length.prompt for trace in traces),
        output_tokens=sum(trace.tokens for trace in traces),
    )
