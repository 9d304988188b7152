"""benchmarks/glm.py, made small: every run gives its rows, engines are loaded by need, and a failure stops no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hookline.engine import Engine
from tests.benchmark.conftest import LIMITS, load_script
from tests.benchmark.test_speculation import FIELDS

SIZES = ("--input-len", "9", "--output-len", "4", "--most", "2", "--repeats", "1")
SMALL = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "4MiB", *SIZES)
PLAIN = ("tpot", "step", "step_counted", "host")
DRAFTING = ("step", "step_counted", "step_tokens", "step_drafts", "step_accepted", "step_tpot", "host")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("glm")


@pytest.fixture
def run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.setattr("hookline.benchmark.measure.TIMED_STEPS", 3)
    config = tmp_path / "glm.json"
    config.write_text(json.dumps(FIELDS))

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "out" / "rows.json"
        code = script.main(["--config", str(config), "--output", str(file), *SMALL, *arguments])
        return code, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_every_run_has_its_rows(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[tuple[bool, str, int]] = []
    real = Engine.__init__

    def init(self: Engine, config: Any, **others: Any) -> None:
        loaded.append((config.speculative is not None, config.expert_routing, config.max_running))
        real(self, config, **others)

    monkeypatch.setattr(Engine, "__init__", init)
    monkeypatch.setattr("hookline.benchmark.setup.measure_limits", lambda *asked: LIMITS)
    code, record = run("--measure-roofline")
    assert code == 0 and record["failed"] == {}
    assert record["schema"] == "hookline.glm-benchmark/1"
    names = {"b1": PLAIN, "b32": PLAIN, "mtp-b1": DRAFTING, "mtp-b32": DRAFTING, "mtp-b1-corr": DRAFTING}
    wanted = [(name, figure) for name, figures in names.items() for figure in figures]
    assert [(row["run"], row["figure"]) for row in record["rows"]] == wanted
    assert loaded == [(False, "uniform", 2), (True, "uniform", 2), (True, "correlated", 1)], "one engine a group"
    rows = {(row["run"], row["figure"]): row for row in record["rows"]}
    assert all(rows[name, "step"]["floor"] > 0 and rows[name, "host"]["value"] > 0 for name in names)
    assert rows["b1", "tpot"]["must"] is None, "bounds are those of the real shape"
    report = record["reports"]["mtp-b32"]
    assert report["settings"]["workload"]["synthetic_acceptance_rate"] == 0.6
    assert {"distinct_experts", "draft_experts"} <= report["results"].keys()
    shown = capsys.readouterr().out
    assert "Acceptance is pinned: 60%" in shown and "Routing correlated:" in shown


def test_a_failure_is_told_and_the_others_go_on(
    run: Callable[..., Any], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = script.count_experts

    def count(engine: Engine, batch: int, length: Any) -> Any:
        if batch == 2:
            raise RuntimeError("no count today")
        return real(engine, batch, length)

    monkeypatch.setattr(script, "count_experts", count)
    code, record = run("--only", "mtp-b1,mtp-b32")
    assert code == 1
    assert record["failed"] == {"mtp-b32": "RuntimeError: no count today"}
    assert {row["run"] for row in record["rows"]} == {"mtp-b1"}


def test_what_would_not_end_in_time_is_left_out(run: Callable[..., Any], script: ModuleType) -> None:
    code, record = run("--seconds", "0", "--only", "b1,mtp-b1")
    assert code == 1
    assert record["failed"] == dict.fromkeys(("b1", "mtp-b1"), script.LEFT_OUT)


def test_traces_are_written_beside(run: Callable[..., Any], tmp_path: Path) -> None:
    code, record = run("--only", "mtp-b1", "--profile", str(tmp_path / "traces"))
    assert code == 0
    assert json.loads((tmp_path / "traces" / "mtp-b1.json").read_text())["traceEvents"]
    assert {one["rows"] for one in record["reports"]["mtp-b1"]["profile"]["products"]} == {1, 4}


def test_mistakes(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--shape", "no-such-shape"]) == 2
    with pytest.raises(SystemExit) as caught:
        script.main(["--only", "b1,b3"])
    assert caught.value.code == 2
    assert "b3" in capsys.readouterr().err


def test_bounds_are_in_order(script: ModuleType) -> None:
    options = script.parse([])
    assert [one.must for one in options.runs] == [2.8, 13.9, 8.1, 37.0, 5.6]
    assert all(one.aim is None or one.aim < one.must for one in options.runs)
    assert all(len(one.name) <= script.WIDTHS[0] for one in options.runs)
