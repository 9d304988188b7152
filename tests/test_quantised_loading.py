"""Quantised checkpoints from file to model: what stays packed, what it takes, and machines without a compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from hookline import Engine, EngineConfig, SamplingParams
from hookline.checkpoint import open_checkpoint
from hookline.loading import LoadedModel, expected_bytes, load_model, open_model, parameters, save_snapshot
from hookline.model import TransformerModel
from hookline.parameter_base import Parameter
from hookline.parameters import GQAMegatronQKVParameter, MegatronQKVParameter, UnfusedMoEGatedMLPParameter
from hookline.weight_adapter import LazyTensor
from hookline_kernels import native
from hookline_kernels.quantized import QuantizedTensor
from tests.kernels.test_quantized import draw

VOCAB, WIDTH, HIDDEN, HEADS, HEAD = 96, 64, 48, 2, 24
SHAPES = {
    "attn_q.weight": (HEADS * HEAD, WIDTH),
    "attn_k.weight": (HEAD, WIDTH),
    "attn_v.weight": (HEAD, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_gate.weight": (HIDDEN, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
    "attn_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
}
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**20}
REASON = native.load(torch.float32).reason
NATIVE = pytest.mark.skipif(REASON is not None, reason=f"no native kernels here: {REASON}")
TYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def write_llama(path: Path, kinds: Mapping[str, Type], *, tied: bool = False) -> Path:
    """A Llama of one layer; what `kinds` does not name is Q4_0, or float32 where its rows do not divide."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    ends: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        ends["output.weight"] = (VOCAB, WIDTH)
    for name, shape in (ends | {f"blk.0.{name}": shape for name, shape in SHAPES.items()}).items():
        kind = kinds.get(name.removeprefix("blk.0."), Type.F32 if shape[-1] % 32 else Type.Q4_0)
        values = rng.standard_normal(shape, dtype=np.float32) / 4
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def lose_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and the machine has none, and a CPU that multiplies every 16-bit type by itself."""

    def lose() -> None:
        monkeypatch.setattr(native, "load", lambda dtype: native.Native(None, "there is no C compiler"))
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_fp16": True})
        native.has_native_16bit_products.cache_clear()

    yield lose
    native.has_native_16bit_products.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Each kind of tensor quantised, one-dimensional ones too."""
    return write_llama(tmp_path / "m.gguf", {"attn_norm.weight": Type.Q8_0, "output_norm.weight": Type.Q8_0})


def held(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for _, container in parameters(loaded.opened.containers)
        for name, tensor in container.items()
        if tensor is not None
    }


def generate(model: Path) -> list[int]:
    with Engine(EngineConfig(str(model), **OPTIONS)) as engine:
        return list(engine.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)


@TYPES
@pytest.mark.parametrize("compiler", [True, False])
def test_a_loaded_model_holds_plain_tensors(
    path: Path, dtype: Any, compiler: bool, lose_compiler: Callable[[], None]
) -> None:
    if not compiler:
        lose_compiler()
    loaded = load_model(EngineConfig(str(path), device="cpu", dtype=dtype))
    assert {type(tensor) for tensor in held(loaded).values()} == {torch.Tensor}
    packed = {name for name, tensor in held(loaded).items() if tensor.dtype == torch.uint8}
    stays = compiler and REASON is None and dtype != "float16"
    assert packed == ({"word_emb", "word_unembed", "qkv_w", "mlp_1_w"} if stays else set())
    assert loaded.weights_bytes == expected_bytes(loaded.opened)


def test_text_does_not_depend_on_a_compiler(path: Path, lose_compiler: Callable[[], None]) -> None:
    want = generate(path)
    lose_compiler()
    assert generate(path) == want


@pytest.mark.parametrize("odd", ["attn_v.weight", "ffn_up.weight", "token_embd.weight"])
def test_parts_of_different_encodings_are_reckoned_as_the_values_they_become(tmp_path: Path, odd: str) -> None:
    loaded = load_model(EngineConfig(str(write_llama(tmp_path / "m.gguf", {odd: Type.Q8_0})), device="cpu"))
    assert loaded.weights_bytes == expected_bytes(loaded.opened)


def test_names_that_nothing_maps_are_left_to_the_loader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(EngineConfig(str(path), device="cpu"))
    before = expected_bytes(opened)
    extra = LazyTensor("blk.0.attn_q.bias", (48,), "float32", 192, lambda: torch.zeros(48))
    tensors = [*opened.reader.tensors(), extra]
    monkeypatch.setattr(opened.reader, "tensors", lambda: iter(tensors))
    assert expected_bytes(opened) == before  # the config says that there is no bias
    tensors.append(dataclasses.replace(extra, name="blk.7.attn_norm.weight"))
    assert expected_bytes(opened) == before + 192


@NATIVE
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_snapshot_is_unpacked_where_nothing_multiplies_it(
    tmp_path: Path, tied: bool, lose_compiler: Callable[[], None]
) -> None:
    path, folder = write_llama(tmp_path / "m.gguf", {}, tied=tied), tmp_path / "snapshot"
    want = generate(path)
    save_snapshot(load_model(EngineConfig(str(path), device="cpu")), folder)
    config = EngineConfig(str(folder), device="cpu")
    assert load_model(config).weights_bytes == expected_bytes(open_model(config)) == open_checkpoint(folder).nbytes
    lose_compiler()
    again = load_model(config)
    weights = held(again)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert (weights["word_emb"].data_ptr() == weights["word_unembed"].data_ptr()) == tied
    assert again.weights_bytes == expected_bytes(again.opened)
    assert generate(folder) == want


def test_place_gives_values() -> None:
    model = SimplePlace()
    for kind in (torch.float32, torch.bfloat16):
        model.dtype = kind
        weight = draw(4, 64, bits=8)
        for tensor in (weight, weight[0]):
            found = model.place(tensor)
            assert type(found) is torch.Tensor
            assert torch.equal(found, tensor.values().to(kind))  # type: ignore[attr-defined]


class SimplePlace(TransformerModel):
    """A model that can do nothing but place."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    cache_specs = checkpoint_shapes = forward = compute_logits = None  # type: ignore[assignment]


class AsItIs(Parameter):
    """What a plugin may write."""

    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.params


class Recorder:
    """A model of 4 query heads, 2 key-value heads and 2 experts that notes what it is given."""

    num_heads, num_kv_heads, n_experts = 4, 2, 2

    def note(self, param: torch.Tensor) -> None:
        self.given = param

    transform_qkv_param = transform_moe_mlp_1_param = note


@pytest.mark.parametrize("kind", [GQAMegatronQKVParameter, MegatronQKVParameter])
def test_templates_reorder_codes(kind: type[Parameter]) -> None:
    model, plain, weight = Recorder(), Recorder(), draw(48, 64, bits=4)
    for target, tensor in ((model, weight), (plain, weight.values())):
        parameter = kind(target)
        parameter.set("params", tensor)
        parameter.complete()
    assert isinstance(model.given, QuantizedTensor)
    assert torch.equal(model.given.values(), plain.given)


def test_templates_stack_codes() -> None:
    model, weights = Recorder(), [draw(8, 64, bits=8, seed=seed) for seed in range(4)]
    parameter = UnfusedMoEGatedMLPParameter(model)
    for index in range(2):
        parameter.set("gating_experts", weights[index], index)
        parameter.set("up_experts", weights[2 + index], index)
    parameter.complete()
    assert isinstance(model.given, QuantizedTensor)
    values = [weight.values() for weight in weights]
    assert torch.equal(model.given.values(), torch.stack([torch.cat(values[0::2]), torch.cat(values[1::2])]))


def test_a_parameter_that_keeps_its_source_is_values() -> None:
    model, weight = SimplePlace(), draw(4, 64, bits=4)
    parameter = AsItIs(model)
    parameter.set("params", weight)
    found = parameter.complete()
    assert type(found) is torch.Tensor
    assert torch.equal(found, weight.values())


def test_mapping_a_tensor_tells_whether_it_keeps_codes() -> None:
    lazy = LazyTensor("w", (4, 64), "Q4_0", 144, lambda: draw(4, 64, bits=4), 4)
    assert lazy.mapped(lambda x: x[:2], (2, 64)).code_bits == 4
    halved = lazy.mapped(lambda x: x * 0.5, keeps_codes=False)
    assert (halved.code_bits, halved.shape) == (None, (4, 64))
    assert lazy.mapped(lambda x: x.sum(), ()).shape == ()
