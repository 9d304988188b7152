"""Distinct experts are counted in steps of their own, and routing can be forced from the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hookline.benchmark.costs import _num_weights
from hookline.benchmark.experts import DistinctExperts, count_experts
from hookline.benchmark.setup import Bench
from hookline.benchmark.workload import Lengths
from hookline.cli.main import engine as command
from hookline_kernels.grouped_gemm import pack_expert_weight
from hookline_kernels.quantized import QuantizedTensor
from tests.benchmark.conftest import start_bench, tiny_config

EXPERTS, PER_TOKEN, WIDTH = 8, 2, 16
FIELDS: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 3,
}


def run(config: Path, *arguments: object, measure: str = "latency") -> Result:
    sizes = ("--device", "cpu", "--input-len", "12", "--output-len", "4", "--repeats", "1")
    return CliRunner().invoke(command, ["bench", measure, "--config", *map(str, (config, *sizes, *arguments))])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "moe.json"
    path.write_text(json.dumps(tiny_config(**FIELDS)))
    return path


def test_experts_of_a_decode_step_are_counted_and_nothing_is_left_behind() -> None:
    bench = start_bench(**FIELDS)
    with bench.engine as engine:
        model: Any = engine.loaded.opened.model
        plain, used = model.moe, list[tuple[int, int]]()

        def watch(layer: int, ids: torch.Tensor) -> None:
            used.append((layer, len(ids.unique())))

        model.moe = dataclasses.replace(plain, watch=watch)
        watching = model.moe
        found = count_experts(engine, 5, Lengths(9, 4))
        assert found is not None and (found.batch, len(found.layers)) == (5, 3)
        assert model.moe is watching
        assert all(PER_TOKEN <= count <= min(EXPERTS, 5 * PER_TOKEN) for count in found.layers)
        assert engine.pool.num_referenced == 0
        one = count_experts(engine, 1, Lengths(9, 1))
        assert one is not None and one.layers == (2.0, 2.0, 2.0)
        assert count_experts(engine, 64, Lengths(500, 8)) is None, "more than the cache holds"
        assert engine.pool.num_referenced == 0
        assert model.moe is watching and {layer for layer, _ in used} == {0, 1, 2}, "prefills are not counted"


# Of an architecture with experts, but by its config no layer has any.
ALL_DENSE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "mlp_only_layers": [0, 1],
}


def test_a_model_without_experts_has_none_to_count(bench: Bench) -> None:
    assert count_experts(bench.engine, 2, Lengths(9, 4)) is None
    dense = start_bench(**ALL_DENSE)
    with dense.engine as engine:
        assert engine.loaded.opened.model.shapes.num_layers == 2
        assert count_experts(engine, 2, Lengths(9, 4)) is None
        assert dense.costs.step_bytes(5) == dense.costs.layer_bytes + dense.costs.head_bytes


def test_packed_experts_have_as_many_weights_as_plain_ones() -> None:
    experts, rows, inner = 3, 64, 96
    codes = torch.zeros((experts, rows, inner), dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.ones(experts, rows, inner // 32).half(), None)
    packed = pack_expert_weight(weight, dtype=torch.float32)
    assert packed.numel() == weight.numel() or packed.dtype == torch.uint8
    assert _num_weights(packed) == _num_weights(torch.empty(weight.shape)) == experts * rows * inner


def test_costs_are_those_of_the_experts() -> None:
    bench = start_bench(**FIELDS)
    with bench.engine:
        costs = bench.costs
        assert (costs.num_experts, costs.experts_per_token) == (EXPERTS, PER_TOKEN)
        assert costs.expert_weights == 3 * EXPERTS * 3 * WIDTH * 64
        # Beside the experts a token passes the router.
        dense = start_bench(**FIELDS | {"architectures": ["LlamaForCausalLM"], "num_local_experts": None})
        with dense.engine:
            mlps = 3 * 3 * WIDTH * 64
            assert costs.layer_weights == dense.costs.layer_weights - mlps + 3 * EXPERTS * 64
    line = DistinctExperts((2.0, 3.5), 1).line("natural", costs)
    assert "natural: 2.8 distinct experts" in line and "(least 2.0, most 3.5, of 8)" in line and "with 2.0." in line


@pytest.mark.parametrize("routing", ["natural", "uniform", "correlated"])
def test_routing_is_forced_by_an_option(routing: str, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(config, "--batch", "3", "--routing", routing, "--json", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["settings"]["expert_routing"] == routing
    assert 2 <= record["results"]["distinct_experts"]["value"] <= 6
    assert f"Routing {routing}: " in result.stdout and "distinct experts" in result.stdout


def test_routing_is_refused_where_there_is_nothing_to_route(config_file: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps(tiny_config(**ALL_DENSE)))
    for path in (config_file, dense):
        result = run(path, "--routing", "uniform")
        assert result.exit_code == 2
        assert "has no experts" in result.stderr
    assert run(dense).exit_code == 0
    assert run(config_file, "--routing", "sideways").exit_code == 2
