"""Random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.random import RandomReader

SHAPES = [("a.weight", (40, 50)), ("norm.weight", (64,)), ("a.bias", (64,)), ("b.weight", (40, 50))]
# Of seed 1 and the name a.weight, on a CPU, since the first version.
FIRST_VALUES = [-0.012158636, 0.005374644, 0.010822893]


def load(reader: RandomReader) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.load() for tensor in reader.tensors()}


def test_values_depend_on_seed_and_name_alone() -> None:
    first = load(RandomReader({}, tuple(SHAPES), torch.float32, seed=1))
    again = load(RandomReader({}, tuple(reversed(SHAPES)), torch.float32, seed=1))
    other = load(RandomReader({}, tuple(SHAPES), torch.float32, seed=2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
    assert not torch.equal(first["a.weight"], first["b.weight"])
    assert 0.015 < first["a.weight"].std() < 0.025
    assert first["norm.weight"].mean() > 0.9
    assert first["a.bias"].abs().max() < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_are_drawn_on_the_device() -> None:
    reader = RandomReader({}).with_shapes(SHAPES, torch.bfloat16, 1, "cuda")
    first, again = load(reader), load(reader)
    for name, value in first.items():
        assert (value.device.type, value.dtype) == ("cuda", torch.bfloat16)
        assert torch.equal(value, again[name])
    assert 0.015 < first["a.weight"].float().std() < 0.025
    assert first["norm.weight"].float().mean() > 0.9


def test_a_cpu_draws_the_same_model_in_every_type() -> None:
    wide = load(RandomReader({}, tuple(SHAPES), torch.float32, seed=1))
    half = load(RandomReader({}).with_shapes(SHAPES, torch.bfloat16, 1, "cpu"))
    assert all(torch.equal(value.to(torch.bfloat16), half[name]) for name, value in wide.items())
    assert wide["a.weight"][0, :3].tolist() == pytest.approx(FIRST_VALUES, abs=1e-7)


def test_type_and_size() -> None:
    reader = RandomReader({}, tuple(SHAPES), torch.bfloat16)
    assert all(value.dtype == torch.bfloat16 for value in load(reader).values())
    assert reader.nbytes == 2 * (2 * 2000 + 2 * 64)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ToyForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    reader = open_checkpoint(tmp_path, "random")
    assert isinstance(reader, RandomReader)
    assert (reader.weights_format, list(reader.tensors())) == ("random", [])
    assert reader.hf_config["architectures"] == ["ToyForCausalLM"]
    full = reader.with_shapes(SHAPES, torch.float16, seed=3)
    assert [tensor.shape for tensor in full.tensors()] == [shape for _, shape in SHAPES]
    assert full.tokenizer_source.tokenizer_json == b"{}"
