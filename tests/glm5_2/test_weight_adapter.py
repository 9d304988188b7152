"""Checkpoints of GLM-5.2 as they come: FP8 blocks, NVFP4, experts in one tensor, and what is dropped by name.

Tests that begin with `pitfall` are named after faults of other implementations.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import Engine, EngineConfig, SamplingParams
from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.loader import adapted
from hookline.config import SpeculativeConfig
from hookline.errors import CheckpointError, UsageError
from hookline.loading import load_model, open_model, parameters
from hookline.weight_adapter import LazyTensor
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig, read_config
from hookline_glm5_2_mtp.weight_adapter import GlmAdapter, from_blocks, from_nibbles
from tests.glm5_2.models import GOLDEN_FP8, GOLDEN_MODEL, config_of, save_model

Change = Callable[[dict[str, torch.Tensor]], None]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("glm") / "model", "glm")


@pytest.fixture
def changed(tiny: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """A copy of the tiny checkpoint with other tensors."""

    def make(change: Change) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    encoding = str(tensor.dtype).removeprefix("torch.")
    return LazyTensor(name, tuple(tensor.shape), encoding, tensor.nbytes, tensor.clone)


def config(**fields: Any) -> GlmMoeDsaConfig:
    return dataclasses.replace(read_config(json.loads((GOLDEN_MODEL / "config.json").read_text())), **fields)


def weights_of(source: Path, **options: Any) -> dict[str, torch.Tensor | None]:
    containers = load_model(config_of(source, **options)).opened.containers
    return {f"{path}.{name}": tensor for path, held in parameters(containers) for name, tensor in held.items()}


def test_fp8_blocks_are_multiplied_out() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 45, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator) + 0.5
    found = from_blocks(weight, scale, (32, 32))
    for row in (0, 31, 32, 69):
        for column in (0, 31, 32, 44):
            assert found[row, column] == weight[row, column].float() * scale[row // 32, column // 32]
    assert found.dtype == torch.float32


def test_nvfp4_nibbles_are_multiplied_out() -> None:
    """The low nibble is the earlier value, and the fourth bit the sign."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    groups = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    found = from_nibbles(packed, groups, torch.tensor([4.0]))
    row = [*E2M1, *(-value for value in E2M1)]
    assert found.tolist() == [[8 * value for value in row] + [2 * value for value in row]]
    assert torch.equal(from_nibbles(packed, groups, torch.tensor(4.0)), found)


@pytest.mark.parametrize("scale_first", [False, True])
def test_a_weight_and_its_scales_become_one_tensor_and_are_read_late(scale_first: bool) -> None:
    def refuse() -> torch.Tensor:
        raise AssertionError("read too early")

    name = "model.layers.3.mlp.shared_experts.up_proj.weight"
    weight = LazyTensor(name, (64, 256), "float8_e4m3fn", 64 * 256, refuse)
    scale = LazyTensor(f"{name}_scale_inv", (2, 8), "float32", 64, refuse)
    other = LazyTensor("model.norm.weight", (256,), "bfloat16", 512, refuse)
    order = [scale, other, weight] if scale_first else [weight, other, scale]
    found = {tensor.name: tensor for tensor in GlmAdapter(config(weight_block_size=(32, 32))).adapt_all(order)}
    assert found.keys() == {name, other.name}
    joined = found[name]
    assert (joined.shape, joined.encoding, joined.nbytes) == ((64, 256), "float8_e4m3fn", 64 * 256 + 64)
    assert set(joined.origins) == {name, scale.name}


def test_nvfp4_parts_become_one_tensor() -> None:
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (256, 32), dtype=torch.uint8, generator=generator)
    groups = (torch.rand(256, 4, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    parts = [
        lazy(name, packed),
        lazy(f"{name}_scale", groups),
        lazy(f"{name}_scale_2", torch.tensor(0.25)),
        lazy(name.replace("weight", "input_scale"), torch.tensor(3.0)),
    ]
    [found] = GlmAdapter(config()).adapt_all(parts)
    assert (found.shape, found.encoding) == ((256, 64), "float4_e2m1fnx2")
    assert torch.equal(found.load(), from_nibbles(packed, groups, torch.tensor(0.25)))


def test_pitfall_kv_b_proj_cut_by_heads_before_its_scales() -> None:
    """56 rows a head in blocks of 32: a head's border cuts a block, so the whole is multiplied out first."""
    names = ("key_w", "value_w")
    found = load_model(config_of(GOLDEN_FP8)).opened
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(GOLDEN_FP8.glob("*.safetensors")):
        tensors |= load_file(shard)
    layers: Any = found.model
    for index in (0, 5):
        name = f"model.layers.{index}.self_attn.kv_b_proj.weight"
        scale = tensors[f"{name}_scale_inv"]
        whole = tensors[name].float() * scale.repeat_interleave(32, 0)[: 8 * 56].repeat_interleave(32, 1)[:, :64]
        keys, values = (getattr(layers.layers[index], one) for one in names)
        assert torch.equal(keys, whole.view(8, 56, 64)[:, :24])
        assert torch.equal(values, whole.view(8, 56, 64)[:, 24:])
        assert not torch.equal(scale[0], scale[1])


@pytest.mark.parametrize(
    ("gone", "kind"),
    [
        ("_scale_inv", "fp8"),
        ("_scale", "nvfp4"),
        ("_scale_2", "nvfp4"),
    ],
)
def test_a_missing_scale_is_named(gone: str, kind: str) -> None:
    name = "model.layers.3.mlp.shared_experts.up_proj.weight"
    parts = {name: torch.zeros(64, 256).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 8)}
    if kind == "nvfp4":
        parts = {
            name: torch.zeros(64, 128, dtype=torch.uint8),
            f"{name}_scale": torch.ones(64, 16).to(torch.float8_e4m3fn),
            f"{name}_scale_2": torch.ones(()),
        }
    tensors = [lazy(key, tensor) for key, tensor in parts.items() if key != name + gone]
    with pytest.raises(CheckpointError, match=rf"there is no {name}{gone}"):
        list(GlmAdapter(config(weight_block_size=(32, 32))).adapt_all(tensors))


def test_scales_of_another_shape_are_named() -> None:
    name = "model.layers.3.self_attn.o_proj.weight"
    parts = [lazy(name, torch.zeros(64, 256).to(torch.float8_e4m3fn)), lazy(f"{name}_scale_inv", torch.ones(1, 2))]
    with pytest.raises(CheckpointError, match=r"is \[1, 2\]; .* has \[2, 8\] blocks of 32 x 32"):
        list(GlmAdapter(config(weight_block_size=(32, 32))).adapt_all(parts))
    [found] = GlmAdapter(config(weight_block_size=(128, 128))).adapt_all(parts)
    assert torch.equal(found.load(), torch.zeros(64, 256))


def test_a_scale_without_its_weight_is_unexpected(changed: Callable[[Change], Path]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    folder = changed(lambda tensors: tensors.update({name: torch.ones(1, 1)}))
    with pytest.raises(CheckpointError, match=f"1 unexpected: {name}"):
        load_model(config_of(folder))


def test_pitfall_quantised_target_and_bf16_draft(tmp_path: Path) -> None:
    """What is quantised is told by each tensor: the same config, the draft's matrices in bf16."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(GOLDEN_FP8 / name, folder)
    tensors = {}
    for shard in sorted(GOLDEN_FP8.glob("*.safetensors")):
        tensors |= load_file(shard)
    mtp = "model.layers.8."
    for name in [name for name in tensors if name.startswith(mtp) and f"{name}_scale_inv" in tensors]:
        scale = tensors.pop(f"{name}_scale_inv")
        tensors[name] = from_blocks(tensors[name], scale, (32, 32)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    speculative = SpeculativeConfig(num_speculative_tokens=2)
    quantised, mixed = (weights_of(one, speculative=speculative) for one in (GOLDEN_FP8, folder))
    assert quantised.keys() == mixed.keys()
    for name, tensor in quantised.items():
        other = mixed[name]
        assert tensor is not None and other is not None
        is_draft = name.startswith("layers.8.")
        assert torch.allclose(tensor, other, rtol=5e-3 if is_draft else 0, atol=0), name


def test_experts_in_one_tensor(changed: Callable[[Change], Path], tiny: Path) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (1, 2, 3):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: torch.stack([tensors.pop(f"{prefix}.{expert}.{kind}.weight") for expert in range(8)])
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
            tensors[f"{prefix}.down_proj"] = parts["down_proj"]

    expected, found = weights_of(tiny), weights_of(changed(fuse))
    for name, tensor in expected.items():
        other = found[name]
        assert tensor is not None and other is not None and torch.equal(tensor, other), name


def test_pitfall_indexers_of_shared_layers(changed: Callable[[Change], Path], tiny: Path) -> None:
    """Some conversions give every layer one; those of shared layers are dropped, scales and all."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.self_attn.indexer.")}
        assert own
        tensors.update({name.replace("layers.1", "layers.3"): tensor.clone() for name, tensor in own.items()})
        tensors["model.layers.3.self_attn.indexer.wk.weight_scale_inv"] = torch.ones(1, 1)

    assert weights_of(changed(add)).keys() == weights_of(tiny).keys()


def test_dropped_by_name() -> None:
    names = (
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.4.mlp.experts.7.up_proj.input_scale",
        "model.layers.8.embed_tokens.weight",
        "model.layers.8.shared_head.head.weight",
        "model.layers.2.self_attn.indexer.wk.weight",
    )
    kept = (
        "model.embed_tokens.weight",
        "model.layers.8.shared_head.norm.weight",
        "model.layers.8.self_attn.indexer.wk.weight",
        "model.layers.3.self_attn.indexer.wk.weight",
    )
    tensors = [lazy(name, torch.zeros(1)) for name in (*names, *kept)]
    assert [tensor.name for tensor in GlmAdapter(config()).adapt_all(tensors)] == list(kept)


def test_the_draft_is_dropped_or_held() -> None:
    off = open_model(config_of(GOLDEN_MODEL))
    on = open_model(config_of(GOLDEN_MODEL, speculative=SpeculativeConfig(num_speculative_tokens=3)))
    for opened, held in ((off, False), (on, True)):
        adapter = opened.architecture.weight_adapter(opened.config, "safetensors")
        audit = opened.containers.audit(adapted(opened.reader, adapter))
        assert audit.ok, audit.report()
        draft = [name for name in audit.dropped if name.startswith("model.layers.8.")]
        assert (len(audit.dropped), len(draft)) == ((0, 0) if held else (71, 71))
        assert audit.matched + len(audit.dropped) == 490


def test_layers_beyond_the_first_for_drafts_are_left_out(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda tensors: tensors.update({"model.layers.5.enorm.weight": torch.ones(64)}))
    with pytest.raises(CheckpointError, match="unexpected"):
        load_model(config_of(folder))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 2}))
    load_model(config_of(folder))


def test_a_missing_tensor_is_named(changed: Callable[[Change], Path]) -> None:
    name = "model.layers.1.self_attn.indexer.k_norm.bias"
    folder = changed(lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match=rf"1 missing: {name}"):
        load_model(config_of(folder))


@pytest.mark.parametrize(
    ("source", "dtype", "computed"),
    [
        (GOLDEN_FP8, "float8_e4m3fn", "float32"),
        (GOLDEN_FP8, "bfloat16", "bfloat16"),
        (GOLDEN_MODEL, "auto", "float32"),
        (GOLDEN_MODEL, "bfloat16", "bfloat16"),
    ],
)
def test_encodings_by_dtype(source: Path, dtype: Any, computed: str) -> None:
    assert open_model(config_of(source, dtype=dtype)).engine_config.dtype == computed


@pytest.mark.parametrize(
    ("source", "dtype", "load_format"),
    [
        (GOLDEN_MODEL, "float8_e4m3fn", "auto"),
        (GOLDEN_FP8, "float4_e2m1fnx2", "auto"),
        (GOLDEN_MODEL, "float8_e4m3fn", "random"),
    ],
)
def test_an_encoding_that_the_weights_are_not_in_is_refused(source: Path, dtype: Any, load_format: Any) -> None:
    with pytest.raises(UsageError, match=f"dtype is '{dtype}', and no weight is in that encoding"):
        open_model(config_of(source, dtype=dtype, load_format=load_format))


def test_an_encoding_that_the_plugin_does_not_load_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="which the plugin for LlamaForCausalLM does not load"):
        open_model(EngineConfig(str(tiny_llama), dtype="float8_e4m3fn"))


def test_a_snapshot_gives_the_same(tiny: Path, tmp_path: Path) -> None:
    prompts, params = [[1, 2, 3], list(range(60))], SamplingParams(max_tokens=8, ignore_eos=True)
    found = []
    with Engine(config_of(tiny)) as engine:
        found.append([result.outputs[0].token_ids for result in engine.generate(prompts, params)])
        engine.serialize(tmp_path / "snapshot")
    with Engine(config_of(tmp_path / "snapshot")) as engine:
        found.append([result.outputs[0].token_ids for result in engine.generate(prompts, params)])
    assert found[0] == found[1]


def test_the_reader_is_read_forward(tiny: Path) -> None:
    """The adapter asks for no order, and keeps the checkpoint's."""
    reader = open_checkpoint(tiny, "auto")
    names = [tensor.name for tensor in reader.tensors()]
    opened = open_model(config_of(tiny))
    adapter = opened.architecture.weight_adapter(opened.config, "safetensors")
    assert [tensor.name for tensor in adapted(reader, adapter)] == names
