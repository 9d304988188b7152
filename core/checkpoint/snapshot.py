"""Our own format: every parameter as the model holds it, ready to use.

A folder holds `hookline-snapshot.json` (the manifest), one safetensors file a rank with a single U8 tensor `buffer` in
which each parameter begins at a multiple of 256 bytes, and the tokenizer's files. Parameters of equal bytes share them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hookline.checkpoint.files import inside, read_json_object, read_span
from hookline.checkpoint.folder import check_architectures, read_tokenizer_source
from hookline.checkpoint.reader import JsonObject, Progress, TokenizerSource
from hookline.checkpoint.safetensors_header import read_header
from hookline.errors import CheckpointError
from hookline.weight_adapter import LazyTensor

MANIFEST_FILE = "hookline-snapshot.json"
BUFFER_NAME = "buffer"
FORMAT_VERSION = 1
ALIGNMENT = 256
_MAX_MANIFEST_BYTES = 256 * 2**20
_DTYPES = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
            *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        )
    }
)


@dataclass(frozen=True, slots=True)
class SnapshotOrigin:
    """What a snapshot was made by and for. It is read only where every field is the same.

    Attributes:
        engine_version: of Hookline.
        plugin, plugin_version: the distribution that served the architecture.
        architecture: as the checkpoint's config names it.
        dtype: number format of weights and activations, such as `bfloat16`.
        layout: how the engine lays weights out, such as `cpu` or `cuda`.
        rank, ranks: which part of the model, of how many.
    """

    engine_version: str
    plugin: str
    plugin_version: str
    architecture: str
    dtype: str
    layout: str
    rank: int = 0
    ranks: int = 1

    @property
    def file_name(self) -> str:
        """The file that holds the rank's buffer."""
        return f"rank-{self.rank}-of-{self.ranks}.safetensors"


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One parameter of one container; `offset` in the buffer is None for a parameter that is None."""

    container: str
    parameter: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int | None = None
    sha256: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's values."""
        return 0 if self.offset is None else prod(self.shape) * _DTYPES[self.dtype].itemsize


class SnapshotReader:
    """Reads a snapshot; manifest and header are checked when it is made, checksums when values are read.

    Raises:
        CheckpointError: if the folder is not a sound snapshot of this format version.
    """

    weights_format = "snapshot"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        where = str(folder / MANIFEST_FILE)
        manifest = read_json_object(folder, MANIFEST_FILE, _MAX_MANIFEST_BYTES)
        if manifest is None:
            raise CheckpointError(f"{folder} has no {MANIFEST_FILE}")
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} is of format version {version!r}; this Hookline reads {FORMAT_VERSION}",
                hint="Write the snapshot again with engine snapshot.",
            )
        self.origin = _read_origin(manifest, where)
        self.hf_config: JsonObject = MappingProxyType(_object(manifest, "hf_config", where))
        check_architectures(self.hf_config, where)
        self.generation_config: JsonObject = MappingProxyType(_object(manifest, "generation_config", where))
        self._path = inside(folder, self.origin.file_name)
        self.files: tuple[Path, ...] = (folder / self.origin.file_name,)
        header = read_header(self._path)
        if [entry.name for entry in header] != [BUFFER_NAME] or header[0].dtype != torch.uint8:
            raise CheckpointError(f"{self._path} does not hold exactly one U8 tensor {BUFFER_NAME!r}")
        self._start, self.nbytes = header[0].offset, header[0].nbytes
        entries = manifest.get("entries")
        if not isinstance(entries, list):
            raise CheckpointError(f"{where}: entries is no list")
        self._entries = tuple(_read_entry(fields, self.nbytes, where) for fields in entries)
        _refuse_doubles(self._entries, where)

    @cached_property
    def tokenizer_source(self) -> TokenizerSource:
        return read_tokenizer_source(self._folder)

    def check_origin(self, expected: SnapshotOrigin) -> None:
        """Raise CheckpointError, naming both values, if the snapshot was made by or for anything else."""
        for field in dataclasses.fields(SnapshotOrigin):
            found, wanted = getattr(self.origin, field.name), getattr(expected, field.name)
            if found != wanted:
                raise CheckpointError(
                    f"{self._folder} was made with {field.name} {found!r}; here it is {wanted!r}",
                    hint="Write the snapshot again with engine snapshot and these options.",
                )

    def tensors(self) -> Iterator[LazyTensor]:
        """The parameters, called `container.parameter`; those that are None are left out."""
        for entry in self._entries:
            if entry.offset is not None:
                name = f"{entry.container}.{entry.parameter}"
                yield LazyTensor(name, entry.shape, entry.dtype, entry.nbytes, partial(self._load, entry))

    def stored(self) -> Iterator[SnapshotEntry]:
        """The parameters that are not None, and of those that share their bytes one."""
        yield from {entry.offset: entry for entry in self._entries if entry.offset is not None}.values()

    def entries(
        self, device: torch.device | str = "cpu", progress: Progress | None = None
    ) -> Iterator[tuple[str, str, torch.Tensor | None]]:
        """Container name, parameter name and value of each parameter, in the order they were written.

        The values are views of one buffer on `device`; it is read and its checksums are checked before the first is
        given out.
        """
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        done: set[int] = set()
        for entry in self._entries:
            if entry.offset is not None and entry.nbytes and entry.offset not in done:
                buffer[entry.offset : entry.offset + entry.nbytes].copy_(self._bytes(entry))
                done.add(entry.offset)
                if progress is not None:
                    progress(entry.offset + entry.nbytes, self.nbytes)
        for entry in self._entries:
            if entry.offset is None:
                yield entry.container, entry.parameter, None
            else:
                part = buffer[entry.offset : entry.offset + entry.nbytes]
                yield entry.container, entry.parameter, _shaped(part, entry)

    def _load(self, entry: SnapshotEntry) -> torch.Tensor:
        return _shaped(self._bytes(entry), entry)

    def _bytes(self, entry: SnapshotEntry) -> torch.Tensor:
        name = f"{entry.container}.{entry.parameter}"
        data = read_span(self._path, self._start + (entry.offset or 0), entry.nbytes, name)
        found = hashlib.sha256(data.numpy().data).hexdigest()
        if found != entry.sha256:
            raise CheckpointError(
                f"{self._path}: {name} has the SHA-256 {found}, the manifest says {entry.sha256}",
                hint="The snapshot is damaged. Write it again with engine snapshot.",
            )
        return data


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Does a tensor with these strides fill its memory without gaps and overlaps, in whatever order of dimensions?"""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`.

    Raises:
        CheckpointError: if snapshots do not hold this type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"snapshots do not hold tensors of type {name}")
    return name


def _shaped(data: torch.Tensor, entry: SnapshotEntry) -> torch.Tensor:
    return data.view(_DTYPES[entry.dtype]).as_strided(entry.shape, entry.strides)


def _read_origin(manifest: JsonObject, where: str) -> SnapshotOrigin:
    fields = _object(manifest, "origin", where)
    kinds = {
        field.name: int if field.name in ("rank", "ranks") else str for field in dataclasses.fields(SnapshotOrigin)
    }
    if fields.keys() != kinds.keys() or any(type(fields[name]) is not kind for name, kind in kinds.items()):
        raise CheckpointError(f"{where}: origin does not have exactly the fields {', '.join(kinds)}")
    return SnapshotOrigin(**fields)


def _object(manifest: JsonObject, name: str, where: str) -> dict[str, Any]:
    value = manifest.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name} is not an object")
    return value


def _read_entry(fields: object, buffer_bytes: int, where: str) -> SnapshotEntry:
    names = {field.name for field in dataclasses.fields(SnapshotEntry)}
    if not isinstance(fields, dict) or fields.keys() != names:
        raise CheckpointError(f"{where}: an entry does not have exactly the fields {', '.join(sorted(names))}")
    texts = (fields["container"], fields["parameter"], fields["dtype"], fields["sha256"])
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{where}: a name, dtype or checksum is no text")
    what = f"{where}: {fields['container']}.{fields['parameter']}"
    if fields["offset"] is None:
        return SnapshotEntry(fields["container"], fields["parameter"])
    numbers = (fields["shape"], fields["strides"], [fields["offset"]])
    if not all(isinstance(item, list) and all(type(n) is int and 0 <= n < 2**63 for n in item) for item in numbers):
        raise CheckpointError(f"{what}: shape, strides or offset are no whole numbers")
    entry = SnapshotEntry(**{**fields, "shape": tuple(fields["shape"]), "strides": tuple(fields["strides"])})
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{what} has dtype {entry.dtype!r}")
    if len(entry.shape) != len(entry.strides) or not is_dense(entry.shape, entry.strides):
        raise CheckpointError(f"{what}: strides {list(entry.strides)} do not fill the shape {list(entry.shape)}")
    if fields["offset"] % ALIGNMENT or fields["offset"] + entry.nbytes > buffer_bytes:
        raise CheckpointError(
            f"{what}: {entry.nbytes:,} bytes at offset {entry.offset:,} do not lie in the buffer of {buffer_bytes:,}"
        )
    return entry


def _refuse_doubles(entries: tuple[SnapshotEntry, ...], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    spans: dict[int, int] = {}
    end = 0
    for entry in entries:
        key = (entry.container, entry.parameter)
        if key in seen:
            raise CheckpointError(f"{where}: {entry.container}.{entry.parameter} stands twice")
        seen.add(key)
        if entry.offset is None or not entry.nbytes:
            continue
        if entry.offset in spans:
            sound = spans[entry.offset] == entry.nbytes
        else:
            sound = entry.offset >= end
            spans[entry.offset] = entry.nbytes
            end = entry.offset + entry.nbytes
        if not sound:
            raise CheckpointError(f"{where}: {entry.container}.{entry.parameter} overlaps another parameter")
