"""The header of a GGUF file: metadata and tensor table, checked in full before a tensor is read.

Own code instead of the `gguf` package's reader because that one keeps an array object for every vocabulary entry
(seconds and hundreds of megabytes), trusts counts, and maps the file, so that a shrinking file kills the process.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from hookline.checkpoint.files import check_tensor_name, regular_size
from hookline.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS = 1_000_000
_MAX_FIELDS = 65_536
_MAX_KEY_BYTES = 65_535
_MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        shape: in torch's order, rows first; the file has it reversed.
        type: its number format.
        offset: of its first byte from the start of the file.
        nbytes: its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (fp32 numbers as the shortest decimal that means the same) and the tensors by place."""

    fields: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads and checks the header of a GGUF file.

    Raises:
        ModelNotFoundError: if there is no such file.
        CheckpointError: naming the file, and the field or tensor at fault.
    """
    size = regular_size(path)
    try:
        with path.open("rb", buffering=2**20) as file:
            return _Parser(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class _Parser:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._left = size
        self._size = size

    def header(self) -> GgufHeader:
        if self._size < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._number("<I")
        if version not in _VERSIONS:
            kind = "big-endian files are not read" if version & 0xFFFF == 0 else "2 and 3 are read"
            raise CheckpointError(f"{self._path} is of GGUF version {version}; {kind}")
        n_tensors = self._count("<Q", _MAX_TENSORS, "tensors")
        n_fields = self._count("<Q", _MAX_FIELDS, "metadata fields")
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._string(_MAX_KEY_BYTES)
            if key in fields:
                raise CheckpointError(f"{self._path}: the metadata field {key[:80]!a} stands twice")
            fields[key] = self._value(self._number("<I"), key)
        table = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}, not a power of two")
        start = _aligned(self._size - self._left, alignment)
        return GgufHeader(MappingProxyType(fields), self._place(table, start, alignment))

    def _take(self, count: int) -> bytes:
        if count > self._left:
            raise CheckpointError(
                f"{self._path} ends inside its header ({self._size:,} bytes)",
                hint="The file is cut. Download it again.",
            )
        data = self._file.read(count)
        self._left -= count
        if len(data) != count:
            raise CheckpointError(f"{self._path} became shorter while it was read", hint="Download it again.")
        return data

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _count(self, layout: str, most: int, what: str) -> int:
        count = int(self._number(layout))
        if count > most:
            raise CheckpointError(f"{self._path}: {count:,} {what}; at most {most:,} are allowed")
        return count

    def _string(self, most: int) -> str:
        length = int(self._number("<Q"))
        if length > most:
            raise CheckpointError(f"{self._path}: a name of {length:,} bytes; at most {most:,} are allowed")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: a text in the header is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(self._left)
        if kind in _SCALARS:
            return _plain(np.frombuffer(self._take(struct.calcsize(_SCALARS[kind])), dtype=_numpy_type(kind)))[0]
        if kind != _ARRAY:
            raise CheckpointError(f"{self._path}: the metadata field {key[:80]!a} is of unknown type {kind}")
        item = self._number("<I")
        count = int(self._number("<Q"))
        if item == _STRING:
            if count > self._left // 8:
                raise CheckpointError(f"{self._path}: {key[:80]!a} has {count:,} texts, more than the file can hold")
            return [self._string(self._left) for _ in range(count)]
        if item not in _SCALARS:
            raise CheckpointError(f"{self._path}: the metadata field {key[:80]!a} is an array of type {item}")
        return _plain(np.frombuffer(self._take(count * struct.calcsize(_SCALARS[item])), dtype=_numpy_type(item)))

    def _tensor(self) -> GgufTensor:
        name = self._string(_MAX_KEY_BYTES)
        check_tensor_name(name, str(self._path))
        where = f"{self._path}: tensor {name!r}"
        n_dims = self._count("<I", _MAX_DIMS, f"dimensions of tensor {name!r}")
        dims = tuple(int(self._number("<Q")) for _ in range(n_dims))
        code = self._number("<I")
        offset = int(self._number("<Q"))
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(f"{where} is of unknown type {code}", hint="Try a newer gguf package.") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = math.prod(dims)
        if math.prod(max(dim, 1) for dim in dims) >= 2**63 or (dims[0] if dims else 1) % block:
            raise CheckpointError(f"{where} of type {kind.name} has shape {list(dims)}; rows are of blocks of {block}")
        return GgufTensor(name, dims[::-1], kind, offset, count // block * block_bytes)

    def _place(self, table: list[GgufTensor], start: int, alignment: int) -> tuple[GgufTensor, ...]:
        """The table with offsets from the start of the file, once nothing overlaps or leaves the file."""
        names: set[str] = set()
        placed = []
        end = start
        for tensor in sorted(table, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            where = f"{self._path}: tensor {tensor.name!r}"
            offset = start + tensor.offset
            if tensor.name in names:
                raise CheckpointError(f"{where} stands twice")
            names.add(tensor.name)
            if offset != _aligned(end, alignment):
                fault = "overlaps the one before it" if offset < end else "is not where the one before it ends"
                raise CheckpointError(f"{where} {fault}")
            end = offset + tensor.nbytes
            if end > self._size:
                raise CheckpointError(
                    f"{self._path} has {self._size:,} bytes, but tensor {tensor.name!r} ends at {end:,}",
                    hint="The file is cut. Download it again.",
                )
            placed.append(GgufTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes))
        return tuple(placed)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _numpy_type(kind: int) -> np.dtype[Any]:
    return np.dtype("?") if kind == _BOOL else np.dtype(_SCALARS[kind])


def _plain(values: np.ndarray[Any, np.dtype[Any]]) -> list[Any]:
    """Python numbers; an fp32 one as the shortest decimal that rounds to it (1e-05, not 9.99999974738e-06)."""
    if values.dtype == np.float32:
        return [float(str(value)) for value in values]
    return list(values.tolist())
