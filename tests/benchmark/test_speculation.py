"""Benchmarks with drafts: the draft's costs stand apart, floors and tables are of whole steps, and all is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.benchmark.costs import containers, expert_tensors, model_costs
from hookline.benchmark.experts import count_experts
from hookline.benchmark.measure import Choice
from hookline.benchmark.products import model_products, time_products
from hookline.benchmark.roofline import Limits, ModelCosts, Speculation, decode_floor
from hookline.benchmark.setup import Bench, Subject, make_bench
from hookline.benchmark.shapes import find_shape
from hookline.benchmark.step_profile import profile_decode
from hookline.benchmark.traffic import decode_traffic
from hookline.benchmark.workload import Lengths
from hookline.checkpoint.random import RandomReader
from hookline.cli.main import engine as command
from hookline.config import EngineConfig, PluginOptions, SpeculativeConfig
from hookline.engine import Engine
from hookline.loading import open_model
from tests.benchmark.conftest import LIMITS, start_bench
from tests.glm5_2.models import GLM, SIZES

DRAFTS = 3
FIELDS: dict[str, Any] = (
    SIZES
    | GLM
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 2,
        "indexer_types": ["full", "shared"],
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
    }
)
HIDDEN, VOCAB, EXPERTS, PER_TOKEN = (
    FIELDS[name] for name in ("hidden_size", "vocab_size", "n_routed_experts", "num_experts_per_tok")
)
PINNED = SpeculativeConfig(num_speculative_tokens=DRAFTS, synthetic_acceptance_rate=0.6)


def start(overlap: bool) -> Bench:
    """The model with its draft; `overlap` runs steps ahead of their results, as on a GPU."""
    subject = Subject("tiny", "config", FIELDS)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 4 * 2**20, "max_running": 8}
    options |= {"load_format": "random", "prefix_caching": False, "expert_routing": "uniform", "overlap": overlap}
    engine = Engine(EngineConfig("tiny", speculative=PINNED, **options), reader=subject.reader())
    return make_bench(subject, engine, LIMITS)


@pytest.fixture(scope="module")
def drafting() -> Iterator[Bench]:
    """The same for all tests."""
    made = start(overlap=False)
    with made.engine:
        yield made


@pytest.fixture(scope="module")
def plain() -> ModelCosts:
    """The same model without its draft."""
    made = start_bench(**FIELDS)
    with made.engine:
        return made.costs


def test_the_draft_is_none_of_the_targets_costs(drafting: Bench, plain: ModelCosts) -> None:
    costs = drafting.costs
    assert plain.draft is None and costs.draft is not None
    fields = ("layer_bytes", "layer_weights", "head_bytes", "cache_bytes", "expert_bytes", "attention_width")
    assert [getattr(costs, name) for name in fields] == [getattr(plain, name) for name in fields]
    assert costs.draft.head_bytes == 0
    one = 3 * FIELDS["moe_intermediate_size"] * HIDDEN
    assert costs.draft.expert_weights == EXPERTS * one
    assert costs.draft.layer_weights > 2 * HIDDEN * HIDDEN, "the matrix that joins embedding and state"
    latent, key = FIELDS["kv_lora_rank"] + FIELDS["qk_rope_head_dim"], FIELDS["index_head_dim"]
    assert (costs.cache_bytes, costs.listed_bytes) == (4 * (2 * latent + key), 4 * 2 * latent)
    assert (costs.draft.cache_bytes, costs.draft.listed_bytes) == (4 * (latent + key), 4 * latent)
    # All weights but the embedding are somebody's.
    every = costs.step_bytes(10**6) + costs.draft.step_bytes(10**6)
    assert drafting.engine.memory_plan.weights == pytest.approx(every + 4 * VOCAB * HIDDEN)
    assert sum(is_draft for is_draft, _ in containers(drafting.engine.loaded.opened)) == 1


# Milliseconds at 4.3 TB/s and a context of 4,096. Published for the step with drafts: 5.45 and 26.6; the draft's first
# pass would run experts for all rows, which is 0.39 and 1.5 ms more.
@pytest.mark.parametrize(("batch", "plain", "uniform", "correlated"), [(1, 1.71, 5.05, 3.87), (32, 10.0, 25.1, 20.4)])
def test_floors_of_the_real_shape(batch: int, plain: float, uniform: float, correlated: float) -> None:
    options = EngineConfig(
        "m", device="cpu", dtype="bfloat16", speculative=SpeculativeConfig(num_speculative_tokens=DRAFTS)
    )
    opened = open_model(options, RandomReader(find_shape("glm-5.2-6l", PluginOptions())))
    model_products(opened)
    costs, card = model_costs(opened), Limits(4.3e12, 790e12, 650e12)
    kinds = (Speculation(), Speculation(DRAFTS), Speculation(DRAFTS, correlated=True))
    found = [decode_floor(costs, card, batch, 4096, kind) for kind in kinds]
    assert [1e3 * (seconds or 0) for seconds in found] == pytest.approx([plain, uniform, correlated], rel=5e-3)
    counted = decode_floor(costs, card, batch, 4096, Speculation(DRAFTS, False, 256.0, 256.0))
    assert counted is not None
    read = costs.step_bytes(10**6) + DRAFTS * (costs.head_bytes + sum(_bytes_of_draft(costs)))
    assert counted == pytest.approx(read / 4.3e12, rel=2e-2)


def _bytes_of_draft(costs: ModelCosts) -> tuple[int, int]:
    assert costs.draft is not None
    return costs.draft.layer_bytes, costs.draft.expert_bytes


def test_a_context_beyond_the_list_is_read_by_its_index_keys_alone() -> None:
    costs = ModelCosts(
        layer_bytes=0,
        layer_weights=0,
        head_bytes=0,
        head_weights=0,
        cache_bytes=10,
        attention_width=1,
        listed_bytes=8,
        list_length=100,
    )
    assert [costs.context_bytes(length) for length in (50, 100, 300)] == [500, 1000, 1400]
    assert [costs.attended(length) for length in (50, 100, 300)] == [1250, 5000, 25000]


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_timed_with_what_they_accept(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.benchmark.measure.TIMED_STEPS", 12)
    made = start(overlap)
    found = made.time_steps(2, 9, 2, Choice())
    assert found.drafts == DRAFTS
    assert 1.0 < found.accepted < 2.6, "0.6 of 3"
    assert found.seconds > 0 and found.tokens == pytest.approx(2 * (1 + found.accepted))
    assert 9 < found.context < 9 + 4 * 40
    assert not made.engine.has_work and made.engine.pool.num_referenced == 0


def test_products_of_a_step_are_those_of_all_rows_and_of_the_drafts_passes(drafting: Bench) -> None:
    opened = drafting.engine.loaded.opened
    found = {(one.name, one.rows): one.count for one in time_products(opened, 2, DRAFTS)}
    every = 2 * (1 + DRAFTS)
    assert {rows for _, rows in found} == {2, every}
    assert (found["word_unembed", every], found["word_unembed", 2]) == (1, DRAFTS)
    assert (found["join_w", every], found["join_w", 2]) == (1, DRAFTS - 1)
    # Of two layers one has experts, and the draft runs them for the last rows alone.
    assert (found["moe_gate", every], found["moe_gate", 2]) == (1, DRAFTS)
    assert (found["attn_out_w", every], found["attn_out_w", 2]) == (3, DRAFTS - 1)
    alone = {(one.name, one.rows) for one in time_products(opened, 2)}
    assert all(rows == 2 and name != "join_w" for name, rows in alone)


def test_a_step_that_is_run_by_hand_has_the_drafts_products_too(drafting: Bench) -> None:
    model = drafting.engine.loaded.opened.model
    plain, whole = (decode_traffic(model, 2, 4, 30, 64, 16, drafts=drafts).products for drafts in (0, DRAFTS))
    heads = DRAFTS * 4 * VOCAB * HIDDEN
    join = DRAFTS * 4 * 2 * HIDDEN * HIDDEN
    assert whole - plain > heads + join


def test_experts_of_the_target_and_of_the_draft_are_counted(drafting: Bench) -> None:
    found = count_experts(drafting.engine, 2, Lengths(9, 4))
    assert found is not None and found.draft is not None
    assert (len(found.layers), found.batch, found.drafts) == (1, 2, DRAFTS)
    assert PER_TOKEN <= found.draft <= 2 * PER_TOKEN < found.mean <= EXPERTS
    line = found.line("uniform", drafting.costs)
    assert "a decode step of 2 with 3 drafts each" in line and "in a pass of the draft" in line
    independent = [EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** rows) for rows in (2 * (1 + DRAFTS), 2)]
    assert line.endswith(f"the floors reckon with {independent[0]:.1f} and {independent[1]:.1f}.")
    assert f"{independent[1]:.1f} and {independent[1]:.1f}." in found.line("correlated", drafting.costs)
    assert drafting.engine.pool.num_referenced == 0
    assert "forward" not in vars(drafting.engine.loaded.opened.model)


def test_a_trace_of_steps_with_several_tokens(drafting: Bench, tmp_path: Path) -> None:
    found = profile_decode(drafting.engine, 2, Lengths(9, 5), Choice(), 3, tmp_path / "trace.json")
    assert found.steps == 3 and found.wall > 0
    assert {one.rows for one in found.products} == {2, 2 * (1 + DRAFTS)}
    assert not drafting.engine.has_work and drafting.engine.pool.num_referenced == 0


def test_experts_of_target_and_draft_are_told_apart(drafting: Bench) -> None:
    opened = drafting.engine.loaded.opened
    own, of_draft = (list(expert_tensors(opened, is_draft)) for is_draft in (False, True))
    assert len(own) == len(of_draft) == 2
    assert not {one.data_ptr() for one in own} & {one.data_ptr() for one in of_draft}


def run(tmp_path: Path, *arguments: object) -> tuple[Result, dict[str, Any]]:
    config, out = tmp_path / "glm.json", tmp_path / "out.json"
    config.write_text(json.dumps(FIELDS))
    sizes = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "4MiB", "--input-len", "9", "--json", out)
    line = ["bench", "latency", "--config", config, *sizes, "--output-len", "5", "--repeats", "1", *arguments]
    result = CliRunner().invoke(command, [str(argument) for argument in line])
    assert result.exit_code == 0, result.stderr
    return result, json.loads(out.read_text())


def test_latency_reports_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.benchmark.measure.TIMED_STEPS", 4)
    monkeypatch.setattr("hookline.benchmark.setup.measure_limits", lambda *asked: LIMITS)
    drafts = ("--num-speculative-tokens", "3", "--batch", "2", "--routing", "correlated")
    result, record = run(tmp_path, *drafts, "--synthetic-acceptance-rate", "1", "--measure-roofline")
    found = {name: figure["value"] for name, figure in record["results"].items()}
    assert (found["step_tokens"], found["step_drafts"], found["step_accepted"]) == (8, 3, 3)
    assert found["step_tpot"] == pytest.approx(found["step"] / 4)
    assert {"tpot", "decode_rate", "step_counted", "distinct_experts", "draft_experts"} <= found.keys()
    floors = {name: figure["floor"] for name, figure in record["results"].items()}
    assert floors["step_tpot"] == pytest.approx(floors["step"] / 4)
    assert floors["step_counted"] > floors["step"], "rows of a request are only mostly alike"
    assert "Acceptance is pinned: 100%" in result.stdout
    workload = record["settings"]["workload"]
    assert (workload["num_speculative_tokens"], workload["synthetic_acceptance_rate"]) == (3, 1.0)


def test_acceptance_that_is_not_pinned_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.benchmark.measure.TIMED_STEPS", 2)
    result, record = run(tmp_path, "--speculative-method", "ngram")
    assert "Acceptance is that of these prompts and weights" in result.stdout
    assert 0 <= record["results"]["step_drafts"]["value"] <= 2
    assert "draft_experts" not in record["results"]
