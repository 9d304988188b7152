"""The server's figures for Prometheus: vLLM's names behind a prefix of ours, labels from closed sets alone.

All is counted in plain numbers by the one thread of the HTTP process, without a lock, and becomes Prometheus's families
when it is read. What the engine counts itself comes as absolute figures with its reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hookline.scheduling.output import Load
from hookline.serving.process.messages import Facts, Report

CONTENT_TYPE = CONTENT_TYPE_LATEST
# How a request can end, and what counts as the last of them where a caller's word is another.
END_REASONS = (
    *("stop", "length", "eos", "client_gone", "deadline", "invalid", "overloaded", "shutdown"),
    "engine_fault",
)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_OTHER = "other"

_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_WAITS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SPANS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)
_BATCH = (1.0, *(float(2**power) for power in range(3, 16)))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_CALLS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Kind(NamedTuple):
    """A histogram's help and the upper bounds of its buckets."""

    help: str
    bounds: Sequence[float]


_HISTOGRAMS: Mapping[str, _Kind] = MappingProxyType(
    {
        "time_to_first_token_seconds": _Kind("From a request's arrival to its first token.", _WAITS),
        "inter_token_latency_seconds": _Kind("Between two tokens of an answer.", _GAPS),
        "e2e_request_latency_seconds": _Kind("From a request's arrival to its end.", _SPANS),
        "request_queue_time_seconds": _Kind("From a request's arrival until it ran.", _SPANS),
        "request_prefill_time_seconds": _Kind("From when a request ran to its first token.", _SPANS),
        "request_decode_time_seconds": _Kind("From a request's first token to its end.", _SPANS),
        "request_inference_time_seconds": _Kind("From when a request ran to its end.", _SPANS),
        "request_prompt_tokens": _Kind("Tokens of a request's prompt.", _TOKENS),
        "request_generation_tokens": _Kind("Tokens that a request got.", _TOKENS),
        "request_params_n": _Kind("Answers that a request asks for.", _COUNTS),
        "request_params_max_tokens": _Kind("Most tokens that a request asks for.", _TOKENS),
        "iteration_tokens_total": _Kind("Tokens of a step of the engine.", _BATCH),
    }
)


class _Buckets:
    """A histogram's counts."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)


class _Families(Collector):
    """What a registry asks when it is read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


class Metrics:
    """The figures of one server. Cheap to feed: nothing here waits, and nothing is formatted before it is read.

    Args:
        prefix: of the names, without the colon.
        model_name: the label's value; "" takes the name that `set_facts` brings.
        registry: where to register; None makes one.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry | None = None, *, model_name: str = "") -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._facts: Facts | None = None
        self._load = Load()
        self._stages: dict[str, float] = {}
        self._received = self._prompt_tokens = self._generated_tokens = 0
        self._ended = dict.fromkeys(END_REASONS, 0)
        self._http: dict[tuple[str, str, str], int] = {}
        self._http_seconds: dict[tuple[str, str], _Buckets] = {}
        self._buckets = {name: _Buckets(kind.bounds) for name, kind in _HISTOGRAMS.items()}
        self._gaps = self._buckets["inter_token_latency_seconds"]
        self._steps = self._buckets["iteration_tokens_total"]
        self._registry = registry if registry is not None else CollectorRegistry()
        self._registry.register(_Families(self))

    def set_facts(self, facts: Facts) -> None:
        """What is served; before that, nothing of a model is shown."""
        self._facts = facts
        self._model_name = self._model_name or facts.name

    def stage(self, name: str, seconds: float) -> None:
        """How long a stage of the start took, or has taken until now."""
        self._stages[name] = seconds

    def take_report(self, report: Report) -> None:
        """The engine's own counts, the tokens of its steps, and those that it generated."""
        self._load = report.load
        for tokens in report.step_tokens:
            self._steps.observe(tokens)
        for delta in report.deltas:
            self._generated_tokens += len(delta.token_ids)

    def received(self) -> None:
        """A call for an answer has come; each must be followed by one `ended`."""
        self._received += 1

    def first_token(self, seconds: float) -> None:
        """The first token of a request is there, so long after it came."""
        self._buckets["time_to_first_token_seconds"].observe(seconds)

    def tokens(self, count: int, gap_seconds: float) -> None:
        """`count` more tokens of an answer are there, `gap_seconds` after those before them; not for its first."""
        if count:
            self._gaps.observe(gap_seconds / count, count)

    def ended(
        self,
        reason: str,
        *,
        prompt_tokens: int = 0,
        generated: int = 0,
        queued: float | None = None,
        prefill: float | None = None,
        decode: float | None = None,
        total: float = 0.0,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """A request has ended, whatever way.

        Args:
            reason: one of `END_REASONS`.
            prompt_tokens, generated: its tokens, over all of its answers.
            queued: seconds until it ran; None if it never did, and then only its end and reason are counted.
            prefill: seconds from there to its first token; None if none came.
            decode: seconds from there to its end.
            total: seconds from its arrival.
            n, max_tokens: as it asked.
        """
        self._ended[reason if reason in self._ended else END_REASONS[-1]] += 1
        if queued is None:
            return
        self._prompt_tokens += prompt_tokens
        values = {
            "e2e_request_latency_seconds": total,
            "request_queue_time_seconds": queued,
            "request_prefill_time_seconds": prefill,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": max(0.0, total - queued),
            "request_prompt_tokens": prompt_tokens,
            "request_generation_tokens": generated,
            "request_params_n": n,
            "request_params_max_tokens": max_tokens,
        }
        for name, value in values.items():
            if value is not None:
                self._buckets[name].observe(value)

    def http(self, route: str | None, method: str, status: int, seconds: float) -> None:
        """A call of HTTP was answered.

        Args:
            route: the template of the route that it matched, never a path as it came; None where none did.
            seconds: from its head to the end of its answer.
        """
        handler, method = route if route is not None else _OTHER, method if method in _METHODS else _OTHER
        self._count_call(handler, method, status)
        buckets = self._http_seconds.get((handler, method))
        if buckets is None:
            buckets = self._http_seconds[handler, method] = _Buckets(_CALLS)
        buckets.observe(seconds)

    def refused(self, status: int) -> None:
        """Something that did not become a call was answered: a head that is none, one connection too many."""
        self._count_call(_OTHER, _OTHER, status)

    def _count_call(self, handler: str, method: str, status: int) -> None:
        key = handler, method, f"{status // 100}xx" if 100 <= status < 600 else _OTHER
        self._http[key] = self._http.get(key, 0) + 1

    def render(self) -> bytes:
        """All of the registry, as `CONTENT_TYPE` says."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Everything as Prometheus's families."""
        # The names and labels of this one are those of the usual instrumentation of FastAPI, which has no prefix.
        calls = CounterMetricFamily("http_requests", "Calls by route.", labels=["handler", "method", "status"])
        for key, count in self._http.items():
            calls.add_metric(key, count)
        yield calls
        spans = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a call's head to the end of its answer, by route.",
            labels=["handler", "method"],
        )
        for labels, buckets in self._http_seconds.items():
            buckets.add_to(spans, labels)
        yield spans
        stages = self._gauge("startup_stage_seconds", "Seconds of each stage of the start.", ["stage"])
        for name, seconds in self._stages.items():
            stages.add_metric([name], seconds)
        yield stages
        if self._facts is not None:
            yield from self._infos(self._facts)
            yield from self._of_model(self._facts)

    def _infos(self, facts: Facts) -> Iterator[Metric]:
        plugin, _, version = facts.plugin.rpartition(" ")
        values = {"plugin": plugin or version, "version": version if plugin else ""}
        values["state"] = "in use"
        yield self._info("engine_plugin_info", "The plugin that serves the model.", values)
        values = {"model_name": self._model_name, "block_size": str(facts.block_size)}
        values |= {"num_gpu_blocks": str(facts.num_blocks), "enable_prefix_caching": str(facts.prefix_caching)}
        yield self._info("cache_config_info", "The cache of the engine.", values | {"dtype": facts.dtype})

    def _of_model(self, facts: Facts) -> Iterator[Metric]:
        load, labels = self._load, [self._model_name]
        for name, text, value in (
            ("num_requests_running", "Answers that hold cache.", load.running),
            ("num_requests_waiting", "Answers that wait for cache.", load.waiting),
            ("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", _share(load, facts)),
        ):
            gauge = self._gauge(name, text, ["model_name"])
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.", load.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.", load.hit_tokens),
            ("num_preemptions", "Answers that lost their cache to others.", load.preemptions),
            ("spec_decode_num_draft_tokens", "Tokens that were drafted.", load.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", load.accepted_tokens),
            ("prompt_tokens", "Prompt tokens of requests that ran and ended.", self._prompt_tokens),
            ("generation_tokens", "Tokens that were generated.", self._generated_tokens),
            ("request_received", "Requests that came.", self._received),
        ):
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            counter.add_metric(labels, value)
            yield counter
        ends = CounterMetricFamily(
            f"{self._prefix}:request_success", "Requests by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._ended.items():
            ends.add_metric([*labels, reason], count)
        yield ends
        for name, kind in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"{self._prefix}:{name}", kind.help, labels=["model_name"])
            self._buckets[name].add_to(histogram, labels)
            yield histogram

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=labels)

    def _info(self, name: str, text: str, values: Mapping[str, str]) -> GaugeMetricFamily:
        """A gauge of 1, whose labels are what it tells."""
        gauge = self._gauge(name, text, list(values))
        gauge.add_metric(list(values.values()), 1)
        return gauge


def _share(load: Load, facts: Facts) -> float:
    return load.used_blocks / facts.num_blocks if facts.num_blocks else 0.0
