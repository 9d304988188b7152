"""benchmarks/host.py on a CPU, where the model is a stand-in: every verb is timed, and the columns add up."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from hookline.sampling_params import SamplingParams
from tests.benchmark.conftest import load_script

SMALL = ["--device", "cpu", "--running", "1,3", "--rounds", "2", "--steps", "18"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("host")


def test_a_row_for_each_mode_and_number(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "host.json"
    script.main([*SMALL, "--output", str(file)])
    record = json.loads(file.read_text())
    assert record["schema"] == "hookline.host/1"
    assert [(row["mode"], row["running"]) for row in record["rows"]] == [
        (mode, running) for mode in ("ids", "text", "stream") for running in (1, 3)
    ]
    for row in record["rows"]:
        assert all(row[verb] > 0 for verb in script.VERBS if verb != "wait")
        assert row["wait"] == 0, "a CPU has nothing to wait for"
        assert row["host"] == pytest.approx(sum(row[verb] for verb in script.VERBS))
        assert row["p99"] >= row["median"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(record["rows"])


def test_the_text_is_real(script: ModuleType) -> None:
    engine = script.start("cpu", 2, 40)
    (report,) = engine.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))
    output = report.outputs[0]
    assert len(output.token_ids) == 12
    assert output.text == engine.tokenizer.decode(list(output.token_ids)) != ""


@pytest.mark.parametrize("arguments", [("--modes", "ids,words"), ("--running", "0"), ("--rounds", "0")])
def test_mistakes(script: ModuleType, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([*SMALL, *arguments])
    assert caught.value.code == 2
