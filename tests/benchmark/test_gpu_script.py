"""benchmarks/gpu.py, made small: every run gives its rows, and one that fails stops no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hookline.engine import Engine
from tests.benchmark.conftest import load_script, tiny_config

SMALL = ("--device", "cpu", "--divide", "128", "--repeats", "1", "--kv-cache-memory", "16MiB")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu")


@pytest.fixture
def run(script: ModuleType, config_file: Path, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "out" / "gpu.json"
        code = script.main(["--config", str(config_file), "--json", str(file), *SMALL, *arguments])
        return code, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_every_run_has_its_rows(
    run: Callable[..., Any], script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run()
    assert code == 0
    assert record["schema"] == "hookline.gpu-benchmark/1"
    assert record["failed"] == {}
    wanted = [(one.name, target.figure) for one in script.LLAMA for target in one.targets]
    assert [(row["run"], row["figure"]) for row in record["rows"]] == wanted
    assert all(isinstance(row["value"], float) for row in record["rows"])
    assert {
        "value",
        "unit",
        "floor",
        "percent_of_floor",
        "peer",
        "must",
        "aim",
        "reaches_must",
        "reaches_aim",
    } <= record["rows"][0].keys()
    assert record["reports"]["offline"]["settings"]["workload"]["requests"] == 7
    shown = capsys.readouterr().out
    assert all(name in shown for name, _ in wanted)


def test_a_run_that_fails_is_told_and_the_others_go_on(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Engine.add_request

    def add_request(self: Engine, prompt: Any, params: Any = None, *, stream: bool = False) -> str:
        if params.temperature > 0:
            raise RuntimeError("no draw today")
        return real(self, prompt, params, stream=stream)

    monkeypatch.setattr(Engine, "add_request", add_request)
    code, record = run("--only", "b1,sampled-b256,b32")
    assert code == 1
    assert record["failed"] == {"sampled-b256": "RuntimeError: no draw today"}
    assert [row["run"] for row in record["rows"]] == ["b1", "b32", "b32"]
    assert "sampled-b256   FAILED: RuntimeError: no draw today" in capsys.readouterr().out


def test_what_would_not_end_in_time_is_left_out(run: Callable[..., Any]) -> None:
    code, record = run("--only", "b1,b32", "--seconds", "0")
    assert code == 1
    assert set(record["failed"]) == {"b1", "b32"}
    assert record["rows"] == []


def test_traces_are_written_beside(run: Callable[..., Any], tmp_path: Path) -> None:
    code, record = run("--only", "b1", "--profile", str(tmp_path / "traces"))
    assert code == 0
    assert json.loads((tmp_path / "traces" / "b1.json").read_text())["traceEvents"]
    assert record["reports"]["b1"]["profile"]["steps"] == 8


def test_mistakes(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--shape", "no-such-shape"]) == 2
    assert script.main(["--config", str(tmp_path / "none.json")]) == 3
    (tmp_path / "other.json").write_text(json.dumps(tiny_config(architectures=["NobodyServesThis"])))
    assert script.main(["--config", str(tmp_path / "other.json"), "--device", "cpu"]) == 4
    assert "NobodyServesThis" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        script.main(["--only", "b1,b3"])
    assert caught.value.code == 2
    assert "b3" in capsys.readouterr().err


def test_targets_are_in_order(script: ModuleType) -> None:
    for runs in script.RUNS.values():
        for one in runs:
            for target in one.targets:
                values = [value for value in (target.must, target.aim) if value is not None]
                rates = target.figure.endswith("_rate")
                assert values == sorted(values, reverse=not rates), (one.name, target)
