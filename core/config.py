"""The engine's options: frozen, validated when made. The only file that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hookline.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "snapshot", "random"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LOAD_FORMATS = ("auto", "safetensors", "gguf", "snapshot", "random")
_DEVICES = ("auto", "cpu", "cuda")
_MAX_BYTES = 2**63
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str | int, option: str = "size") -> int:
    """Bytes in `text`, such as `512MiB`, `2GB` or `1000000`.

    Raises:
        UsageError: naming `option`, if `text` is no positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= size < _MAX_BYTES:
        hint = "Write a positive size such as 512MiB, 2GiB or 1000000."
        raise UsageError(f"{option} is {text!r:.80}", hint=hint)
    return int(size)


def expand_home(name: str) -> Path:
    """`name` as a path, with `~` and `~user` replaced where there is such a home."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Which plugins may be used.

    Attributes:
        enabled: false leaves every plugin out (`--no-plugins`).
        disabled: plugin ids or distribution names that are left out (`-p no:ID`, `HOOKLINE_DISABLE_PLUGINS`).
        prefer: architecture to distribution, to resolve a conflict (`--plugin ARCH=DISTRIBUTION`).
    """

    enabled: bool = True
    disabled: frozenset[str] = frozenset()
    prefer: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load and run one model.

    Attributes:
        model: a folder, a GGUF file, a snapshot folder, a pulled name or a hub id; a `Path` becomes its text.
        dtype: type of weights and activations; `auto` is float32 on a CPU, and the checkpoint's own type elsewhere.
        device: `auto` takes a CUDA device where there is one.
        load_format: `auto` looks at the files; `random` makes seeded random weights from the config alone.
        max_model_len: longest prompt plus output, in tokens; None takes the model's own, cut to what the cache holds.
        max_batch_tokens: token budget of one step (Dynamic SplitFuse).
        max_running: most requests that hold cache at a time.
        block_size: tokens a cache block.
        kv_cache_memory: bytes of the cache over all groups; None lets the memory planner choose.
        prefix_caching: reuse full blocks of earlier requests with the same tokens.
        seed: seeds random weights, and requests that bring no seed of their own.
        offline: never reach the network.
        plugins: which plugins may be used.
    """

    model: str
    dtype: Dtype = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 64
    block_size: int = 16
    kv_cache_memory: int | None = None
    prefix_caching: bool = True
    seed: int = 0
    offline: bool = False
    plugins: PluginOptions = PluginOptions()

    def __post_init__(self) -> None:
        model: object = self.model
        if isinstance(model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(model))
        if not isinstance(self.model, str):
            raise UsageError(f"model is {model!r:.80}", hint="Give a path, a pulled model's name or a hub id.")
        _check_choice("dtype", self.dtype, _DTYPES)
        _check_choice("load_format", self.load_format, _LOAD_FORMATS)
        _check_choice("device", re.sub(r"(?<=cuda):\d+$", "", str(self.device)), _DEVICES)
        for name in ("max_batch_tokens", "max_running", "block_size", "max_model_len", "kv_cache_memory"):
            value = getattr(self, name)
            may_be_none = name in ("max_model_len", "kv_cache_memory")
            if not (value is None and may_be_none) and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}", hint=f"Give {name} a whole number of at least 1.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed!r}", hint="Give seed a whole number from 0 to 2**63 - 1.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"Choose one of {', '.join(choices)}.")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, read once by `read_environment`."""

    cache_dir: Path
    disabled_plugins: frozenset[str]
    offline: bool


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """`HOOKLINE_CACHE_DIR`, `HOOKLINE_DISABLE_PLUGINS` (names with commas between) and `HOOKLINE_OFFLINE`."""
    env = os.environ if environ is None else environ
    cache = env.get("HOOKLINE_CACHE_DIR")
    names = (name.strip() for name in env.get("HOOKLINE_DISABLE_PLUGINS", "").split(","))
    return Environment(
        cache_dir=expand_home(cache or _user_cache_dir()),
        disabled_plugins=frozenset(name for name in names if name),
        offline=env.get("HOOKLINE_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
    )


def _user_cache_dir() -> str:
    import platformdirs  # not at the top: who says where the cache is can do without

    return str(platformdirs.user_cache_dir("hookline"))
