"""The real checkpoints' headers, at full size: every tensor has one place, and the plan for eight GPUs of 141 GB."""

from __future__ import annotations

import json
import time
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.loader import adapted
from hookline.cli.main import engine as command
from hookline.config import EngineConfig, SpeculativeConfig
from hookline.loading import open_model
from tests.glm5_2.headers import Build, tensors_of, write_checkpoint
from tests.glm5_2.models import GOLDEN_FP8

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
COUNTS = {"fp8": 118_629, "bf16": 59_585, "nvfp4": 232_385}
OPTIONS = (*("--devices", "8"), *("--device-memory", "141GB"), *("--num-speculative-tokens", "5"))


def test_show_finds_a_place_for_every_tensor_in_seconds(tmp_path: Path) -> None:
    """The FP8 checkpoint. By the processor's clock: the machine may have other things to do."""
    names = write_checkpoint(tmp_path / "glm", "fp8")
    assert len(names) == len(set(names)) == COUNTS["fp8"]
    begin = time.process_time()
    found = show(tmp_path / "glm")
    assert time.process_time() - begin < 20
    assert not found["audit"]["dropped"]
    plan = found["memory"]
    stored = sum(prod(shape) * BYTES[dtype] for _, dtype, shape in tensors_of("fp8"))
    # An eighth, the draft's layer with it, and on every GPU what is not cut: embedding, latents, routers, indexers.
    assert stored / 8 < plan["weights"] < stored / 8 + 5e9
    assert plan["available"] == pytest.approx(0.9 * 141e9, rel=1e-6)
    # Latents of 576 of every layer and of the draft, and index keys of 128 of 21 layers and of the draft, in bf16.
    assert plan["cache"] == plan["num_blocks"] * plan["block_size"] * 2 * (79 * 576 + 22 * 128)
    assert plan["cache"] > 20e9
    assert found["computed_weights"] > 1.9 * plan["weights"]


def test_nvfp4(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "glm", "nvfp4")
    found = show(tmp_path / "glm")
    dropped = found["audit"]["dropped"]
    assert len(dropped) == 75 * 256 * 3 and all(name.endswith(".input_scale") for name in dropped)
    assert found["memory"]["cache"] > 50e9


def test_bf16_does_not_fit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "glm", "bf16")
    found = show(tmp_path / "glm", exit_code=6)
    assert found["memory"] is None and "leave no room for a cache" in found["error"]


@pytest.mark.parametrize("build", COUNTS)
def test_with_the_draft_every_tensor_maps_once(build: Build, tmp_path: Path) -> None:
    """Each is part of one tensor that has a place. Of layers with experts there are two, and the draft's."""
    names = write_checkpoint(tmp_path / "glm", build, layers=5)
    config = EngineConfig(
        str(tmp_path / "glm"), device="cpu", dtype="bfloat16", speculative=SpeculativeConfig(num_speculative_tokens=5)
    )
    reader = open_checkpoint(tmp_path / "glm", "auto")
    opened = open_model(config, reader)
    tensors = list(adapted(reader, opened.architecture.weight_adapter(opened.config, reader.weights_format)))
    audit = opened.containers.audit(tensors)
    assert audit.ok and not audit.dropped, audit.report()
    uses = Counter(origin for tensor in tensors for origin in tensor.origins)
    assert set(uses.values()) == {1}
    unused = [name for name in names if name not in uses]
    assert all(name.endswith(".input_scale") for name in unused)
    assert len(unused) == (2 * 256 * 3 if build == "nvfp4" else 0)
    assert {tensor.name: tuple(tensor.shape) for tensor in tensors} == dict(opened.model.checkpoint_shapes())
    kinds = {tensor.name: tensor.encoding for tensor in tensors}
    of_target, of_draft = (kinds[f"model.layers.{layer}.mlp.experts.0.up_proj.weight"] for layer in (3, 5))
    expected = {"fp8": ("float8_e4m3fn",) * 2, "bf16": ("bfloat16",) * 2, "nvfp4": ("float4_e2m1fnx2", "bfloat16")}
    assert (of_target, of_draft) == expected[build]


def show(folder: Path, exit_code: int = 0) -> dict[str, Any]:
    """What is found, after a look at what every clean audit has: all tensors are accounted for."""
    result = CliRunner().invoke(command, ["show", str(folder), "--json", *OPTIONS])
    assert result.exit_code == exit_code, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    audit = found["audit"]
    assert audit["ok"]
    assert audit["matched"] + audit["joined"] + len(audit["dropped"]) == found["tensors"] == COUNTS[folder_build(found)]
    return found


def folder_build(found: dict[str, Any]) -> str:
    """By the encodings that the header names."""
    return "nvfp4" if "uint8" in found["encodings"] else "fp8" if "float8_e4m3fn" in found["encodings"] else "bf16"


def test_the_table_of_the_plan() -> None:
    options = ("--devices", "2", "--device-memory", "1GB")
    result = CliRunner().invoke(command, ["show", str(GOLDEN_FP8), *options])
    assert result.exit_code == 0, result.stderr
    for words in ("every tensor has its place", "Memory on each of 2 devices:", "weights count as they are stored"):
        assert words in result.stdout


@pytest.mark.parametrize("given", [("--devices", "8"), ("--device-memory", "141GB")])
def test_both_options_of_a_plan_are_needed(given: tuple[str, str], tiny_llama: Path) -> None:
    result = CliRunner().invoke(command, ["show", str(tiny_llama), *given])
    assert result.exit_code == 2
    assert "--devices 8 --device-memory 141GB" in result.stderr


def test_plans_for_other_models(tiny_llama: Path) -> None:
    """Two GPUs hold half of every matrix each; norms and the embedding are whole on both."""
    found = json.loads(
        CliRunner()
        .invoke(command, ["show", str(tiny_llama), "--json", "--devices", "2", "--device-memory", "1GB"])
        .stdout
    )
    whole, norms, embedding = 108_864, 5 * 64, 320 * 64
    assert found["memory"]["weights"] == 4 * (norms + embedding + (whole - norms - embedding) // 2)
    assert found["computed_weights"] in (found["memory"]["weights"], found["memory"]["weights"] // 2)
    assert found["memory"]["device"] == "each of 2 devices"
