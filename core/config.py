"""The engine's options: frozen, validated when made. The only file that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hookline.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fnx2"]
LoadFormat = Literal["auto", "safetensors", "gguf", "snapshot", "random"]
ExpertRouting = Literal["natural", "uniform", "correlated"]
SpeculativeMethod = Literal["mtp", "ngram"]
DraftProposal = Literal["argmax", "sampled"]

# Encodings that weights come in and nothing is computed in.
STORED_ENCODINGS = ("float8_e4m3fn", "float4_e2m1fnx2")
DTYPES = ("auto", "float32", "bfloat16", "float16", *STORED_ENCODINGS)
_LOAD_FORMATS = ("auto", "safetensors", "gguf", "snapshot", "random")
EXPERT_ROUTINGS = ("natural", "uniform", "correlated")
SPECULATIVE_METHODS = ("mtp", "ngram")
DRAFT_PROPOSALS = ("argmax", "sampled")
_DEVICES = ("auto", "cpu", "cuda")
_MAX_BYTES = 2**63
_MAX_DRAFTS = 1024
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# What None stands for, on a CPU and on a GPU.
BY_DEVICE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"max_batch_tokens": (2048, 8192), "max_running": (64, 256)}
)


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


@dataclass(frozen=True, slots=True)
class Percent:
    """A part of something whose size is known later, over 0 and at most 100."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:g}%"


MemorySize = int | Percent


def parse_memory(text: str | int | Percent, option: str = "size") -> MemorySize:
    """Bytes or percent in `text`, such as `80%`, `100GiB` or `1000000`.

    Raises:
        UsageError: naming `option`, if `text` is neither.
    """
    if isinstance(text, Percent):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(text).strip())
    if match and 0 < float(match[1]) <= 100:
        return Percent(float(match[1]))
    if match:
        raise UsageError(f"{option} is {text!r:.80}", hint="A percentage is over 0 and at most 100, such as 80%.")
    try:
        return parse_bytes(text, option)
    except UsageError as error:
        hint = "Write a positive size such as 512MiB, 2GiB or 1000000, or a percentage such as 80%."
        raise UsageError(error.message, hint=hint) from None


def bytes_of(size: MemorySize, whole: int) -> int:
    """`size` in bytes, percent being of `whole`."""
    return int(whole * size.value / 100) if isinstance(size, Percent) else size


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculation: drafts are proposed after each step, and the model verifies them all in its next one.

    Greedy and sampled outputs are those of a run without it, token for token, unless relaxed or synthetic acceptance
    or sampled proposals are asked for; sampled proposals keep the distribution and draw other tokens.

    Attributes:
        method: `mtp` is the model's own draft, `ngram` copies what followed the last tokens when they came before.
        num_speculative_tokens: D, drafts a request and step.
        use_relaxed_acceptance_for_thinking: while a sampled request thinks, accept any draft among the likeliest.
        relaxed_topk: how many of the likeliest those are.
        relaxed_delta: how far below the likeliest's probability theirs may be, 0 to 1.
        think_token_ids: ids of the tokens that begin and end thinking; None asks the tokenizer for `<think>` and
            `</think>`.
        synthetic_acceptance_rate: for benchmarks: the share of drafts that are accepted, 0 to 1, whatever they are;
            the text makes no sense. None verifies them.
        draft_proposal: `argmax` proposes the draft's likeliest token; `sampled` draws it at the request's own
            temperature, top-k and top-p, for `mtp` alone.
        ngram_min, ngram_max: of `ngram`: fewest and most last tokens to look for.
    """

    method: SpeculativeMethod = "mtp"
    num_speculative_tokens: int = 2
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    think_token_ids: tuple[int, int] | None = None
    synthetic_acceptance_rate: float | None = None
    draft_proposal: DraftProposal = "argmax"
    ngram_min: int = 2
    ngram_max: int = 4

    def __post_init__(self) -> None:
        _check_choice("method", self.method, SPECULATIVE_METHODS)
        _check_choice("draft_proposal", self.draft_proposal, DRAFT_PROPOSALS)
        for name in ("num_speculative_tokens", "relaxed_topk", "ngram_min", "ngram_max"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_DRAFTS:
                raise UsageError(f"{name} is {value!r}", hint=f"Give {name} a whole number from 1 to {_MAX_DRAFTS}.")
        relaxed: object = self.use_relaxed_acceptance_for_thinking
        if not isinstance(relaxed, bool):
            raise UsageError(f"use_relaxed_acceptance_for_thinking is {relaxed!r}", hint="Give true or false.")
        for name in ("relaxed_delta", "synthetic_acceptance_rate"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 <= value <= 1) and not (value is None and name == "synthetic_acceptance_rate"):
                raise UsageError(f"{name} is {value!r}", hint=f"Give {name} a number from 0 to 1.")
        if self.ngram_min > self.ngram_max:
            raise UsageError(f"ngram_min is {self.ngram_min}, ngram_max {self.ngram_max}", hint="Give the larger last.")
        self._check_think_tokens()
        sampled = self.draft_proposal == "sampled"
        if relaxed and (sampled or self.synthetic_acceptance_rate is not None):
            other = "sampled proposals" if sampled else "a synthetic acceptance rate"
            raise UsageError(f"relaxed acceptance does not go with {other}", hint="Leave one of the two out.")
        if sampled and (self.method != "mtp" or self.synthetic_acceptance_rate is not None):
            hint = "Sampled proposals need the method mtp, and no synthetic acceptance rate."
            raise UsageError("draft_proposal is 'sampled'", hint=hint)

    def _check_think_tokens(self) -> None:
        given: object = self.think_token_ids
        if given is None:
            return
        pair = tuple(given) if isinstance(given, tuple | list) else ()
        if len(pair) != 2 or pair[0] == pair[1] or any(type(value) is not int or value < 0 for value in pair):
            raise UsageError(f"think_token_ids is {given!r:.80}", hint="Give two different token ids: begin and end.")
        object.__setattr__(self, "think_token_ids", pair)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load and run one model.

    Attributes:
        model: a folder, a GGUF file, a snapshot folder, a pulled name or a hub id; a `Path` becomes its text.
        dtype: type of weights and activations; `auto` is float32 on a CPU, and the checkpoint's own type elsewhere. An
            encoding of 8 or 4 bits says what the checkpoint must hold; it is computed with as `auto` says.
        device: `auto` takes a CUDA device where there is one.
        load_format: `auto` looks at the files; `random` makes seeded random weights from the config alone.
        max_model_len: longest prompt plus output, in tokens; None takes the model's own, cut to what the cache holds.
        max_batch_tokens: token budget of one step (Dynamic SplitFuse); None is 2,048 on a CPU and 8,192 on a GPU.
        max_running: most requests that hold cache at a time; None is 64 on a CPU and 256 on a GPU.
        block_size: tokens a cache block.
        memory: how much of the device's memory the engine may use: bytes, as a number or as text such as "100GiB", or
            percent such as "80%". None is 90 % of a GPU's memory, and on a CPU what is free.
        kv_cache_memory: the cache over all groups: bytes, or percent of what the engine may use; None lets the memory
            planner choose.
        overlap: launch a step before the tokens of the one before are read; None does so on a GPU.
        cuda_graphs: on a GPU, capture decode steps as CUDA graphs when the engine starts.
        prefix_caching: reuse full blocks of earlier requests with the same tokens.
        expert_routing: `natural` is the router's choice. The others are for benchmarks and give senseless text: with
            `uniform` each token's experts are random, with `correlated` the tokens of a request mostly share theirs.
        speculative: propose and verify drafts; None decodes one token a step. Steps wait for the
            host then, but those that verify a model's own drafts exactly: see `execution/unified_runner.py`.
        tensor_parallel_size: devices that share each layer; 1 is all that there is so far.
        seed: seeds random weights, and requests that bring no seed of their own.
        offline: never reach the network.
        plugins: which plugins may be used.
    """

    model: str
    dtype: Dtype = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_running: int | None = None
    block_size: int = 16
    memory: int | str | Percent | None = None
    kv_cache_memory: int | str | Percent | None = None
    overlap: bool | None = None
    cuda_graphs: bool = True
    prefix_caching: bool = True
    expert_routing: ExpertRouting = "natural"
    speculative: SpeculativeConfig | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    offline: bool = False
    plugins: PluginOptions = PluginOptions()

    def __post_init__(self) -> None:
        model: object = self.model
        if isinstance(model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(model))
        if not isinstance(self.model, str):
            raise UsageError(f"model is {model!r:.80}", hint="Give a path, a pulled model's name or a hub id.")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load_format", self.load_format, _LOAD_FORMATS)
        _check_choice("expert_routing", self.expert_routing, EXPERT_ROUTINGS)
        _check_choice("device", re.sub(r"(?<=cuda):\d+$", "", str(self.device)), _DEVICES)
        for name in ("max_batch_tokens", "max_running", "block_size", "max_model_len"):
            value = getattr(self, name)
            may_be_none = name != "block_size"
            if not (value is None and may_be_none) and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}", hint=f"Give {name} a whole number of at least 1.")
        for name in ("overlap", "cuda_graphs", "prefix_caching", "offline"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "overlap"):
                raise UsageError(f"{name} is {value!r:.80}", hint=f"Give {name} True or False.")
        for name in ("memory", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_memory(value, name))
        if not isinstance(self.speculative, SpeculativeConfig | None):
            raise UsageError(f"speculative is {self.speculative!r:.80}", hint="Give a SpeculativeConfig.")
        if type(self.tensor_parallel_size) is not int or self.tensor_parallel_size != 1:
            raise UsageError(
                f"tensor_parallel_size is {self.tensor_parallel_size!r:.80}", hint="A model runs on one device: give 1."
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed!r}", hint="Give seed a whole number from 0 to 2**63 - 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The options once the device is known: what depends on it is decided. `resolve` makes one.

    Attributes:
        device: as torch writes it, such as `cuda:0`.
        dtype: one to compute in.
    """

    max_batch_tokens: int
    max_running: int
    memory: MemorySize | None
    kv_cache_memory: MemorySize | None


def resolve(config: EngineConfig, device: str, dtype: Dtype) -> ResolvedConfig:
    """`config` on `device`, with weights and activations in `dtype`."""
    values: dict[str, Any] = {entry.name: getattr(config, entry.name) for entry in fields(EngineConfig)}
    for name, (on_cpu, on_gpu) in BY_DEVICE.items():
        if values[name] is None:
            values[name] = on_cpu if device == "cpu" else on_gpu
    return ResolvedConfig(**values | {"device": device, "dtype": dtype})


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"Choose one of {', '.join(choices)}.")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, read once by `read_environment`."""

    cache_dir: Path
    disabled_plugins: frozenset[str]
    offline: bool
    api_keys: tuple[str, ...] = field(default=(), repr=False)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """`HOOKLINE_CACHE_DIR`, `HOOKLINE_OFFLINE`, and `HOOKLINE_DISABLE_PLUGINS` and `HOOKLINE_API_KEYS` with commas."""
    env = os.environ if environ is None else environ
    cache = env.get("HOOKLINE_CACHE_DIR")
    return Environment(
        cache_dir=expand_home(cache or _user_cache_dir()),
        disabled_plugins=frozenset(_listed(env.get("HOOKLINE_DISABLE_PLUGINS", ""))),
        offline=env.get("HOOKLINE_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        api_keys=_listed(env.get("HOOKLINE_API_KEYS", "")),
    )


def _listed(text: str) -> tuple[str, ...]:
    parts = (part.strip() for part in text.split(","))
    return tuple(part for part in parts if part)


def engine_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine process: this one's, without the keys of clients, for which plugins have no use."""
    kept = dict(os.environ if environ is None else environ)
    kept.pop("HOOKLINE_API_KEYS", None)
    return kept


def _user_cache_dir() -> str:
    import platformdirs  # not at the top: who says where the cache is can do without

    return str(platformdirs.user_cache_dir("hookline"))
