"""Checkpoints of GLM-5.2 at full size that are headers alone: names, types and shapes as published, and no data.

Their files are sparse: as long as the real ones, and with hardly a byte on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

from hookline_glm5_2_mtp.shapes import GLM_5_2

Build = Literal["fp8", "bf16", "nvfp4"]
Tensor = tuple[str, str, tuple[int, ...]]

_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
_SHARD_BYTES = 5_400_000_000
MTP_LAYER = 78
FULL = frozenset({0, 1, 2, *range(6, 78, 4), MTP_LAYER})


def tensors_of(build: Build, layers: int = MTP_LAYER) -> Iterator[Tensor]:
    """Every tensor: name, type as safetensors writes it, shape; with fewer `layers` the draft's follows on the last."""
    yield "model.embed_tokens.weight", "BF16", (154880, 6144)
    for layer in (*range(layers), MTP_LAYER):
        for name, dtype, shape in _layer(build, layer):
            yield f"model.layers.{min(layer, layers)}.{name}", dtype, shape
    yield "model.norm.weight", "BF16", (6144,)
    yield "lm_head.weight", "BF16", (154880, 6144)


def _layer(build: Build, layer: int) -> Iterator[Tensor]:
    quantised = build == "fp8"
    for name, size in (("input_layernorm", 6144), ("post_attention_layernorm", 6144)):
        yield f"{name}.weight", "BF16", (size,)
    for name, size in (("q_a_layernorm", 2048), ("kv_a_layernorm", 512)):
        yield f"self_attn.{name}.weight", "BF16", (size,)
    matrices = {
        "self_attn.q_a_proj": (2048, 6144),
        "self_attn.q_b_proj": (16384, 2048),
        "self_attn.kv_a_proj_with_mqa": (576, 6144),
        "self_attn.kv_b_proj": (28672, 512),
        "self_attn.o_proj": (6144, 16384),
    }
    if layer in FULL:
        matrices |= {"self_attn.indexer.wq_b": (4096, 2048), "self_attn.indexer.wk": (128, 6144)}
        yield "self_attn.indexer.k_norm.weight", "BF16", (128,)
        yield "self_attn.indexer.k_norm.bias", "BF16", (128,)
        yield "self_attn.indexer.weights_proj.weight", "BF16", (32, 6144)
    if layer < 3:
        matrices |= _mlp("mlp", 12288)
    else:
        yield "mlp.gate.weight", "BF16", (256, 6144)
        yield "mlp.gate.e_score_correction_bias", "F32", (256,)
        matrices |= _mlp("mlp.shared_experts", 2048)
    for name, shape in matrices.items():
        yield from _matrix(name, shape, "fp8" if quantised else "bf16")
    if layer >= 3:
        kind: Build = "bf16" if build == "nvfp4" and layer == MTP_LAYER else build
        for expert in range(256):
            for name, shape in _mlp(f"mlp.experts.{expert}", 2048).items():
                yield from _matrix(name, shape, kind)
    if layer == MTP_LAYER:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{name}.weight", "BF16", (6144,)
        yield "eh_proj.weight", "BF16", (6144, 12288)


def _mlp(block: str, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{block}.gate_proj": (width, 6144),
        f"{block}.up_proj": (width, 6144),
        f"{block}.down_proj": (6144, width),
    }


def _matrix(name: str, shape: tuple[int, int], build: Build) -> Iterator[Tensor]:
    rows, columns = shape
    if build == "bf16":
        yield f"{name}.weight", "BF16", shape
    elif build == "fp8":
        yield f"{name}.weight", "F8_E4M3", shape
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
    else:
        yield f"{name}.weight", "U8", (rows, columns // 2)
        yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
        yield f"{name}.weight_scale_2", "F32", ()
        yield f"{name}.input_scale", "F32", ()


def write_checkpoint(folder: Path, build: Build, layers: int = MTP_LAYER) -> list[str]:
    """Writes config, index and shards; the names of all tensors."""
    folder.mkdir()
    config: dict[str, Any] = GLM_5_2 | {"num_hidden_layers": layers}
    if build == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
        }
    elif build == "nvfp4":
        config |= {"bos_token_id": 0, "mlp_bias": False, "num_experts": 256}
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors_of(build, layers):
        nbytes = prod(tensor[2]) * _BYTES[tensor[1]]
        if size + nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / shard, tensors)
        weight_map |= dict.fromkeys((name for name, _, _ in tensors), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return list(weight_map)


def _write_shard(path: Path, tensors: list[Tensor]) -> None:
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
