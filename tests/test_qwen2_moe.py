"""The Qwen2-MoE plugin: which layers have experts and windows, its checkpoints' forms, what its config refuses.

That greedy ids equal transformers', whatever else the engine does, is in test_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hookline import Engine, EngineConfig, SamplingParams
from hookline.benchmark.products import model_products
from hookline.benchmark.shapes import find_shape
from hookline.checkpoint.module import ModuleReader
from hookline.checkpoint.random import RandomReader
from hookline.config import PluginOptions
from hookline.errors import CheckpointError, ModelConfigError
from hookline.loading import load_model, open_model, parameters
from hookline_qwen2_moe.config import read_config
from tests.conftest import TINY, TINY_QWEN2_MOE, make_module

FIELDS: dict[str, Any] = TINY | TINY_QWEN2_MOE | {"architectures": ["Qwen2MoeForCausalLM"], "rms_norm_eps": 1e-6}
PROMPTS = [[5], [1, 2, 3], list(range(40, 75))]


def config_of(source: str = "x", **options: Any) -> EngineConfig:
    probe: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_memory": 2**21}
    return EngineConfig(source, max_model_len=128, **probe | options)


def weights_of(config: EngineConfig, reader: Any = None) -> dict[str, torch.Tensor | None]:
    containers = load_model(config, reader).opened.containers
    return {
        f"{container}.{name}": tensor for container, held in parameters(containers) for name, tensor in held.items()
    }


def ids_of(engine: Engine) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in engine.generate(PROMPTS, params)]


def test_lists_and_a_module_in_memory_are_the_same(checkpoint: Callable[..., Path]) -> None:
    fields: dict[str, Any] = {"decoder_sparse_step": 2}
    lists, module = checkpoint("qwen2_moe", **fields), make_module("qwen2_moe", **fields)
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in load_file(lists / "model.safetensors")
    expected, found = weights_of(config_of(str(lists))), weights_of(config_of(), ModuleReader(module))
    assert {"layers.0.mlp_1", "layers.1.moe_mlp_1", "layers.1.shared_gate"} <= expected.keys() == found.keys()
    assert "layers.0.moe_mlp_1" not in expected
    for name, tensor in expected.items():
        assert tensor is not None and found[name] is not None
        assert torch.equal(found[name], tensor), name


def test_overlapped_steps_and_a_snapshot_give_the_same(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(checkpoint("qwen2_moe", decoder_sparse_step=2, qkv_bias=False))
    with Engine(config_of(folder)) as engine:
        expected = ids_of(engine)
        engine.serialize(tmp_path / "snapshot")
    with Engine(config_of(folder, overlap=True)) as engine:
        assert ids_of(engine) == expected
    with Engine(config_of(str(tmp_path / "snapshot"))) as engine:
        assert ids_of(engine) == expected


@pytest.mark.parametrize(
    "gone", ["experts.4.down_proj.weight", "shared_expert.up_proj.weight", "shared_expert_gate.weight", "gate.weight"]
)
def test_a_missing_tensor_is_named(gone: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("qwen2_moe")
    tensors = load_file(source / "model.safetensors")
    del tensors[f"model.layers.1.mlp.{gone}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"1 missing: model\.layers\.1\.mlp\.{gone}"):
        load_model(config_of(str(tmp_path)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2, 5]},
        {"mlp_only_layers": [0, 1, 2, 3, 4, 5, 6]},
        {"use_sliding_window": True, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4},
        {"use_sliding_window": False, "sliding_window": 16},
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4,
        },
    ],
)
def test_layers_are_what_transformers_makes_them(fields: dict[str, Any]) -> None:
    fields = {"num_hidden_layers": 7} | fields
    theirs = transformers.Qwen2MoeConfig(**TINY | TINY_QWEN2_MOE | fields)
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    with torch.device("meta"):
        layers = transformers.Qwen2MoeForCausalLM(theirs).model.layers
    sparse = tuple(hasattr(layer.mlp, "experts") for layer in layers)
    for hf_config in (FIELDS | fields, theirs.to_dict() | {"architectures": FIELDS["architectures"]}):
        found = read_config(hf_config)
        assert (found.windows, found.sparse) == (windows, sparse)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, more than num_experts, 6"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"qkv_bias": "yes"}, "qkv_bias"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers"),
        ({"use_sliding_window": "no"}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read_config(FIELDS | fields)


def test_defaults_are_those_of_old_files() -> None:
    found = read_config(FIELDS)
    assert found.qkv_bias and not found.routing.renormalize
    assert (found.windows, found.sparse) == ((None, None), (True, True))
    assert not read_config(FIELDS | {"qkv_bias": False}).qkv_bias


def test_the_reference_shape_is_qwen15_moe() -> None:
    shape = find_shape("qwen1.5-moe-a2.7b", PluginOptions())
    opened = open_model(EngineConfig("x", load_format="random", device="cpu", dtype="bfloat16"), RandomReader(shape))
    count = sum(prod(size) for _, size in opened.model.checkpoint_shapes())
    assert count == 14_315_784_192  # as its model card says
    products = {product.name: product for product in model_products(opened)}
    assert products["moe_gate"].kind == "wide" and (products["moe_gate"].n, products["moe_gate"].k) == (60, 2048)
    assert products["shared_mlp_1"].kind == "gated"
    assert "moe_mlp_1" not in products
