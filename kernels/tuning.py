"""Which configuration of the products for few tokens serves which shape: measured choices, and a heuristic without one.

    configuration(x, weight, kind)  ->  SmallConfig, or None where the vendor's library is the better one

Choices are keyed by device name, type, kind, N, K and a number of tokens M; one for M serves all numbers of tokens up
to M that have no nearer one. They are read once: `tuned.json` beside this file, and over it the file that `store` keeps
in Triton's cache (beside the compiled kernels, as native.py does). Nothing is measured when a model runs.

Kinds: "plain", "gated" (the activation in the same kernel; N are the weight's rows, gate and up) and "wide" (fp32 out).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

from hookline_kernels.linear_small import FORMS, MAX_TOKENS, SmallConfig

KINDS = ("plain", "gated", "wide")
LIBRARY = "library"
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHIPPED = Path(__file__).parent / "tuned.json"

_FORMAT = 1
_USERS_FILE = "linear.json"
_KEY = {"device": str, "dtype": str, "kind": str, "n": int, "k": int, "m": int}
_TIMES = ("us", "library_us")

# What counts in `heuristic`: bytes of weights that a multiprocessor should have under way, shared memory that it can
# give, and the size from which the library is as fast as memory.
_IN_FLIGHT, _SHARED, _LARGE = 48 * 1024, 200 * 1024, 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedChoice:
    """One measured choice: the best configuration, None where the library won, and times in microseconds a call."""

    device: str
    dtype: str
    kind: str
    n: int
    k: int
    m: int
    config: SmallConfig | None
    us: float = 0.0
    library_us: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        """What it is stored under."""
        return (self.device, self.dtype, self.kind, self.n, self.k, self.m)


@dataclass(frozen=True, slots=True)
class Device:
    """What the heuristic needs to know of a GPU."""

    name: str
    multiprocessors: int
    capability: tuple[int, int]


def configuration(x: torch.Tensor, weight: torch.Tensor, kind: str) -> SmallConfig | None:
    """The configuration for x [T, K] and weight [N, K] on a GPU; None where the library should be called.

    Raises:
        ValueError: a table's file is not sound; the message names it.
    """
    return _configuration(x.device, x.dtype, kind, weight.shape[0], weight.shape[1], x.shape[0])


@cache
def _configuration(
    device: torch.device, dtype: torch.dtype, kind: str, columns: int, inner: int, tokens: int
) -> SmallConfig | None:
    found = device_facts(device)
    measured = _table().get((found.name, type_name(dtype), kind, columns, inner), {})
    nearest = min((m for m in measured if m >= tokens), default=None)
    if nearest is not None:
        return measured[nearest]
    return heuristic(found, dtype, kind, columns, inner, tokens)


def heuristic(device: Device, dtype: torch.dtype, kind: str, n: int, k: int, tokens: int) -> SmallConfig | None:
    """For a shape that nobody measured: the tile and the split that keep all multiprocessors evenly busy.

    The library is kept for fp32, for rows that are not 16-byte aligned, and where it is near the memory's speed or the
    product is no longer one of reading: large weights, many tokens. A fused activation saves a launch and two passes
    over the gate and up sums, so it is preferred longer.
    """
    few = tokens <= (32 if kind == "gated" else 16)
    if device.capability < (8, 0) or dtype not in (torch.float16, torch.bfloat16) or k % 8 or not few:
        return None
    if kind != "gated" and n * k * 2 >= _LARGE:
        return None
    halves = 2 if kind == "gated" else 1
    best: tuple[float, SmallConfig] | None = None
    for block_n in (16, 32, 64):
        tiles = -(-(n // halves) // block_n)
        for splits in (1, 2, 3, 4, 6, 8):
            if k // splits < 512 and splits > 1:
                continue
            block_k = 256 if block_n * halves <= 32 and k >= 2048 else 128
            config = SmallConfig(block_n=block_n, block_k=block_k, splits=splits, warps=4 if block_n > 16 else 2)
            shared = config.shared_bytes(tokens, 2, halves == 2)
            share = tiles * splits / device.multiprocessors
            # The slowest multiprocessor sets the time; too little under way costs bandwidth, a split a last addition.
            even = share / -(-(tiles * splits) // device.multiprocessors)
            together = min(share, _SHARED // shared) * (config.stages - 1) * block_n * halves * block_k * 2
            score = even * min(1.0, together / _IN_FLIGHT) * (1.0 - 0.02 * splits) * (1.0 + 0.0005 * block_n)
            if best is None or score > best[0]:
                best = (score, config)
    return None if best is None else best[1]


@cache
def device_facts(device: torch.device) -> Device:
    """What is known of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return Device(found.name, found.multi_processor_count, (found.major, found.minor))


def type_name(dtype: torch.dtype) -> str:
    """As the tables write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse(text: str, source: str) -> tuple[TunedChoice, ...]:
    """The choices in a table's JSON.

    Args:
        source: the file's name, for messages.

    Raises:
        ValueError: what is wrong and where; nothing of an unsound file is used.
    """
    mend = f"{source}: not a table of tuned products ({{}}); delete the file, or tune again"
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ValueError(mend.format(error)) from error
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT or not isinstance(whole.get("choices"), list):
        raise ValueError(mend.format(f'expected {{"format": {_FORMAT}, "choices": [...]}}'))
    choices = []
    for index, row in enumerate(whole["choices"]):
        try:
            choices.append(_choice(row))
        except (TypeError, ValueError) as error:
            raise ValueError(mend.format(f"choice {index}: {error}")) from error
    seen: set[object] = set()
    for index, choice in enumerate(choices):
        if choice.key in seen:
            raise ValueError(mend.format(f"choice {index} is there twice: {choice.key}"))
        seen.add(choice.key)
    return tuple(choices)


def _choice(row: Any) -> TunedChoice:
    if not isinstance(row, dict):
        raise ValueError(f"an object expected, got {row!r}")
    unknown = sorted(set(row) - {*_KEY, *_TIMES, "choice"})
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}")
    for name, kind in _KEY.items():
        value = row.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 1):
            raise ValueError(f"{name} must be a {'positive integer' if kind is int else 'string'}, got {value!r}")
    for name in _TIMES:
        value = row.get(name, 0.0)
        if type(value) not in (int, float) or not 0.0 <= value < 1e9:
            raise ValueError(f"{name} must be microseconds, got {value!r}")
    if row["kind"] not in KINDS or (row["kind"] == "gated" and row["n"] % 2):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, and gated has an even n; got {row['kind']!r}")
    if row["m"] not in BUCKETS:
        raise ValueError(f"m must be one of {', '.join(map(str, BUCKETS))}, got {row['m']}")
    config = _config(row.get("choice"))
    if config is not None and config.form == "vector" and row["m"] > 1:
        raise ValueError("the form 'vector' is for m = 1")
    return TunedChoice(
        **{name: row[name] for name in _KEY}, **{name: row.get(name, 0.0) for name in _TIMES}, config=config
    )


def _config(choice: Any) -> SmallConfig | None:
    if choice == LIBRARY:
        return None
    if not isinstance(choice, dict):
        raise ValueError(f"choice must be {LIBRARY!r} or a configuration, got {choice!r}")
    names = {field.name for field in dataclasses.fields(SmallConfig)}
    if set(choice) - names or not isinstance(choice.get("form"), str) or choice["form"] not in FORMS:
        raise ValueError(f"a configuration has a form ({', '.join(FORMS)}) and of {', '.join(sorted(names))}")
    return SmallConfig(**choice)


def dump(choices: Iterable[TunedChoice]) -> str:
    """The JSON of a table, a line a choice, sorted."""
    lines = []
    for choice in sorted(choices, key=lambda choice: choice.key):
        row = {name: getattr(choice, name) for name in (*_KEY, *_TIMES)}
        for name in _TIMES:
            row[name] = round(row[name], 2)
        row["choice"] = LIBRARY if choice.config is None else dataclasses.asdict(choice.config)
        lines.append(json.dumps(row))
    return f'{{"format": {_FORMAT}, "choices": [\n' + ",\n".join(lines) + "\n]}\n"


def shipped() -> tuple[TunedChoice, ...]:
    """The choices that come with the package."""
    return parse(SHIPPED.read_text(encoding="utf-8"), str(SHIPPED)) if SHIPPED.is_file() else ()


def of_user() -> tuple[TunedChoice, ...]:
    """The choices that `store` kept on this machine."""
    path = _users_manager().get_file(_USERS_FILE)
    return () if path is None else parse(Path(path).read_text(encoding="utf-8"), path)


def merge(older: Iterable[TunedChoice], newer: Iterable[TunedChoice]) -> tuple[TunedChoice, ...]:
    """Both, the newer one where both have a choice."""
    return tuple({choice.key: choice for choice in (*older, *newer)}.values())


def store(choices: Iterable[TunedChoice]) -> Path:
    """Keeps choices for this user, over those kept before and those shipped; used from the next call on.

    Returns:
        the file, in Triton's cache.
    """
    path = Path(_users_manager().put(dump(merge(of_user(), choices)), _USERS_FILE, binary=False))
    forget()
    return path


def forget() -> None:
    """Reads the tables again at the next call. CUDA graphs keep what they captured."""
    _table.cache_clear()
    _configuration.cache_clear()


def _users_manager() -> Any:
    key = f"hookline linear products {_FORMAT}"
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


@cache
def _table() -> dict[tuple[str, str, str, int, int], dict[int, SmallConfig | None]]:
    """By device, type, kind, N and K: the choices by M."""
    table: dict[tuple[str, str, str, int, int], dict[int, SmallConfig | None]] = {}
    for choice in merge(shipped(), of_user()):
        if choice.m <= MAX_TOKENS:
            table.setdefault(choice.key[:5], {})[choice.m] = choice.config
    return table
