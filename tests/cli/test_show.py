"""`engine show`: right figures, an audit that finds what was done to a checkpoint, and no weight read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from hookline.cli.main import engine as command

CACHE = ("--kv-cache-memory", "4MiB")


def show(model: Path | str, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["show", str(model), *CACHE, *arguments])


def as_json(model: Path | str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(model, "--json", *arguments).stdout)
    return found


@pytest.fixture
def changed(tiny_llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny Llama with other config fields or tensors; a tensor that is None is taken out."""

    def make(tensors: dict[str, torch.Tensor | None] | None = None, **fields: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_llama, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        weights: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors"), **(tensors or {})}
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def test_figures(tiny_llama: Path) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    total = sum(tensor.numel() for tensor in weights.values())
    found = as_json(tiny_llama)
    assert found["schema"] == "hookline.show/1"
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["plugin"]["distribution"] == "hookline-llama"
    assert "LlamaForCausalLM" in found["plugin"]["why"]
    assert found["parameters"] == total
    assert found["tensor_bytes"] == 4 * total
    assert found["encodings"] == {"float32": {"tensors": len(weights), "bytes": 4 * total}}
    size = (tiny_llama / "model.safetensors").stat().st_size
    assert found["files"] == [{"name": "model.safetensors", "bytes": size}]
    assert found["context_length"] == 512
    assert found["chat_template"] is True
    assert found["tokenizer"] is True
    assert found["end_tokens"] == [{"id": 258, "text": "<|endoftext|>"}]
    assert found["shapes"]["num_kv_heads"] == 2
    assert found["audit"]["ok"] is True
    assert found["audit"]["matched"] == len(weights)
    assert found["memory"]["weights"] == 4 * total
    # 2 layers of keys and values, 2 heads of 16 in float32.
    assert found["memory"]["num_blocks"] == 4 * 2**20 // (2 * 2 * 2 * 16 * 4 * 16)
    assert as_json(tiny_llama, "--dtype", "bfloat16")["memory"]["weights"] == 2 * total
    assert found["error"] is None


def test_text_has_the_same(tiny_llama: Path) -> None:
    result = show(tiny_llama)
    assert result.exit_code == 0
    for words in ("LlamaForCausalLM", "hookline-llama", "108,864", "float32", "512 tokens", "258 <|endoftext|>"):
        assert words in result.stdout
    for words in ("every tensor has its place", "Memory on cpu", "chat template  yes", "num_kv_heads"):
        assert words in result.stdout


def test_no_weight_is_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("hookline.checkpoint.safetensors.read_span", refuse)
    assert show(tiny_llama).exit_code == 0


def test_audit_names_every_fault(changed: Callable[..., Path]) -> None:
    model = changed(
        {
            "model.norm.weight": None,
            "model.layers.1.self_attn.q_proj.weight": torch.zeros(64, 32),
            "model.layers.0.self_attn.extra.weight": torch.zeros(3),
        }
    )
    result = show(model)
    assert result.exit_code == 1
    assert "does not load" in result.stdout
    audit = as_json(model)["audit"]
    assert audit["ok"] is False
    assert audit["missing"] == ["model.norm.weight"]
    assert audit["unexpected"] == ["model.layers.0.self_attn.extra.weight"]
    [wrong] = audit["wrong_shape"]
    assert wrong == "model.layers.1.self_attn.q_proj.weight is [64, 32], the config asks for [64, 64]"
    for name in ("model.norm.weight", "model.layers.0.self_attn.extra.weight", wrong):
        assert name in result.stdout


def test_long_lists_are_cut_in_text_alone(changed: Callable[..., Path]) -> None:
    model = changed({f"extra.{index}": torch.zeros(1) for index in range(12)})
    assert "and 4 more" in show(model).stdout
    assert len(as_json(model)["audit"]["unexpected"]) == 12


def test_without_plugin_the_header_is_shown(changed: Callable[..., Path]) -> None:
    model = changed(architectures=["UnheardOfForCausalLM"])
    result = show(model)
    assert result.exit_code == 4
    for words in ("UnheardOfForCausalLM", "none that can be used", "21 tensors", "512 tokens"):
        assert words in result.stdout
    assert "LlamaForCausalLM" in result.stderr
    found = json.loads(show(model, "--json").stdout)
    assert found["plugin"] is None
    assert found["tensors"] == 21
    assert "UnheardOfForCausalLM" in found["error"]


def test_unsound_config_is_said_after_the_header(changed: Callable[..., Path]) -> None:
    result = show(changed(rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0}))
    assert result.exit_code == 1
    assert "21 tensors" in result.stdout
    assert "spiral" in result.stderr


def test_what_does_not_fit(tiny_llama: Path) -> None:
    result = CliRunner().invoke(command, ["show", str(tiny_llama), "--kv-cache-memory", "100000GiB"])
    assert result.exit_code == 6
    assert "every tensor has its place" in result.stdout
    assert "--kv-cache-memory" in result.stderr


def test_chosen_plugin_is_the_reason(tiny_llama: Path) -> None:
    choice = "LlamaForCausalLM=hookline-llama"
    result = CliRunner().invoke(command, ["--plugin", choice, "show", str(tiny_llama), *CACHE])
    assert result.exit_code == 0
    assert f"--plugin {choice}" in result.stdout


def test_config_alone_with_random_weights(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    result = show(tmp_path, "--load-format", "random")
    assert result.exit_code == 0
    assert "no: prompts must be token ids" in result.stdout


def test_wrong_path() -> None:
    assert show("/nowhere").exit_code == 3


def test_what_generate_refuses_is_no_plan(tiny_llama: Path) -> None:
    """Drafts of a model that has none of its own."""
    found = show(tiny_llama, "--num-speculative-tokens", "3")
    assert found.exit_code == 2
    assert "no draft of its own" in found.output and "--speculative-method ngram" in found.output
