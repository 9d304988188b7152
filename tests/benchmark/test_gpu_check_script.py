"""benchmarks/gpu_check.py on a CPU: what it compares is chosen by name, and what differs, fails or is late is told."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.benchmark.conftest import load_script

SMALL = ["--device", "cpu", "--only", "mistral"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu_check")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("mistral")]


def test_only_what_is_named_is_compared(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned: list[bool] = []
    real = script.poison_cache

    def poison(engine: Any) -> None:
        real(engine)
        entries = [e for layers in engine._runner.cache.values() for layer in layers for e in layer.values()]
        poisoned.append(all(bool(torch.isnan(entry).all()) for entry in entries))

    monkeypatch.setattr(script, "poison_cache", poison)
    assert script.main([*SMALL, "--ways", "poisoned", "--dtypes", "float32"]) == 0
    found = lines(capsys)
    assert [line.split()[1] for line in found] == ["poisoned", "float32"]
    assert found[0].endswith("equal")
    assert poisoned == [True, True]


def test_what_differs_fails_or_is_late_is_told(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "compare_ways", lambda *_: iter([("graphs", "1 of 24 requests differ: [3]")]))
    assert script.main([*SMALL, "--ways", "graphs", "--dtypes", ""]) == 1
    assert "differ: [3]" in lines(capsys)[0]
    assert script.main([*SMALL, "--seconds", "-1"]) == 1
    assert len(found := lines(capsys)) == 1 and "left out" in found[0]

    def broken(*_: Any) -> dict[str, float]:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(script, "measure", broken)
    assert script.main([*SMALL, "--ways", "", "--dtypes", "bfloat16"]) == 1
    assert "FAILED: RuntimeError: no kernel today" in lines(capsys)[0]


@pytest.mark.parametrize("arguments", [("--only", "lama"), ("--ways", "graph"), ("--dtypes", "int8")])
def test_mistakes(script: ModuleType, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main([*SMALL, *arguments])
    assert caught.value.code == 2
