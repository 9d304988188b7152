"""Which reader reads what: looks at the files and picks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookline.checkpoint.files import refuse_pickle, regular_size
from hookline.checkpoint.folder import read_generation_config, read_hf_config, read_tokenizer_source
from hookline.checkpoint.random import RandomReader
from hookline.checkpoint.reader import CheckpointReader
from hookline.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from hookline.checkpoint.snapshot import MANIFEST_FILE, SnapshotReader
from hookline.config import LoadFormat
from hookline.errors import CheckpointError, ModelNotFoundError

if TYPE_CHECKING:
    from hookline.checkpoint.gguf import GgufReader


def open_checkpoint(path: Path, load_format: LoadFormat = "auto") -> CheckpointReader:
    """Opens a checkpoint and checks its headers.

    Args:
        path: a folder or a GGUF file.
        load_format: `auto` looks at the files; `random` takes the config alone and answers a `RandomReader` without
            tensors, to be completed by its `with_shapes`.

    Raises:
        ModelNotFoundError: if there is nothing at `path`.
        CheckpointError: if what is there is not sound, or not in this format.
    """
    found = _find(path)
    if load_format == "random":
        return _random(path, found)
    if load_format == "auto":
        load_format = found
    if load_format != found:
        raise CheckpointError(f"{path} is in the format {found}, not {load_format}", hint="Leave --load-format out.")
    if found == "safetensors":
        return SafetensorsReader(path)
    if found == "snapshot":
        return SnapshotReader(path)
    if found == "gguf":
        return _open_gguf(path)
    _refuse_folder(path)
    raise CheckpointError(f"{path} has no weights", hint="With --load-format random its config.json alone is enough.")


def _find(path: Path) -> LoadFormat:
    """The format of what is at `path`; `random` for a folder without weights."""
    if not path.is_dir():
        refuse_pickle(path)
        regular_size(path)
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a model", hint=f"Give its folder: {path.parent}")
        return "gguf"
    names = {entry.name for entry in path.iterdir()}
    if MANIFEST_FILE in names:
        return "snapshot"
    if SINGLE_FILE in names or INDEX_FILE in names:
        return "safetensors"
    return "gguf" if any(name.endswith(".gguf") for name in names) else "random"


def _open_gguf(path: Path) -> GgufReader:
    from hookline.checkpoint.gguf import GgufReader  # brings the gguf package, which no other format needs

    return GgufReader(_gguf_file(path))


def _gguf_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files: {', '.join(file.name for file in files[:8])}",
            hint="Give the path of one of them.",
        )
    return files[0]


def _refuse_folder(path: Path) -> None:
    for entry in sorted(path.iterdir()):
        refuse_pickle(entry)
        if entry.suffix == ".safetensors":
            raise CheckpointError(
                f"{path} has {entry.name}, but neither {SINGLE_FILE} nor {INDEX_FILE}", hint="Download it again."
            )
    if not (path / "config.json").exists():
        what = "has neither weights nor a config.json" if any(path.iterdir()) else "is empty"
        raise ModelNotFoundError(f"{path} {what}", hint="Give a model's folder, or a GGUF file.")


def _random(path: Path, found: LoadFormat) -> RandomReader:
    if found in ("gguf", "snapshot"):  # which hold their config themselves
        file = _open_gguf(path) if found == "gguf" else SnapshotReader(path)
        return RandomReader(file.hf_config, generation_config=file.generation_config, tokenizer=file.tokenizer_source)
    return RandomReader(
        read_hf_config(path),
        generation_config=read_generation_config(path),
        tokenizer=read_tokenizer_source(path),
    )
