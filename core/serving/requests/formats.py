"""How the model writes tool calls and reasoning, found by the names that the operator or the model's record gives."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.plugins import GGUF_PREFIX, PluginRegistry
from hookline.serving.server_config import ServerConfig

_SNAPSHOT = "hookline-snapshot.json"
_SAFETENSORS = frozenset({"model.safetensors", "model.safetensors.index.json"})
_MOST_BYTES = 64 * 2**20
# How a GGUF file begins if its writer puts the architecture first, as llama.cpp's does: magic, version, counts of
# tensors and fields; the first field's key with its length, the number of the type text, and the text's length.
_KEY, _TEXT = b"general.architecture", 8
_GGUF = struct.Struct(f"<4sIQQQ{len(_KEY)}sIQ")
_MOST_CHARS = 256


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a model; None where it has none, or the operator wants none."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def find(cls, config: ServerConfig, registry: PluginRegistry, architecture: str) -> Self:
        """Those of a model of this architecture.

        Raises:
            UsageError: if the operator gives a name that nobody knows.
            NoPluginError, PluginError: if no plugin serves the architecture, or it is broken.
        """
        loaded = registry.load(architecture)
        tools, reasoning = config.tool_parser, config.reasoning_parser
        return cls(
            loaded.tool_format(loaded.record.tool_parser if tools is None else tools),
            loaded.reasoning_format(loaded.record.reasoning_parser if reasoning is None else reasoning),
        )


def peek_architecture(model: Path) -> str | None:
    """The architecture that a model's files name, at a glance; nothing else of them is read or judged here.

    So a wrong name of a parser is told at once, and not when a large model has been loaded. None where a glance does
    not tell: then the engine, which reads all of it, says it.

    Args:
        model: a folder or a GGUF file.
    """
    try:
        return _of_folder(model) if model.is_dir() else _of_gguf(model)
    except (OSError, ValueError, struct.error):
        return None


def _of_folder(folder: Path) -> str | None:
    names = {entry.name for entry in folder.iterdir()}
    if _SNAPSHOT in names:
        return _first_name(_read(folder / _SNAPSHOT).get("hf_config"))
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf and not names & _SAFETENSORS:
        return _of_gguf(folder / gguf[0]) if len(gguf) == 1 else None
    return _first_name(_read(folder / "config.json"))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is no file of sane size")
    found = orjson.loads(path.read_bytes())
    return found if isinstance(found, dict) else {}


def _first_name(config: Any) -> str | None:
    names = config.get("architectures") if isinstance(config, dict) else None
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _of_gguf(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        magic, *_, length, key, kind, chars = _GGUF.unpack(file.read(_GGUF.size))
        if (magic, length, key, kind) != (b"GGUF", len(_KEY), _KEY, _TEXT) or chars > _MOST_CHARS:
            return None
        return GGUF_PREFIX + file.read(chars).decode()
