"""GGUF files: weights and config. Small files are written here with the `gguf` package."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.gguf import GgufReader
from hookline.errors import CheckpointError
from hookline_kernels.quantized import QuantizedTensor

Extra = Callable[[gguf.GGUFWriter], None]


def write_gguf(path: Path, extra: Extra | None = None, tensors: dict[str, np.ndarray[Any, Any]] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_context_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    if extra is not None:
        extra(writer)
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((10, 64), dtype=np.float32))
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_from_the_metadata(tmp_path: Path) -> None:
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    assert reader.weights_format == "gguf"
    assert dict(reader.hf_config) == {
        "architectures": ["gguf.toy"],
        "model_type": "toy",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-05,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "dtype": "float32",
    }


def test_config_of_rarer_fields(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_rope_dimension_count(8)
        writer.add_sliding_window(64)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)

    half = np.zeros((200, 64), dtype=np.float16)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "output.weight": half,
        "blk.0.attn_q.bias": np.zeros(64, dtype=np.float32),
    }
    reader = open_checkpoint(write_gguf(tmp_path / "m.gguf", extra, tensors))
    config = reader.hf_config
    assert (config["head_dim"], config["sliding_window"], config["tie_word_embeddings"]) == (32, 64, False)
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["dtype"]) == (8, 2, "float16")
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert dict(reader.generation_config) == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert config["eos_token_id"] == [2, 5]


def llama3_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    result = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        result.append(1 / ((1 - smooth) / factor + smooth))
    return result


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_rope_parameters_come_back_from_the_factors(tmp_path: Path, factor: float, head_dim: int) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(head_dim)

    factors = np.array(llama3_factors(100000.0, head_dim, factor, 1.0, 4.0, 8192), dtype=np.float32)
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", extra, {"rope_freqs.weight": factors}))
    assert reader.hf_config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 100000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in {tensor.name for tensor in reader.tensors()}


def test_rope_factors_of_no_known_formula_are_refused(tmp_path: Path) -> None:
    factors = np.array([1, 3, 2, 7, 1.5, 9, 4, 9], dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not follow"):
        GgufReader(write_gguf(tmp_path / "m.gguf", None, {"rope_freqs.weight": factors}))


def test_longrope_factors(tmp_path: Path) -> None:
    tensors = {
        "rope_factors_long.weight": np.array([1.5, 2.5], dtype=np.float32),
        "rope_factors_short.weight": np.array([1.0, 1.25], dtype=np.float32),
    }
    rope = GgufReader(write_gguf(tmp_path / "m.gguf", None, tensors)).hf_config["rope_parameters"]
    assert (rope["rope_type"], rope["long_factor"], rope["short_factor"]) == ("longrope", [1.5, 2.5], [1.0, 1.25])


QUANTISED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q4_K, Type.Q6_K, Type.IQ4_NL]


@pytest.mark.parametrize("largest", [255, 60], ids=["any", "finite"])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_values_equal_the_packages(tmp_path: Path, kind: Type, largest: int) -> None:
    """Also where random bytes make scales that are no numbers: those do not stay as codes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, largest + 1, (300, 4096 // block * size), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_context_length, writer.add_head_count):
        add(1)
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.add_tensor("token_embd.weight", np.ones((3, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lazy = next(tensor for tensor in open_checkpoint(path).tensors() if tensor.name == "w")
    assert (lazy.shape, lazy.encoding, lazy.nbytes) == ((300, 4096), kind.name, blocks.nbytes)
    with np.errstate(all="ignore"):
        value = lazy.load()
        expected = gguf.dequantize(blocks, kind)
    assert value.dtype == torch.float32
    assert isinstance(value, QuantizedTensor) == (lazy.code_bits is not None and largest < 124)
    assert lazy.code_bits == {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q8_0: 8}.get(kind)
    np.testing.assert_array_equal(value.mul(1).numpy(), expected)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_one_dimension_has_values_and_no_codes(tmp_path: Path, kind: Type) -> None:
    blocks = gguf.quantize(np.random.default_rng(1).standard_normal(64, dtype=np.float32), kind)
    path = write_gguf(tmp_path / "m.gguf", lambda writer: writer.add_tensor("norm", blocks, raw_dtype=kind))
    lazy = next(tensor for tensor in open_checkpoint(path).tensors() if tensor.name == "norm")
    assert (lazy.shape, lazy.code_bits) == ((64,), None)
    value = lazy.load()
    assert type(value) is torch.Tensor
    np.testing.assert_array_equal(value.numpy(), gguf.dequantize(blocks, kind))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int32, np.float64])
def test_plain_values_keep_their_type(tmp_path: Path, dtype: type[np.generic]) -> None:
    value = np.arange(24).reshape(2, 3, 4).astype(dtype)
    lazy = list(GgufReader(write_gguf(tmp_path / "m.gguf", None, {"w": value})).tensors())[-1]
    assert lazy.shape == (2, 3, 4)
    assert lazy.encoding == np.dtype(dtype).name
    np.testing.assert_array_equal(lazy.load().numpy(), value)


def test_bfloat16(tmp_path: Path) -> None:
    value = torch.randn(4, 32).to(torch.bfloat16)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_context_length, writer.add_head_count):
        add(1)
    writer.add_tensor("token_embd.weight", value.view(torch.uint8).numpy(), raw_dtype=Type.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GgufReader(path)
    assert torch.equal(next(reader.tensors()).load(), value)
    assert reader.hf_config["dtype"] == "bfloat16"


def test_cut_files_are_refused_at_every_place(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", None, {"w": np.ones((3, 5), dtype=np.float32)})
    data = path.read_bytes()
    last = max(tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    for cut in [*range(0, last, 7), *range(last - 40, last)]:
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GgufReader(path)


def test_changed_headers_never_raise_anything_else(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)

    path = write_gguf(tmp_path / "m.gguf", extra)
    data = path.read_bytes()
    start = gguf.GGUFReader(path).tensors[0].data_offset
    rng = random.Random(3)
    refused = 0
    for _ in range(1000):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(start)
            if rng.random() < 0.3:
                value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
                changed[place : place + 8] = struct.pack("<Q", value)
            else:
                changed[place] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            reader = GgufReader(path)
            for tensor in reader.tensors():
                tensor.load()
            _ = reader.tokenizer_source
        except CheckpointError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"\x80\x02}q\x00" * 20, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata fields; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(64), "a name of"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61), "more than the file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "array of type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown type 99"),
    ],
)
def test_what_is_no_gguf_file(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


def test_part_of_a_split_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GgufReader(path)


def test_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[Type.Q8_K]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_tensor("w", np.zeros((1, size), dtype=np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert block == 256
    with pytest.raises(CheckpointError, match="Q8_K"):
        GgufReader(path)


def test_folder_with_gguf_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).files == (tmp_path / "a.gguf",)
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
