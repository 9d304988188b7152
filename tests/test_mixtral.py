"""The Mixtral plugin: experts as lists and as one tensor, what its config refuses, and models at the edges of routing.

That greedy ids equal transformers', whatever else the engine does, is in test_equality.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hookline import Engine, EngineConfig, SamplingParams
from hookline.benchmark.shapes import find_shape
from hookline.checkpoint.module import ModuleReader
from hookline.checkpoint.random import RandomReader
from hookline.config import PluginOptions
from hookline.errors import CheckpointError, ModelConfigError
from hookline.loading import load_model, open_model, parameters
from hookline.weight_adapter import FusedExpertsAdapter, LazyTensor
from hookline_mixtral.config import read_config
from tests.conftest import TINY, TINY_MIXTRAL, make_module, write_tokenizer

FIELDS: dict[str, Any] = TINY | TINY_MIXTRAL | {"architectures": ["MixtralForCausalLM"], "rms_norm_eps": 1e-5}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5], [1, 2, 3], [200, 7, 7, 7, 30, 90, 251], list(range(40, 75))]
ADAPTER = FusedExpertsAdapter("block_sparse_moe", gate="w1", up="w3", down="w2")


def config_of(source: str = "x", **options: Any) -> EngineConfig:
    probe: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_memory": 2**21}
    return EngineConfig(source, max_model_len=128, **probe | options)


def weights_of(config: EngineConfig, reader: Any = None) -> dict[str, torch.Tensor]:
    containers = load_model(config, reader).opened.containers
    return {
        f"{container}.{name}": tensor
        for container, held in parameters(containers)
        for name, tensor in held.items()
        if tensor is not None
    }


def ids_of(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in engine.generate(prompts, GREEDY)]


def by_transformers(model: transformers.PreTrainedModel) -> list[list[int]]:
    model.eval().generation_config.eos_token_id = None
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        rows = [torch.tensor([ids]) for ids in PROMPTS]
        return [
            model.generate(row, attention_mask=torch.ones_like(row), **options)[0, row.shape[1] :].tolist()
            for row in rows
        ]


def save_fused(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """The module's own names and tensors, with all experts of a layer in one."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def test_lists_one_tensor_and_a_module_in_memory_are_the_same(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    lists = checkpoint("mixtral")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in load_file(lists / "model.safetensors")
    module = make_module("mixtral")
    expected = weights_of(config_of(str(lists)))
    assert expected["layers.1.moe_mlp_1"].shape == (4, 2 * 48, 64)
    for found in (
        weights_of(config_of(str(save_fused(module, tmp_path / "fused")))),
        weights_of(config_of(), ModuleReader(module)),
    ):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].stride() == tensor.stride(), name
    with Engine(config_of(), reader=ModuleReader(module)) as engine:
        assert ids_of(engine) == by_transformers(module)


def test_a_fused_tensor_is_read_once_and_in_parts() -> None:
    values, reads = torch.arange(2 * 6 * 4.0).view(2, 6, 4), list[str]()

    def load() -> torch.Tensor:
        reads.append("read")
        return values

    tensor = LazyTensor("model.layers.3.mlp.experts.gate_up_proj", (2, 6, 4), "float32", values.nbytes, load)
    parts = list(ADAPTER.adapt(tensor))
    block = "model.layers.3.block_sparse_moe"
    assert [part.name for part in parts] == [f"{block}.experts.{e}.w{w}.weight" for e in (0, 1) for w in (1, 3)]
    assert not reads
    for part, expected in zip(parts, values.view(4, 3, 4), strict=True):
        assert part.shape == (3, 4)
        assert torch.equal(part.load(), expected)
    assert reads == ["read"]
    assert sum(part.nbytes for part in parts) == values.nbytes
    assert torch.equal(parts[0].load(), values[0, :3]), "a second time through"
    assert reads == ["read"] * 2
    gate = LazyTensor("model.layers.3.mlp.gate.weight", (2, 4), "float32", 32, load)
    assert [part.name for part in ADAPTER.adapt(gate)] == [f"{block}.gate.weight"]
    other = LazyTensor("model.norm.weight", (4,), "float32", 16, load)
    assert list(ADAPTER.adapt(other)) == [other]


@pytest.mark.parametrize("gone", ["block_sparse_moe.experts.2.w3.weight", "block_sparse_moe.gate.weight"])
def test_a_missing_tensor_is_named(gone: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("mixtral")
    tensors = load_file(source / "model.safetensors")
    del tensors[f"model.layers.1.{gone}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"1 missing: model\.layers\.1\.{gone}"):
        load_model(config_of(str(tmp_path)))


def test_a_fused_tensor_of_too_few_experts_is_named(tmp_path: Path) -> None:
    folder = save_fused(make_module("mixtral", num_local_experts=3), tmp_path / "fused")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"num_local_experts": 3', '"num_local_experts": 4'))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight"):
        load_model(config_of(str(folder)))


def all_to_one(model: transformers.PreTrainedModel) -> None:
    """Experts 1 and 2 for every token: a norm that gives positive sums only where the embedding does."""
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.zero_()[0] = 1.0
        layer.mlp.gate.weight.data.zero_()
        layer.mlp.gate.weight.data[1, 0], layer.mlp.gate.weight.data[2, 0] = 9.0, 8.0
    model.model.embed_tokens.weight.data[:, 0] = 9.0


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"num_experts_per_tok": 4}, None),  # top-k is the number of experts
        ({"num_local_experts": 1, "num_experts_per_tok": 1}, None),
        ({"num_local_experts": 5, "num_experts_per_tok": 1}, None),
        ({"hidden_act": "gelu"}, None),
        ({}, all_to_one),
    ],
)
def test_ids_at_the_edges_of_routing_equal_transformers(fields: dict[str, Any], change: Any) -> None:
    module = make_module("mixtral", **fields)
    if change is not None:
        change(module)
    routes: list[torch.Tensor] = []
    with Engine(config_of(), reader=ModuleReader(module)) as engine:
        watch_routes(engine, routes)
        assert ids_of(engine) == by_transformers(module)
        assert ids_of(engine, PROMPTS[:1]) == ids_of(engine)[:1]
    if change is not None:
        assert {tuple(row) for ids in routes for row in ids.tolist()} == {(1, 2)}


def test_overlapped_steps_and_a_snapshot_give_the_same(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(checkpoint("mixtral"))
    with Engine(config_of(folder)) as engine:
        expected = ids_of(engine)
        engine.serialize(tmp_path / "snapshot")
    with Engine(config_of(folder, overlap=True)) as engine:
        assert ids_of(engine) == expected
    with Engine(config_of(str(tmp_path / "snapshot"))) as engine:
        assert ids_of(engine) == expected


def test_routes_are_the_same_in_every_run_and_batch(checkpoint: Callable[..., Path]) -> None:
    """Each token's experts, told by layer, request and place, alone and beside others."""
    prompt = PROMPTS[2]
    found = []
    with Engine(config_of(str(checkpoint("mixtral")), prefix_caching=False)) as engine:
        routes: list[torch.Tensor] = []
        watch_routes(engine, routes)
        for others in ([], [], PROMPTS[3:], [PROMPTS[3], PROMPTS[1]]):
            routes.clear()
            engine.generate([prompt, *others], SamplingParams(max_tokens=1, ignore_eos=True))
            found.append([ids[: len(prompt)].tolist() for ids in routes])
    assert all(each == found[0] for each in found)
    assert len(found[0]) == TINY["num_hidden_layers"]


def watch_routes(engine: Engine, routes: list[torch.Tensor]) -> None:
    model: Any = engine.loaded.opened.model
    model.moe = dataclasses.replace(model.moe, watch=lambda _, ids: routes.append(ids.clone()))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_local_experts": "8"}, "num_local_experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than num_local_experts, 4"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"hidden_act": "relu6"}, "hidden_act"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read_config(FIELDS | fields)


def test_the_config_is_read_in_both_spellings() -> None:
    found = read_config(FIELDS | {"rope_theta": 5e5, "sliding_window": 32, "torch_dtype": "bfloat16"})
    assert (found.rope.theta, found.window, found.dtype) == (5e5, 32, "bfloat16")
    assert read_config(FIELDS | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope.theta == 5e5
    bare = read_config(FIELDS)
    assert (bare.rope.theta, bare.window, bare.n_experts, bare.n_top_k) == (1e6, None, 4, 2)


def test_the_reference_shape_is_mixtral_8x7b() -> None:
    shape = find_shape("mixtral-8x7b", PluginOptions())
    opened = open_model(EngineConfig("x", load_format="random", device="cpu", dtype="bfloat16"), RandomReader(shape))
    count = sum(prod(size) for _, size in opened.model.checkpoint_shapes())
    assert count == 46_702_792_704  # as its model card says
    config: Any = opened.config
    assert (config.num_layers, config.n_experts, config.n_top_k, config.rope.theta) == (32, 8, 2, 1e6)
