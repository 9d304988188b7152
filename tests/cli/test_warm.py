"""`engine tune` and `engine warm-cache`: what they do on a CPU, what they would on a GPU, and their mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner, Result

from hookline.benchmark.setup import Subject
from hookline.cli import warm
from hookline.cli.main import engine as command
from hookline.config import EngineConfig
from hookline.errors import UsageError
from hookline_kernels import native, tune_linear, tuning
from hookline_kernels.tune_linear import Product
from hookline_kernels.tuning import TunedChoice
from tests.benchmark.conftest import config_file, tiny_config

__all__ = ["config_file"]

SUBJECT = Subject("tiny", "config", tiny_config())
CPU = EngineConfig("tiny", device="cpu", load_format="random", kv_cache_memory="4MiB", dtype="bfloat16")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_native_kernels_are_built(config_file: Path, tiny_llama: Path) -> None:
    for model in (("--config", config_file), (tiny_llama,)):
        result = run("warm-cache", *model, "--device", "cpu", "--dtype", "bfloat16")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            "native kernels for float32",
            "native kernels for bfloat16",
        ]
        assert all(" ready after " in line for line in lines) == (native.load(torch.float32).reason is None)


def test_why_there_are_no_native_kernels(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda dtype: native.Native(None, "no compiler"))
    result = run("warm-cache", "--config", config_file, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (0, "native kernels for float32: none, no compiler\n")


def test_an_engine_is_started_and_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with kernels that a listener hears of."""
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    answer = warm._run_requests

    def compile_some(engine: Any) -> int:
        for name, hit in (("rms_norm", False), ("rms_norm", False), ("rotary", False), ("rotary", True)):
            heard = {"metadata": {}, "metadata_group": {}, "times": None}
            triton.knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=hit, **heard)
        return answer(engine)

    monkeypatch.setattr(warm, "_run_requests", compile_some)
    warm._warm_engine(SUBJECT, CPU)
    out = capsys.readouterr().out
    assert "24 in" in out  # 4 prompts that fit alone and together, chosen in 3 ways
    assert "3 compiled, 1 were in the cache\n  rms_norm, 2 variants\n  rotary\n" in out
    assert triton.knobs.compilation.listener is None


def test_the_models_own_products_are_tuned_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[TunedChoice] = []

    def sweep(products: Sequence[Product], *, dtype: torch.dtype, seconds: float, **_: Any) -> Iterator[TunedChoice]:
        assert (dtype, seconds) == (torch.bfloat16, 9.0)
        for one in products[:3]:
            yield TunedChoice(device="H", dtype="bfloat16", kind=one.kind, n=one.n, k=one.k, m=8, config=None)

    def store(choices: Sequence[TunedChoice]) -> Path:
        kept.extend(choices)
        return Path("table.json")

    monkeypatch.setattr(tune_linear, "sweep", sweep)
    monkeypatch.setattr(tuning, "store", store)
    warm._tune(SUBJECT, CPU, torch.device("cpu"), 9.0)
    assert [choice.kind for choice in kept] == ["gated", "wide", "plain"]
    out = capsys.readouterr().out
    assert "3 choices for 5 products kept in table.json" in out
    assert out.count("-> library") == 3


def test_tuning_is_for_16_bits() -> None:
    with pytest.raises(UsageError, match="float32"):
        warm._tune(SUBJECT, EngineConfig("tiny", device="cpu", load_format="random"), torch.device("cpu"), 9.0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tune", "--shape", "llama-8b", "--device", "cpu"), 7, "on a GPU, and the device is cpu"),
        (("tune",), 2, "neither MODEL nor --shape nor --config"),
        (("tune", "--shape", "llama-8b", "--seconds", "0"), 2, "--seconds"),
        (("tune", "--shape", "no-such"), 2, "llama-70b, llama-8b"),
        (("warm-cache", "no-such-model"), 3, "no-such-model"),
        (("warm-cache", "--config", "no-such.json"), 3, "no-such.json"),
        (("warm-cache", "--shape", "llama-8b", "--memory", "200%"), 2, "--memory is '200%'"),
        (("warm-cache", "--shape", "llama-8b", "--kv-cache-memory", "much"), 2, "--kv-cache-memory is 'much'"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["tune", "warm-cache"])
def test_no_gpu_where_one_is_asked_for(name: str) -> None:
    result = run(name, "--shape", "llama-8b", "--device", "cuda")
    assert result.exit_code == 7
    assert "sees no CUDA device" in result.stderr


def test_an_architecture_that_nobody_serves(tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    config.write_text(json.dumps(tiny_config(architectures=["NobodyServesThis"])))
    assert run("warm-cache", "--config", config, "--device", "cpu").exit_code == 4


def test_help_imports_no_torch() -> None:
    code = "import sys, hookline.cli.warm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_that_change_nothing_are_not_offered() -> None:
    names = {param.name for param in warm.tune.params}
    assert {"seconds", "dtype", "device", "shape"} <= names
    assert not {"memory", "max_running", "prefix_caching"} & names
