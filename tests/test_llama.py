"""The Llama plugin: what its config refuses, and GGUF's row order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hookline.config import EngineConfig
from hookline.errors import CheckpointError, HooklineError, ModelConfigError
from hookline.layers.rotary import Rotary
from hookline.loading import open_model
from hookline.weight_adapter import LazyTensor
from hookline_llama.config import read_config
from hookline_llama.weight_adapter import GgufAdapter, halves_from_pairs
from tests.conftest import TINY

HEAD_DIM = 16
FACTORS = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
FIELDS: dict[str, Any] = TINY | {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0, "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
    "longrope": {"factor": 2.0, "attention_factor": 1.0, "short_factor": FACTORS, "long_factor": FACTORS},
}
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**63, 10**400, 1e9, 1e308, 0.5, float("nan"), float("inf"), -float("inf")),
    *("text", "", "os.system", [], [1], [[]], {}, {"a": 1}, True, None),
)


def configs() -> Iterator[dict[str, Any]]:
    """A sound config with each field, one after the other, holding each value."""
    for architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        for name in FIELDS.keys() - {"architectures"}:
            for value in VALUES:
                yield FIELDS | {"architectures": [architecture], name: value}
    for rope_type, fields in ROPES.items():
        rope = fields | {"rope_type": rope_type, "rope_theta": 1e4, "original_max_position_embeddings": 64}
        for name in (*rope, "partial_rotary_factor"):
            for value in VALUES:
                yield FIELDS | {"rope_parameters": rope | {name: value}}


def test_configs_are_read_or_refused_by_field() -> None:
    read = refused = 0
    positions = torch.arange(3)
    for fields in configs():
        try:
            config = read_config(fields)
        except HooklineError as error:
            assert isinstance(error, ModelConfigError), (fields, error)
            assert len(str(error)) < 1_000
            refused += 1
        else:
            Rotary(config.rope, torch.device("cpu"))(positions, torch.full_like(positions, 3))
            read += 1
    assert min(read, refused) > 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "many"}}, "rope_parameters.beta_fast"),
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 2**31}, "head_dim"),
        ({"hidden_size": 2**63}, "hidden_size"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read_config(FIELDS | fields)


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_gguf_rows_go_back_to_halves(shape: tuple[int, ...]) -> None:
    """Against the permutation that writes GGUF files: llama.cpp's converter."""
    heads, halves = 3, torch.randn(shape)
    pairs = halves.view(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    assert not torch.equal(pairs, halves)
    assert torch.equal(halves_from_pairs(pairs, heads), halves)


def test_a_gguf_tensor_of_no_llama_is_named() -> None:
    adapter = GgufAdapter(read_config(FIELDS))
    tensor = LazyTensor("blk.0.ssm_in.weight", (2, 2), "F32", 16, lambda: torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match="ssm_in"):
        adapter.adapt(tensor)
    assert adapter.adapt(tensor.renamed("rope_freqs.weight")) == ()


def write_experts(path: Path, experts: int) -> Path:
    """The header of a mixture of experts, as converters wrote them, and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(min(experts, 2))
    writer.add_tensor("token_embd.weight", np.zeros((96, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_with_experts_is_refused(tmp_path: Path) -> None:
    """Its architecture is called `llama` too."""
    path = write_experts(tmp_path / "experts.gguf", 8)
    with pytest.raises(ModelConfigError, match="num_local_experts is 8: a mixture of experts") as caught:
        open_model(EngineConfig(str(path), device="cpu"))
    assert "safetensors" in str(caught.value.hint)
    dense = write_experts(tmp_path / "dense.gguf", 0)
    assert open_model(EngineConfig(str(dense), device="cpu")).config.num_layers == 1
