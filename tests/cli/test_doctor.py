"""`engine doctor`: a sound machine passes, each thing at fault is found and comes with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.cli import checks
from hookline.cli.main import engine as command
from hookline.config import PluginOptions, read_environment
from hookline.model_store import DEFAULT_MODEL, find_pullable

SOUND: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "devices": [], "available_memory": 8 * 2**30}


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["doctor", *arguments])


def test_this_machine_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_CACHE_DIR", str(tmp_path / "cache"))
    result = doctor("--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report
    assert report["ok"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert {
        "python",
        "system",
        "cpu",
        "memory",
        "torch",
        "triton",
        "cuda",
        "cpu kernels",
        "cache folder",
        "default model",
    } < set(found)
    assert "tested from" in found["torch"]["found"]
    assert "LlamaForCausalLM" in found["plugin llama"]["found"]
    assert "available" in found["memory"]["found"]
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What the probes will say, to be changed by a test; no child process runs."""
    probes = {"torch": dict(SOUND), "triton": {"version": "3.7.1"}}
    monkeypatch.setattr(checks, "probe_package", probes.__getitem__)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setenv("HOOKLINE_CACHE_DIR", str(tmp_path / "cache"))
    return probes


def test_no_gpu_is_no_failure(quick: dict[str, dict[str, Any]]) -> None:
    result = doctor()
    assert result.exit_code == 0
    assert "none found; the CPU is used" in result.stdout
    assert f"engine pull {DEFAULT_MODEL}" in result.stdout
    assert "FAIL" not in result.stdout


def test_missing_native_kernels_are_advice_and_no_failure(quick: dict[str, dict[str, Any]]) -> None:
    quick["torch"]["no_native_kernels"] = "there is no C compiler (gcc or cc) on the PATH"
    result = doctor()
    assert result.exit_code == 0
    assert "none: there is no C compiler" in result.stdout
    assert "install it" in result.stdout
    quick["torch"]["no_native_kernels"] = None
    assert "built for this CPU" in doctor().stdout


def test_broken_torch_is_reported_and_the_rest_goes_on(quick: dict[str, dict[str, Any]]) -> None:
    quick["torch"] = {"error": "ImportError: libcudart.so: cannot open"}
    result = doctor()
    assert result.exit_code == 1
    assert "libcudart.so" in result.stdout
    assert "pip install --force-reinstall 'torch>=" in result.stdout
    assert "plugin llama" in result.stdout


@pytest.mark.parametrize(
    ("version", "ok", "words"),
    [("2.10.2", False, "Upgrade"), ("2.11.0", True, ""), ("2.13.9", True, ""), ("2.14.0", True, "newer")],
)
def test_versions_against_the_tested_range(version: str, ok: bool, words: str) -> None:
    check = checks.check_version("torch", {"version": version}, "2.11", "2.13")
    assert check.ok is ok
    assert words in check.remedy
    assert bool(words) == bool(check.remedy)


def test_devices_and_a_driver_that_torch_does_not_use(
    quick: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"name": "Big GPU", "capability": "9.0", "free": 70 * 2**30, "total": 80 * 2**30}
    assert "Big GPU (sm 9.0), 70.0 GiB of 80.0 GiB free" in checks.check_device({"devices": [device]}).found
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    check = checks.check_device(quick["torch"])
    assert check.ok
    assert "CUDA build of torch" in check.remedy


def test_probe_survives_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("sound_one", "__version__ = '1.2'"),
        ("raising_one", "raise OSError('libfoo.so is missing')"),
        ("dying_one", "import os; os._exit(7)"),
        ("talking_one", "print('hello'); __version__ = '1.3'"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert checks.probe_package("sound_one") == {"version": "1.2"}
    assert checks.probe_package("talking_one") == {"version": "1.3"}
    assert "libfoo.so is missing" in checks.probe_package("raising_one")["error"]
    assert "code 7" in checks.probe_package("dying_one")["error"]
    assert "No module named" in checks.probe_package("absent_one")["error"]


def test_cache_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    check = checks.check_cache(file / "cache")
    assert not check.ok
    assert "HOOKLINE_CACHE_DIR" in check.remedy
    monkeypatch.setattr(checks, "_FREE_DISK", 2**80)
    assert "Free some space" in checks.check_cache(tmp_path / "cache").remedy


def test_plugins_left_out_and_misnamed() -> None:
    left_out = list(checks.check_plugins(PluginOptions(enabled=False)))
    assert all(check.ok for check in left_out)
    assert any("disabled" in check.found for check in left_out)
    [check] = checks.check_plugins(PluginOptions(disabled=frozenset({"lama"})))
    assert not check.ok
    assert "lama" in check.found
    assert "llama" in check.remedy


def test_pulled_model_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_CACHE_DIR", str(tmp_path))
    model = find_pullable(DEFAULT_MODEL)
    assert model is not None
    path = model.path(tmp_path)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.member_bytes)
    check = checks.check_model(read_environment())
    assert "is pulled" in check.found
    assert not check.remedy
