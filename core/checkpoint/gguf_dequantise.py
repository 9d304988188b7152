"""Quantised GGUF blocks: to float32, or to tensors that keep the codes.

The common formats are done in torch, bit for bit as the `gguf` package does them and several times faster; every other
format goes through the package, and to float32 only. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hookline_kernels.quantized import GROUP, QuantizedTensor

# Bits of a code in the formats that `quantised` keeps as they are.
CODE_BITS: Mapping[GGMLQuantizationType, int] = MappingProxyType(
    {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}
)

_CHUNK_VALUES = 2**20


def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Is there code for this format?"""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantise(data: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """The values of quantised blocks.

    Args:
        data: whole blocks, uint8 and flat.
        kind: their format.

    Returns:
        float32 and flat, in memory of its own. Works in pieces, so that temporaries stay small.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.view(-1, block_bytes)
    values = torch.empty(blocks.shape[0], block, dtype=torch.float32)
    step = max(1, _CHUNK_VALUES // block)
    fill = _FILL.get(kind)
    for start in range(0, blocks.shape[0], step):
        source, target = blocks[start : start + step], values[start : start + step]
        if fill is not None:
            fill(source, target)
        else:
            target.copy_(torch.from_numpy(dequantize(source.numpy(), kind)))
    return values.view(-1)


def quantised(data: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantizedTensor | None:
    """The tensor with its values left as codes.

    None where it has not one finite scale, and offset, a group, or has fewer than two dimensions: norms and biases are
    small, and no kernel takes them as codes.

    Args:
        data: whole blocks, uint8 and flat.
        kind: their format.
        shape: of the tensor.
    """
    if kind not in CODE_BITS or len(shape) < 2:
        return None
    groups = (*shape[:-1], shape[-1] // GROUP)
    blocks = data.view(*groups, GGML_QUANT_SIZES[kind][1])
    halves = blocks[..., :4].contiguous().view(torch.float16)
    scales, offsets = halves.unbind(-1)
    if kind == GGMLQuantizationType.Q4_0:  # codes count from -8
        offsets = scales * -8
    if not (scales.isfinite().all() and (kind == GGMLQuantizationType.Q8_0 or offsets.isfinite().all())):
        return None
    if kind == GGMLQuantizationType.Q8_0:
        return QuantizedTensor(blocks[..., 2:].reshape(shape).view(torch.int8), scales)
    nibbles = blocks[..., -GROUP // 2 :]
    return QuantizedTensor(torch.cat([nibbles & 15, nibbles >> 4], dim=-1).view(shape), scales, offsets)


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """`count` fp16 numbers of each block, from byte `start` on, as float32 [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _fill_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Two fp16 scales, 8 scales and 8 least values of 6 bits in 12 bytes, then 256 nibbles in parts of 32."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], dim=1)
    least = torch.cat([high & 63, (rest >> 4) | ((high >> 2) & 48)], dim=1)
    parts, codes = out.view(-1, 8, 32), blocks[:, 16:].reshape(-1, 4, 32)
    parts[:, 0::2] = codes & 15
    parts[:, 1::2] = codes >> 4
    parts.mul_((_halves(blocks, 0) * scales).unsqueeze(2)).sub_((_halves(blocks, 2) * least).unsqueeze(2))


def _fill_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """256 codes of 6 bits, 4 in one place and 2 in another, 16 signed scales, one fp16 scale."""
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 8, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 8, 32)
    out.view(-1, 8, 32).copy_(low | (high << 4)).sub_(32)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


_FILL: Mapping[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_K: _fill_q4_k,
        GGMLQuantizationType.Q6_K: _fill_q6_k,
    }
)
