"""Writes snapshots: `snapshot.py` says what they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from hookline.checkpoint.reader import JsonObject, Progress, TokenizerSource
from hookline.checkpoint.snapshot import (
    ALIGNMENT,
    BUFFER_NAME,
    FORMAT_VERSION,
    MANIFEST_FILE,
    SnapshotEntry,
    SnapshotOrigin,
    dtype_name,
    is_dense,
)
from hookline.errors import CheckpointError

Containers = Iterable[tuple[str, Mapping[str, torch.Tensor | None]]]

_OWN_FILE = re.compile(
    rf"{re.escape(MANIFEST_FILE)}|rank-\d+-of-\d+\.safetensors|tokenizer(_config)?\.json|chat_template\.jinja"
)
_HEADER_BYTES = ALIGNMENT  # with its length field, so that the buffer is aligned in the file as well


def write_snapshot(
    folder: Path,
    containers: Containers,
    origin: SnapshotOrigin,
    hf_config: JsonObject,
    generation_config: JsonObject,
    tokenizer: TokenizerSource,
    progress: Progress | None = None,
    total_bytes: int = 0,
) -> None:
    """Writes a snapshot; `folder` appears, or is replaced, only when everything is on the disk.

    Args:
        containers: each container's name and its parameters by name, as the model holds them.
        origin: what a reader must agree with.
        progress: is told the bytes written, and `total_bytes` as it was given.

    Raises:
        CheckpointError: if `folder` is no snapshot, a tensor's type is not supported, or the disk is full.
    """
    folder = folder.absolute()
    check_target(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            with (partial / origin.file_name).open("wb") as file:
                entries = _write_buffer(file, containers, progress, total_bytes)
                _sync(file)
            manifest = {
                "format_version": FORMAT_VERSION,
                "origin": dataclasses.asdict(origin),
                "hf_config": dict(hf_config),
                "generation_config": dict(generation_config),
                "entries": [dataclasses.asdict(entry) for entry in entries],
            }
            _write_tokenizer(partial, tokenizer)
            _write_file(partial / MANIFEST_FILE, json.dumps(manifest, allow_nan=False).encode())
            partial.chmod(0o755)
            _swap(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"the snapshot {folder} cannot be written: {error}") from error


def check_target(folder: Path) -> None:
    """Raises CheckpointError if a snapshot may not be written there: only a snapshot or nothing is replaced."""
    if folder.is_dir() and ((folder / MANIFEST_FILE).is_file() or not any(folder.iterdir())):
        others = sorted(entry.name for entry in folder.iterdir() if not _OWN_FILE.fullmatch(entry.name))
        if others:
            raise CheckpointError(
                f"{folder} is a snapshot and also holds {', '.join(others[:3])}, which would be lost",
                hint="Give a new folder, or move what is not the snapshot's elsewhere.",
            )
        return
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} exists and is no snapshot", hint="Give a new folder, or remove this one.")


def _write_buffer(
    file: BinaryIO, containers: Containers, progress: Progress | None, total_bytes: int
) -> list[SnapshotEntry]:
    file.write(b" " * _HEADER_BYTES)
    entries = []
    offsets: dict[tuple[str, int], int] = {}
    end = 0
    for container, parameters in containers:
        for name, tensor in parameters.items():
            if tensor is None:
                entries.append(SnapshotEntry(container, name))
                continue
            strides, data = _flat_bytes(tensor)
            view = data.numpy().data
            digest = hashlib.sha256(view).hexdigest()
            key = (digest, data.nbytes)
            if key not in offsets:
                offsets[key] = -(-end // ALIGNMENT) * ALIGNMENT
                file.write(b"\0" * (offsets[key] - end))
                file.write(view)
                end = offsets[key] + data.nbytes
                if progress is not None:
                    progress(end, total_bytes)
            shape = tuple(tensor.shape)
            entries.append(
                SnapshotEntry(container, name, dtype_name(tensor.dtype), shape, strides, offsets[key], digest)
            )
    header = {BUFFER_NAME: {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}}
    text = json.dumps(header).encode().ljust(_HEADER_BYTES - 8)
    file.seek(0)
    file.write(len(text).to_bytes(8, "little") + text)
    return entries


def _flat_bytes(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """The strides to restore and the values in the order of memory; one with gaps is made contiguous."""
    tensor = tensor.detach().cpu()
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        tensor = tensor.contiguous()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return strides, tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)


def _write_tokenizer(folder: Path, source: TokenizerSource) -> None:
    data = source.tokenizer_json
    if data is None and source.tokenizer is not None:
        data = source.tokenizer.to_str().encode()
    if data is not None:
        _write_file(folder / "tokenizer.json", data)
    if source.chat_template is not None:
        _write_file(folder / "chat_template.jinja", source.chat_template.encode())
    config = {
        "bos_token": source.bos_token,
        "eos_token": source.eos_token,
        "pad_token": source.pad_token,
        "unk_token": source.unk_token,
        "add_bos_token": source.add_bos,
        "add_eos_token": source.add_eos,
    }
    known = {name: value for name, value in config.items() if value is not None}
    if known:
        _write_file(folder / "tokenizer_config.json", json.dumps(known).encode())


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _swap(partial: Path, folder: Path) -> None:
    """Puts `partial` in the place of `folder`, and what was there back if that fails."""
    if not folder.exists():
        partial.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old / folder.name)
    try:
        partial.rename(folder)
    except OSError:
        (old / folder.name).rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
