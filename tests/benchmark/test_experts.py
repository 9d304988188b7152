"""Distinct experts are counted in steps of their own, and routing can be forced from the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hookline.benchmark.experts import DistinctExperts, count_experts
from hookline.benchmark.setup import Bench
from hookline.benchmark.workload import Lengths
from hookline.cli.main import engine as command
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


def test_a_model_without_experts_has_none_to_count(bench: Bench) -> None:
    assert count_experts(bench.engine, 2, Lengths(9, 4)) is None


def test_costs_are_those_of_the_experts() -> None:
    bench = start_bench(**FIELDS)
    with bench.engine:
        costs = bench.costs
        assert (costs.num_experts, costs.experts_per_token) == (EXPERTS, PER_TOKEN)
        assert costs.expert_weights == 3 * EXPERTS * 3 * WIDTH * 64
        # Beside the experts a token passes the router.
        dense = start_bench(**FIELDS | {"architectures": ["LlamaForCausalLM"]})
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


def test_routing_is_refused_where_there_is_nothing_to_route(config_file: Path) -> None:
    result = run(config_file, "--routing", "uniform")
    assert result.exit_code == 2
    assert "has no experts" in result.stderr
    assert run(config_file, "--routing", "sideways").exit_code == 2
