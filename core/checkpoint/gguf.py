"""A GGUF file: weights, config, tokenizer and chat template in one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType

from hookline.checkpoint.files import read_span
from hookline.checkpoint.gguf_config import ROPE_FACTORS, generation_config, hf_config
from hookline.checkpoint.gguf_dequantise import CODE_BITS, can_dequantise, dequantise, quantised
from hookline.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from hookline.checkpoint.gguf_tokenizer import tokenizer_source
from hookline.checkpoint.reader import JsonObject, TokenizerSource
from hookline.errors import CheckpointError
from hookline.weight_adapter import LazyTensor

_PLAIN = MappingProxyType(
    {
        GGMLQuantizationType.F64: torch.float64,
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
        GGMLQuantizationType.I8: torch.int8,
        GGMLQuantizationType.I16: torch.int16,
        GGMLQuantizationType.I32: torch.int32,
        GGMLQuantizationType.I64: torch.int64,
    }
)
_MAX_ROPE_FACTORS = 4096


class GgufReader:
    """Reads one GGUF file; the whole header is checked when it is made.

    Names and row order stay GGUF's (`blk.0.attn_q.weight`). Quantised tensors load as float32, of which those of two or
    more dimensions in Q4_0, Q4_1 and Q8_0 keep their codes (`QuantizedTensor`); plain ones load in their own type.
    Tensors that only carry rope factors are part of `hf_config` and do not appear among the tensors.

    Raises:
        CheckpointError: if the file is not sound, or holds a format that the `gguf` package cannot dequantise.
    """

    weights_format = "gguf"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: GgufHeader = read_gguf_header(path)
        _check_types(path, self._header)
        config = hf_config(path, self._header, _rope_factors(path, self._header))
        self.hf_config: JsonObject = MappingProxyType(config)
        self.generation_config: JsonObject = MappingProxyType(generation_config(self._header.fields))
        self.files: tuple[Path, ...] = (path,)
        self.nbytes = sum(tensor.nbytes for tensor in self._header.tensors)

    @cached_property
    def tokenizer_source(self) -> TokenizerSource:
        return tokenizer_source(self._path, self._header.fields)

    def tensors(self) -> Iterator[LazyTensor]:
        """In the order of their bytes, so that reading goes forward through the file."""
        for tensor in self._header.tensors:
            if tensor.name not in ROPE_FACTORS:
                load = partial(_load, self._path, tensor)
                bits = CODE_BITS.get(tensor.type) if len(tensor.shape) > 1 else None
                yield LazyTensor(tensor.name, tensor.shape, _encoding(tensor.type), tensor.nbytes, load, bits)


def _rope_factors(path: Path, header: GgufHeader) -> dict[str, list[float]]:
    """The few values that are part of the config rather than weights."""
    result = {}
    for tensor in header.tensors:
        if tensor.name in ROPE_FACTORS:
            if tensor.type != GGMLQuantizationType.F32 or not 0 < math.prod(tensor.shape) <= _MAX_ROPE_FACTORS:
                raise CheckpointError(f"{path}: {tensor.name} is {tensor.type.name} of shape {list(tensor.shape)}")
            result[tensor.name] = _load(path, tensor).flatten().tolist()
    return result


def _encoding(kind: GGMLQuantizationType) -> str:
    return str(_PLAIN[kind]).removeprefix("torch.") if kind in _PLAIN else str(kind.name)


def _check_types(path: Path, header: GgufHeader) -> None:
    for kind in sorted({tensor.type for tensor in header.tensors} - _PLAIN.keys()):
        if not can_dequantise(kind):
            raise CheckpointError(
                f"{path}: tensors of type {kind.name}, which the gguf package cannot dequantise",
                hint="Take a file in another format, such as Q4_K_M or Q8_0, or try a newer gguf package.",
            )


def _load(path: Path, tensor: GgufTensor) -> torch.Tensor:
    data = read_span(path, tensor.offset, tensor.nbytes, tensor.name)
    if tensor.type in _PLAIN:
        return data.view(_PLAIN[tensor.type]).reshape(tensor.shape)
    kept = quantised(data, tensor.type, tensor.shape)
    return dequantise(data, tensor.type).reshape(tensor.shape) if kept is None else kept
