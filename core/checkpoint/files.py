"""Opening a checkpoint's files: only regular ones, only inside its folder, only sound JSON of a sane size."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hookline.errors import CheckpointError, ModelNotFoundError

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".pkl", ".pickle"})

_MAX_JSON_BYTES = 4 * 2**20
_MAX_NAME_LENGTH = 512


def regular_size(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        ModelNotFoundError: if there is none.
        CheckpointError: if it is a folder, a pipe, a device, or cannot be looked at.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError if the file's name is that of a pickle format."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path.name} is in a format that can run code when it is read; only safetensors and GGUF are read",
            hint="Look for a safetensors version of the model, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR).",
        )


def inside(folder: Path, name: str) -> Path:
    """The real path of `folder/name`, which must lie in `folder`.

    A link of the hub's cache (`models--X/snapshots/REVISION/name` to `models--X/blobs/HASH`) is allowed.

    Raises:
        CheckpointError: if it is missing, a loop, or leads elsewhere.
    """
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {name} is missing", hint="Download the model again.") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {name} cannot be opened: {error}") from None
    if path.is_relative_to(root):
        return path
    if root.parent.name == "snapshots" and path.parent == root.parent.parent / "blobs":
        return path
    raise CheckpointError(
        f"{folder}: {name} leads out of the folder, to {path}", hint="Put the file itself into the folder."
    )


def read_bytes(folder: Path, name: str, max_bytes: int = _MAX_JSON_BYTES) -> bytes | None:
    """Contents of a side file of a checkpoint folder; None where there is none."""
    try:
        if not (folder / name).is_symlink() and not (folder / name).exists():
            return None
        path = inside(folder, name)
        size = regular_size(path)
        if size > max_bytes:
            raise CheckpointError(f"{folder / name} has {size:,} bytes; at most {max_bytes:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from None


def read_json_object(folder: Path, name: str, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any] | None:
    """A side file that holds one JSON object; None where there is none."""
    data = read_bytes(folder, name, max_bytes)
    return None if data is None else parse_json_object(data, str(folder / name))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Strict JSON: UTF-8, no duplicate keys, no NaN or Infinity, an object at the top.

    Raises:
        CheckpointError: naming `where`.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where} is not sound JSON: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def check_tensor_name(name: str, where: str) -> None:
    """Raise CheckpointError unless `name` is one to 512 printable characters."""
    if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(f"{where}: {name[:80]!a} cannot be a tensor's name")


def read_span(path: Path, offset: int, nbytes: int, tensor_name: str) -> torch.Tensor:
    """The bytes of one tensor, in memory of their own (uint8, flat).

    Raises:
        CheckpointError: naming file and tensor, if the file has become shorter or unreadable.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            view = buffer.numpy().data
            while view.nbytes:
                count = file.readinto(view)
                if not count:
                    break
                view = view[count:]
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {tensor_name!r} cannot be read: {error}") from None
    if view.nbytes:
        raise CheckpointError(
            f"{path} ends {view.nbytes:,} bytes before the end of tensor {tensor_name!r}",
            hint="The file was cut or replaced while it was in use. Download it again.",
        )
    return buffer
