"""`/metrics`: vLLM's names, labels from closed sets, and figures that are those of what happened."""

from __future__ import annotations

import math
import timeit
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from hookline.scheduling.output import Load, OutputDelta
from hookline.serving.metrics import CONTENT_TYPE, END_REASONS, Metrics
from hookline.serving.process.messages import Facts, Report

# As vLLM's dashboards and autoscalers ask for them, by type; the samples of counters end with _total.
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}
COUNTERS = {"prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"}
COUNTERS |= {"request_success"}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "iteration_tokens_total"),
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def make_facts(**fields: Any) -> Facts:
    values: dict[str, Any] = {
        "name": "tiny",
        "architecture": "A",
        "plugin": "hookline-tiny 1.2",
        "device": "cpu",
        "dtype": "float32",
        "vocab_size": 320,
        "max_model_len": 512,
        "block_size": 16,
        "num_blocks": 200,
        "max_running": 64,
        "max_batch_tokens": 2048,
        "prefix_caching": True,
        "eos_token_ids": [258],
        "special_tokens": {},
    }
    return Facts(**values | fields)


def make_metrics(prefix: str = "hookline") -> Metrics:
    metrics = Metrics(prefix)
    metrics.set_facts(make_facts())
    return metrics


def samples(metrics: Metrics) -> Samples:
    """Value by name and labels, without the label of the model, which must be right."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            key = sample.name, tuple(sorted(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"hookline:{name}", tuple(sorted(labels.items()))]


@pytest.mark.parametrize("prefix", ["hookline", "vllm"])
def test_names_and_types_are_vllms(prefix: str) -> None:
    metrics = make_metrics(prefix)
    types = {family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())}
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            assert types[f"{prefix}:{name}"] == kind
    found = {name for name, _ in samples(metrics)}
    assert {f"{prefix}:{name}_total" for name in COUNTERS} <= found
    assert {f"{prefix}:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")} <= found
    assert not [name for name in found if name.endswith("_created")]
    assert CONTENT_TYPE.startswith("text/plain")


def test_load_is_that_of_the_last_report() -> None:
    metrics = make_metrics()
    load = Load(running=3, waiting=2, used_blocks=50, preemptions=4, queried_tokens=100, hit_tokens=64)
    metrics.take_report(Report(Load(running=9)))
    metrics.take_report(Report(load, step_tokens=[5, 3000, 70_000]))
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "num_preemptions_total") == 4
    assert value(metrics, "prefix_cache_queries_total") == 100
    assert value(metrics, "prefix_cache_hits_total") == 64
    assert value(metrics, "iteration_tokens_total_count") == 3
    assert value(metrics, "iteration_tokens_total_sum") == 73_005
    buckets = [value(metrics, "iteration_tokens_total_bucket", le=le) for le in ("1.0", "8.0", "4096.0", "+Inf")]
    assert buckets == [0, 1, 2, 3]


def test_tokens_are_counted_when_they_come() -> None:
    metrics = make_metrics()
    deltas = [OutputDelta("a", 0, "x", [1, 2, 3]), OutputDelta("b", 1, "", [4])]
    metrics.take_report(Report(Load(), numbers=[1, 2], deltas=deltas))
    metrics.take_report(Report(Load(), numbers=[1], deltas=deltas[:1]))
    assert value(metrics, "generation_tokens_total") == 7


def test_gaps_of_joined_deltas_are_shared_by_their_tokens() -> None:
    metrics = make_metrics()
    metrics.first_token(0.5)
    metrics.tokens(4, 0.08)
    metrics.tokens(1, 0.005)
    metrics.tokens(0, 9.0)
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 5
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.085)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.005") == 1  # a bound is within its bucket
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.02") == 5


def test_an_end_counts_once_and_under_a_known_reason() -> None:
    metrics = make_metrics()
    for reason in (*END_REASONS, "stop", "no such reason", "a" * 1000):
        metrics.received()
        metrics.ended(reason)
    counts = {reason: value(metrics, "request_success_total", finished_reason=reason) for reason in END_REASONS}
    assert counts == dict.fromkeys(END_REASONS, 1) | {"stop": 2, "engine_fault": 3}
    assert value(metrics, "request_received_total") == sum(counts.values())
    # None of them ever ran.
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


def test_what_a_request_took() -> None:
    metrics = make_metrics()
    metrics.ended(
        "length", prompt_tokens=7, generated=20, queued=1.0, prefill=0.5, decode=2.5, total=4.0, n=2, max_tokens=10
    )
    metrics.ended("client_gone", prompt_tokens=9, queued=0.25, total=0.75)
    sums = {name: value(metrics, f"{name}_sum") for name in HISTOGRAMS}
    assert sums["e2e_request_latency_seconds"] == 4.75
    assert sums["request_queue_time_seconds"] == 1.25
    assert sums["request_prefill_time_seconds"] == 0.5
    assert sums["request_decode_time_seconds"] == 2.5
    assert sums["request_inference_time_seconds"] == 3.5
    assert sums["request_prompt_tokens"] == value(metrics, "prompt_tokens_total") == 16
    assert sums["request_generation_tokens"] == 20
    assert sums["request_params_n"] == 3
    assert sums["request_params_max_tokens"] == 10
    assert value(metrics, "request_decode_time_seconds_count") == 1


def test_infos() -> None:
    metrics = make_metrics()
    infos = {name: dict(labels) for name, labels in samples(metrics) if name.endswith("_info")}
    plugin = infos["hookline:engine_plugin_info"]
    assert plugin == {"plugin": "hookline-tiny", "version": "1.2", "state": "in use"}
    cache = infos["hookline:cache_config_info"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "200")


def test_odd_calls_make_no_series() -> None:
    metrics = make_metrics()
    metrics.http("/v1/models", "GET", 200, 0.1)
    for number in range(10_000):
        metrics.http(None, f"FOO{number}", 405, 0.1)
        metrics.http("/v1/models", "GET", 200 + number % 99, 0.1)
        metrics.refused(400 + number % 99)
    series = {key: count for key, count in samples(metrics).items() if key[0] == "http_requests_total"}
    assert series == {
        ("http_requests_total", (("handler", "/v1/models"), ("method", "GET"), ("status", "2xx"))): 10_001,
        ("http_requests_total", (("handler", "other"), ("method", "other"), ("status", "4xx"))): 20_000,
    }
    spans = {key: count for key, count in samples(metrics).items() if key[0] == "http_request_duration_seconds_count"}
    assert spans == {
        ("http_request_duration_seconds_count", (("handler", "/v1/models"), ("method", "GET"))): 10_001,
        ("http_request_duration_seconds_count", (("handler", "other"), ("method", "other"))): 10_000,
    }


def test_calls_are_timed_by_route() -> None:
    metrics = make_metrics()
    for seconds in (0.004, 0.2, 700.0):
        metrics.http("/tokenize", "POST", 200, seconds)
    metrics.refused(431)  # nothing that began
    labels = {"handler": "/tokenize", "method": "POST"}
    known = samples(metrics)
    assert known["http_request_duration_seconds_sum", tuple(labels.items())] == pytest.approx(700.204)
    found = {
        le: known["http_request_duration_seconds_bucket", tuple(sorted((labels | {"le": le}).items()))]
        for le in ("0.005", "0.25", "600.0")
    }
    assert found == {"0.005": 1, "0.25": 2, "600.0": 2}


def test_before_the_engine_is_ready_only_the_start_is_shown() -> None:
    metrics = Metrics("hookline", model_name="served")
    metrics.stage("importing", 1.5)
    metrics.stage("importing", 2.0)
    assert samples(metrics) == {("hookline:startup_stage_seconds", (("stage", "importing"),)): 2.0}
    metrics.set_facts(make_facts(num_blocks=0))
    text = metrics.render().decode()
    assert 'hookline:kv_cache_usage_perc{model_name="served"} 0.0' in text
    assert 'model_name="tiny"' not in text


def test_labels_are_escaped() -> None:
    metrics = Metrics("hookline", model_name='a"b\\c\nd')
    metrics.set_facts(make_facts())
    [family] = [
        family
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.name == "hookline:num_requests_running"
    ]
    assert family.samples[0].labels == {"model_name": 'a"b\\c\nd'}


def test_a_registry_may_be_shared_with_others() -> None:
    registry = CollectorRegistry()
    Counter("own", "", registry=registry).inc()
    assert b"own_total 1.0" in Metrics("hookline", registry).render()


def test_counting_a_token_costs_no_more_than_a_few_microseconds() -> None:
    """A thread that counts 64 streams' tokens at each step has no time to give away."""
    metrics, rounds = make_metrics(), 2000
    seconds = min(timeit.repeat(lambda: metrics.tokens(1, 0.01), number=rounds, repeat=5)) / rounds
    assert seconds < 20e-6
    assert math.isclose(value(metrics, "inter_token_latency_seconds_sum"), rounds * 5 * 0.01)
