"""In-memory modules as checkpoints."""

from __future__ import annotations

import pytest
import torch
import transformers

from hookline.checkpoint.module import ModuleReader
from hookline.errors import CheckpointError


def make_model(tied: bool) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_reads_a_model_twice_without_changing_it(tied: bool) -> None:
    model = make_model(tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reader = ModuleReader(model)
    for _ in range(2):
        found = {tensor.name: tensor for tensor in reader.tensors()}
        assert ("lm_head.weight" in found) != tied
        for name, tensor in found.items():
            value = tensor.load()
            assert torch.equal(value, before[name])
            assert (tuple(value.shape), value.nbytes) == (tensor.shape, tensor.nbytes)
            assert not value.requires_grad
            value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert reader.hf_config["architectures"] == ["LlamaForCausalLM"]
    assert reader.hf_config["hidden_size"] == 16
    assert reader.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_module_without_a_config() -> None:
    reader = ModuleReader(torch.nn.Linear(2, 3))
    assert reader.hf_config["architectures"] == ["Linear"]
    assert [tensor.name for tensor in reader.tensors()] == ["weight", "bias"]


def test_module_with_an_unsound_config() -> None:
    model = make_model(True)
    vars(model.config)["architectures"] = "LlamaForCausalLM"  # which some versions of transformers refuse to set
    with pytest.raises(CheckpointError, match="architectures"):
        ModuleReader(model)


def test_buffers_that_are_saved_are_read() -> None:
    module = torch.nn.Linear(2, 3)
    module.register_buffer("kept", torch.arange(4.0))
    module.register_buffer("derived", torch.ones(5), persistent=False)
    found = {tensor.name: tensor for tensor in ModuleReader(module).tensors()}
    assert list(found) == ["weight", "bias", "kept"]
    assert found["kept"].load().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert ModuleReader(module).nbytes == 4 * (6 + 3 + 4)
