"""A model's costs are those of its parameters and cache, and a report says all that a figure depends on."""

from __future__ import annotations

import json

import pytest

from hookline.benchmark.figures import concurrent_requests, latency_figures, serving_figures, throughput_figures
from hookline.benchmark.measure import Choice, Latency, Throughput, measure_latency
from hookline.benchmark.open_loop import Serving
from hookline.benchmark.roofline import Limits, decode_floor
from hookline.benchmark.setup import Bench, early_limits
from hookline.benchmark.workload import Lengths, fixed_lengths
from hookline.config import EngineConfig
from hookline.errors import UsageError
from tests.benchmark.conftest import LIMITS, start_bench
from tests.conftest import TINY

HIDDEN, FEED, VOCAB, LAYERS = (
    TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
)
HEAD_DIM = HIDDEN // TINY["num_attention_heads"]
KV_WIDTH = TINY["num_key_value_heads"] * HEAD_DIM
LAYER = 2 * HIDDEN * (HIDDEN + KV_WIDTH) + 3 * HIDDEN * FEED + 2 * HIDDEN


def test_costs_of_a_model_with_a_head_of_its_own(bench: Bench) -> None:
    costs = bench.costs
    assert costs.layer_weights == LAYERS * LAYER + HIDDEN
    assert costs.layer_bytes == 4 * costs.layer_weights
    assert (costs.head_weights, costs.head_bytes) == (VOCAB * HIDDEN, 4 * VOCAB * HIDDEN)
    assert costs.cache_bytes == LAYERS * 2 * KV_WIDTH * 4
    assert costs.attention_width == LAYERS * HIDDEN
    assert costs.num_experts == 0
    # The embedding is all that a step does not read.
    assert bench.engine.memory_plan.weights == costs.step_bytes(1) + 4 * VOCAB * HIDDEN


def test_a_tied_embedding_is_read_as_the_head() -> None:
    tied = start_bench(tie_word_embeddings=True)
    with tied.engine:
        assert tied.costs.head_weights == VOCAB * HIDDEN
        assert tied.engine.memory_plan.weights == tied.costs.step_bytes(1)


def test_random_weights_come_without_a_folder_and_are_no_zeros(bench: Bench) -> None:
    reader = bench.engine.loaded.opened.reader
    assert (reader.weights_format, reader.files) == ("random", ())
    matrices = [tensor for tensor in reader.tensors() if len(tensor.shape) == 2]
    assert all(0.015 < float(tensor.load().std()) < 0.025 for tensor in matrices)


def test_the_engine_is_measured_and_left_empty(bench: Bench) -> None:
    engine = bench.engine
    found = measure_latency(engine, engine.vocab_size, 3, Lengths(9, 5), 1, Choice())
    assert found.first > 0 and found.whole > 0
    assert not engine.has_work
    assert engine.pool.num_referenced == 0


def test_too_long_a_workload_is_refused_before_it_runs(bench: Bench) -> None:
    bench.check_fits([Lengths(500, 12)])
    with pytest.raises(UsageError, match="513 tokens"):
        bench.check_fits([Lengths(1, 2), Lengths(500, 13)])


def test_latency_figures_have_the_floor_of_the_mean_context(bench: Bench) -> None:
    found = Latency(first=0.5, whole=1.77, batch=4, output=128)
    figures = {figure.name: figure for figure in latency_figures(found, 1024, bench.costs, LIMITS)}
    floor = decode_floor(bench.costs, LIMITS, 4, 1088)
    assert floor is not None
    assert figures["tpot"].value == pytest.approx(10.0)
    assert figures["tpot"].floor == pytest.approx(1e3 * floor)
    assert figures["tpot"].percent == pytest.approx(100 * floor / 0.01)
    assert figures["decode_rate"].percent == pytest.approx(figures["tpot"].percent)
    assert figures["prefill_batch"].percent == pytest.approx(figures["prefill_rate"].percent)
    assert figures["total"].value == 1.77
    only = [figure.name for figure in latency_figures(Latency(0.5, 0.5, 1, 1), 8, bench.costs, LIMITS)]
    assert only == ["prefill_batch", "prefill_rate"]


def test_throughput_figures_agree_with_each_other(bench: Bench) -> None:
    work = fixed_lengths(10, 20, 30)
    figures = throughput_figures(Throughput(2.0, 10, 200, 300), work, 10, bench.costs, LIMITS)
    by_name = {figure.name: figure for figure in figures}
    assert by_name["output_rate"].value == 150
    assert by_name["request_rate"].value == 5
    assert by_name["total_rate"].value == 250
    assert len({round(figure.percent or 0, 9) for figure in figures}) == 1
    assert all(
        figure.floor is None
        for figure in throughput_figures(Throughput(2.0, 10, 200, 300), work, 10, bench.costs, Limits())
    )


def test_requests_that_run_together_are_bound_by_limit_cache_and_number() -> None:
    work = fixed_lengths(1000, 1000, 1000)
    assert concurrent_requests(work, 512, 10**9) == 512
    assert concurrent_requests(work, 512, 150_000) == 100
    assert concurrent_requests(work[:8], 512, 10**9) == 8
    assert concurrent_requests(work, 512, 10) == 1


def test_serving_figures(bench: Bench) -> None:
    found = Serving(
        ttfts=[0.1, 0.2, 0.4], e2els=[1.0, 2.0, 3.0], tpots=[0.02], gaps=[0.01] * 99 + [0.5], good=2, seconds=4.0,
        input_tokens=60, output_tokens=100,
    )  # fmt: skip
    figures = {f.name: f for f in serving_figures(found, [Lengths(8, 8)], bench.costs, LIMITS)}
    assert [figures[name].value for name in ("median_ttft_ms", "p99_ttft_ms")] == pytest.approx([200.0, 400.0])
    assert [figures[name].value for name in ("median_itl_ms", "p99_itl_ms")] == pytest.approx([10.0, 10.0])
    assert [figures[name].value for name in ("mean_tpot_ms", "mean_e2el_ms")] == pytest.approx([20.0, 2000.0])
    assert figures["request_goodput"].value == 0.5
    assert figures["good_requests"].value == pytest.approx(200 / 3)
    assert (figures["output_throughput"].value, figures["total_token_throughput"].value) == (25, 40)
    assert figures["mean_ttft_ms"].percent is not None and figures["mean_e2el_ms"].percent is None
    silent = Serving([0.1], [0.1], [], [], 1, 1.0, 8, 1)
    assert not [f for f in serving_figures(silent, [Lengths(8, 1)], bench.costs, LIMITS) if "itl" in f.name]


def test_report_holds_machine_versions_shape_settings_and_limits(bench: Bench) -> None:
    figures = latency_figures(Latency(0.5, 1.0, 1, 6), 16, bench.costs, LIMITS)
    report = bench.report("latency", {"batch": 1}, figures, notes=("a note",))
    record = json.loads(json.dumps(report.to_dict()))
    assert record["schema"] == "hookline.bench/1"
    assert {"gpu", "gpu_memory", "driver", "cpu", "cores"} <= record["machine"].keys()
    assert record["versions"]["hookline"] and record["versions"]["torch"] and record["versions"]["python"]
    assert record["model"]["config"]["hidden_size"] == HIDDEN
    assert record["model"]["costs"]["head_weights"] == VOCAB * HIDDEN
    assert record["settings"]["prefix_caching"] is False
    assert record["settings"]["dtype"] == "float32"
    assert record["settings"]["workload"] == {"batch": 1}
    assert record["limits"]["bandwidth"] == 4.3e12
    assert record["memory"]["num_blocks"] > 0
    assert record["results"]["tpot"].keys() == {"value", "unit", "floor", "percent_of_floor"}
    text = "\n".join(report.lines())
    assert "tpot" in text and "a note" in text and "4.3 TB/s" in text


def test_the_roofline_is_measured_only_when_asked_for() -> None:
    config = EngineConfig("x", device="cpu")
    assert early_limits(config, measured=False) is None
    found = early_limits(config, measured=True)
    assert found is not None and found.bandwidth and found.peak and found.attention
    assert 1e8 < found.bandwidth < 1e13
    assert found.attention < found.peak
