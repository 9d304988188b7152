"""A folder with `config.json` and weights in safetensors: one file, or shards with an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import torch

from hookline.checkpoint.files import inside, read_json_object, read_span
from hookline.checkpoint.folder import read_generation_config, read_hf_config, read_tokenizer_source
from hookline.checkpoint.reader import JsonObject, TokenizerSource
from hookline.checkpoint.safetensors_header import MAX_ENTRIES, TensorEntry, read_header
from hookline.errors import CheckpointError
from hookline.weight_adapter import LazyTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 * 2**20
_MAX_NAMED = 5
_SHARD_NAME = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")


class SafetensorsReader:
    """Reads a safetensors folder; the whole of every header is checked when it is made.

    Raises:
        CheckpointError: if the folder, a header, the index or the config is not sound.
    """

    weights_format = "safetensors"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hf_config: JsonObject = MappingProxyType(read_hf_config(folder))
        self.generation_config: JsonObject = MappingProxyType(read_generation_config(folder))
        if _present(folder / SINGLE_FILE):
            shards = {SINGLE_FILE: read_header(inside(folder, SINGLE_FILE))}
        else:
            shards = _read_shards(folder)
        self._shards = shards
        self.files: tuple[Path, ...] = tuple(folder / name for name in shards)
        self.nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)

    @cached_property
    def tokenizer_source(self) -> TokenizerSource:
        return read_tokenizer_source(self._folder)

    def tensors(self) -> Iterator[LazyTensor]:
        """Shards by name, in each the tensors by place, so that reading goes forward through the files."""
        for name, entries in self._shards.items():
            path = inside(self._folder, name)
            for entry in entries:
                encoding = str(entry.dtype).removeprefix("torch.")
                yield LazyTensor(entry.name, entry.shape, encoding, entry.nbytes, partial(read_tensor, path, entry))


def read_tensor(path: Path, entry: TensorEntry) -> torch.Tensor:
    """The values of one tensor, in memory of their own."""
    return read_span(path, entry.offset, entry.nbytes, entry.name).view(entry.dtype).reshape(entry.shape)


def _present(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _read_shards(folder: Path) -> dict[str, tuple[TensorEntry, ...]]:
    """Shard name to tensors, checked against the index in both directions."""
    where = folder / INDEX_FILE
    index = read_json_object(folder, INDEX_FILE, _MAX_INDEX_BYTES)
    if index is None:
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= MAX_ENTRIES:
        raise CheckpointError(f"{where}: weight_map does not map 1 to {MAX_ENTRIES:,} tensors to files")
    expected: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{where}: {str(shard)[:80]!a}, for tensor {tensor[:80]!a}, cannot be a shard's name",
                hint="Shards lie beside the index and are called like model-00001-of-00002.safetensors.",
            )
        expected.setdefault(shard, set()).add(tensor)
    paths = {name: inside(folder, name) for name in sorted(expected)}
    shards = {name: read_header(path) for name, path in paths.items()}
    _refuse_doubles(shards, where)
    for name, entries in shards.items():
        found = {entry.name for entry in entries}
        if found != expected[name]:
            raise CheckpointError(
                f"{where} and {name} differ: not in {name}: {_named(expected[name] - found)}; "
                f"not in the index: {_named(found - expected[name])}",
                hint="Index and shards are of different versions, or a shard is missing tensors. Download them again.",
            )
    return shards


def _refuse_doubles(shards: dict[str, tuple[TensorEntry, ...]], where: Path) -> None:
    owner: dict[str, str] = {}
    for shard, entries in shards.items():
        for entry in entries:
            other = owner.setdefault(entry.name, shard)
            if other != shard:
                raise CheckpointError(f"{where}: tensor {entry.name!r} is in both {other} and {shard}")


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return (", ".join(ordered[:_MAX_NAMED]) or "none") + more
