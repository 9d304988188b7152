"""Quantised weights packed for the native product, and what is computed with them on the CPU.

A packed weight is a plain uint8 tensor [N / 32, K / 32, bytes of a block]; native_quantized.c says what a block holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hookline_kernels.native import has_native_16bit_products, native, why_not_on
from hookline_kernels.quantized import GROUP, QuantizedTensor

# Columns that lie together.
TILE = 32

# Columns whose values are multiplied out or converted at a time: in fp32 they should stay in the second and third level
# caches.
PANEL = 3072


def why_unpacked(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a weight of `shape` cannot stay quantised for activations of `dtype` on `device`; None where it can."""
    if len(shape) != 2 or shape[0] % TILE:
        return f"packed weights have two dimensions and rows in multiples of {TILE}"
    return why_not_on(device, dtype)


def weight_bytes(shape: Sequence[int], bits: int | None, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of a weight once it is loaded; `bits` are those of a code, None where the checkpoint has no codes."""
    values = math.prod(shape)
    if bits is None or why_unpacked(shape, device, dtype) is not None:
        return values * dtype.itemsize
    return values // (TILE * GROUP) * block_bytes(bits)


def pack(weight: QuantizedTensor) -> torch.Tensor:
    """The weight [N, K] as uint8 [N / 32, K / 32, bytes of a block]."""
    rows, inner = weight.shape
    tiles, groups, words = rows // TILE, inner // GROUP, GROUP * weight.bits // 32
    codes = weight.codes.view(torch.uint8)
    if weight.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    packed = torch.empty((tiles, groups, block_bytes(weight.bits)), dtype=torch.uint8)
    at = 0
    for part in (weight.scales, weight.offsets):
        if part is not None:
            target = packed[:, :, at : at + 2 * TILE]
            target.copy_(part.view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8))
            at += 2 * TILE
    target = packed[:, :, at:].view(tiles, groups, words, TILE, 4)
    target.copy_(codes.view(tiles, TILE, groups, words, 4).permute(0, 2, 3, 1, 4))
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The values [N, K] float32 of a packed weight, on any device."""
    bits, (tiles, groups, _) = packed_bits(packed), packed.shape
    numbers, words = 2 if bits == 4 else 1, GROUP * bits // 32
    begin = 2 * TILE * numbers
    scales = packed[:, :, :begin].contiguous().view(torch.float16).view(tiles, groups, numbers, TILE).unbind(2)
    parts = [scale.transpose(1, 2).reshape(tiles * TILE, groups) for scale in scales]
    codes = packed[:, :, begin:].view(tiles, groups, words, TILE, 4)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(tiles * TILE, groups * words * 4)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        return QuantizedTensor(codes, *parts).values()
    return QuantizedTensor(codes.view(torch.int8), *parts).values()


def block_bytes(bits: int) -> int:
    """Bytes of a block of 32 columns by 32 rows."""
    return TILE * (4 + GROUP // 2) if bits == 4 else TILE * (2 + GROUP)


_BITS = {block_bytes(bits): bits for bits in (4, 8)}


def bits_of(shape: Sequence[int]) -> int | None:
    """Bits of a code in a packed weight of this shape, [N / 32, K / 32, bytes of a block]; None where none has it."""
    return _BITS.get(shape[2]) if len(shape) == 3 else None


def unpacked_shape(shape: Sequence[int]) -> tuple[int, int]:
    """[N, K] of the weight whose packed form has `shape`."""
    return shape[0] * TILE, shape[1] * GROUP


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight is a packed one; others are of floating-point types."""
    return weight.dtype == torch.uint8


def packed_bits(packed: torch.Tensor) -> int:
    """Bits of a code in a packed weight.

    Raises:
        ValueError: it is none.
    """
    bits = bits_of(packed.shape)
    if bits is not None and packed.is_contiguous():
        return bits
    raise ValueError(
        f"a packed weight is a contiguous uint8 [N / {TILE}, K / {GROUP}, {block_bytes(4)} or {block_bytes(8)}], "
        f"got {packed.dtype} {list(packed.shape)}"
    )


def linear_packed_native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """For few tokens: each value is multiplied out once, in registers, and all tokens pass by."""
    (tokens, inner), columns = x.shape, weight.shape[0] * TILE
    y = x.new_empty((tokens, columns), dtype=torch.float32 if wide else x.dtype)
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
    sizes = (tokens, inner, columns, packed_bits(weight), wide, torch.get_num_threads())
    if native(x.dtype).linear_packed(*pointers, *sizes):
        raise MemoryError(f"linear: no memory for {tokens} tokens in fp32")
    return y


def linear_packed_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up for few tokens; the sums of gate and up stay where they are made: [T, F] of weight [2F, K]."""
    (tokens, inner), columns = x.shape, weight.shape[0] * TILE // 2
    y = x.new_empty((tokens, columns))
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
    sizes = (tokens, inner, columns, packed_bits(weight), torch.get_num_threads())
    if native(x.dtype).linear_packed_silu(*pointers, *sizes):
        raise MemoryError(f"linear_gated: no memory for {tokens} tokens in fp32")
    return y


def linear_packed_panels(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """For many tokens: a panel of the weight is multiplied out at a time, and torch does the product.

    In fp32, but for bf16 that this CPU has instructions for; those round their answer, so wide ones need fp32.
    """
    inner, bits, columns = x.shape[1], packed_bits(weight), weight.shape[0] * TILE
    own = x.dtype == torch.bfloat16 and not wide and has_native_16bit_products(x.dtype)
    rows = x if own else x.float()
    y, panel = rows.new_empty((x.shape[0], columns)), rows.new_empty(inner * min(PANEL, columns))
    for start in range(0, weight.shape[0], PANEL // TILE):
        tiles = weight[start : start + PANEL // TILE]
        values = panel[: inner * len(tiles) * TILE].view(inner, -1)
        pointers = (tiles.data_ptr(), values.data_ptr())
        native(rows.dtype).unpack(*pointers, len(tiles), inner, bits, torch.get_num_threads())
        part = slice(start * TILE, (start + len(tiles)) * TILE)
        if bias is None:
            torch.mm(rows, values, out=y[:, part])
        else:
            torch.addmm(bias[part].to(rows.dtype), rows, values, out=y[:, part])
    return y if wide else y.to(x.dtype)


def embedding_packed(ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a packed table [V, M]: ids [T] -> [T, M] of `dtype`.

    Raises:
        IndexError: an id that is not in the table.
    """
    bits, (tiles, groups, _) = packed_bits(table), table.shape
    ids = ids.to(torch.int64).contiguous()
    if why_not_on(table.device, dtype) is not None:
        check_ids(ids, tiles * TILE)
        used, places = torch.unique(ids // TILE, return_inverse=True)
        return unpack(table[used])[places * TILE + ids % TILE].to(dtype)
    y = torch.empty((len(ids), groups * GROUP), dtype=dtype)
    sizes = (len(ids), groups * GROUP, tiles * TILE, bits)
    wrong = native(dtype).embedding_packed(ids.data_ptr(), table.data_ptr(), y.data_ptr(), *sizes)
    if wrong >= 0:
        check_ids(ids[wrong:], tiles * TILE)
    return y


def check_ids(ids: torch.Tensor, rows: int) -> None:
    """Raises IndexError where one of `ids` is no row of an embedding table; indexing itself counts -1 from the end."""
    if ids.numel():
        for wrong in (int(bound) for bound in ids.aminmax()):
            if not 0 <= wrong < rows:
                raise IndexError(f"embedding: id {wrong} is not in a table of {rows} rows")
