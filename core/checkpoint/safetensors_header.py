"""The header of a safetensors file, checked in full before a byte of memory is set aside for a tensor.

Layout: 8 bytes little-endian header length, that many bytes of JSON (`name -> {dtype, shape, data_offsets}`, padded
with spaces), then the data, which the tensors must cover without overlap, hole or remainder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hookline.checkpoint.files import check_tensor_name, parse_json_object, regular_size
from hookline.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_ENTRIES = 1_000_000
_MAX_DIMS = 16

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        offset: of its first byte from the start of the file.
        nbytes: its bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file in the order of their bytes.

    Raises:
        ModelNotFoundError: if there is no such file.
        CheckpointError: naming the file, and the tensor where one is at fault.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} has {size:,} bytes, too few for its header", hint="The file is cut. Download it again."
                )
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: a header of {length:,} bytes; 2 to {MAX_HEADER_BYTES:,} are allowed")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not data.startswith(b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: its header does not begin with a brace")
    header = parse_json_object(data, f"{path}: the header")
    return _check_entries(header, path, data_start=8 + length, file_size=size)


def _check_entries(header: dict[str, Any], path: Path, data_start: int, file_size: int) -> tuple[TensorEntry, ...]:
    if len(header) > MAX_ENTRIES:
        raise CheckpointError(f"{path}: {len(header):,} tensors; at most {MAX_ENTRIES:,} are allowed")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ does not map names to texts")
    entries = [_check_entry(name, fields, path, data_start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.offset + entry.nbytes, entry.name))
    end = data_start
    for entry in entries:
        if entry.offset + entry.nbytes > file_size:
            raise CheckpointError(
                f"{path} has {file_size:,} bytes, but tensor {entry.name!r} ends at {entry.offset + entry.nbytes:,}",
                hint="The file is cut. Download it again.",
            )
        if entry.offset != end:
            fault = "overlaps the one before it" if entry.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {entry.name!r} {fault}")
        end += entry.nbytes
    if end != file_size:
        raise CheckpointError(f"{path} has {file_size - end:,} bytes after its last tensor")
    return tuple(entries)


def _check_entry(name: str, fields: object, path: Path, data_start: int) -> TensorEntry:
    check_tensor_name(name, str(path))
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} does not have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where} has dtype {str(fields['dtype'])[:40]!r}", hint=f"Known are {', '.join(DTYPES)}."
        )
    shape = _whole_numbers(fields["shape"])
    if shape is None or len(shape) > _MAX_DIMS or math.prod(max(size, 1) for size in shape) >= 2**63:
        raise CheckpointError(f"{where} has shape {str(fields['shape'])[:80]}")
    offsets = _whole_numbers(fields["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {str(fields['data_offsets'])[:80]}")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{where} needs {_count(nbytes)} bytes for its shape and has {_count(end - begin)}")
    return TensorEntry(name, dtype, shape, data_start + begin, nbytes)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """`value` as whole numbers from 0 to 2**63 - 1; None if it is anything else. A bool is no number."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        return None
    return tuple(value)


def _count(number: int) -> str:
    return f"{number:,}" if number < 2**80 else "far too many"
