"""Memory planners: what a model needs on a device, and how much of the rest becomes cache.

The cache is sized last: weights, then what a forward pass needs, then cache. The plan is a record of its own, printed
as a table; an error about memory prints the same table and settings that were computed to fit.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hookline.config import MemorySize, Percent, ResolvedConfig, bytes_of
from hookline.errors import NotEnoughMemoryError
from hookline.model import CacheSpec, ModelConfig, MoETransformerConfig, TransformerConfig
from hookline_kernels.packed import PANEL

_CPU_CACHE = 512 * 2**20
_GPU_MEMORY = Percent(90.0)
# What is left alone on a GPU whatever the options say: the driver, libraries and the allocator's gaps need some.
_GPU_MARGIN = Percent(2.0)


def format_bytes(count: int) -> str:
    """`count` with a binary unit, such as `512.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory of one device goes, in bytes.

    Attributes:
        available: what the engine may use, before weights.
        weights, activations: of the model, and of one step at its largest.
        graphs: of captured decode steps.
        cache: of all cache groups, `num_blocks` blocks of `block_size` tokens.
        max_model_len: longest request that is served.
        model_len: longest that was asked for, or that the model was made for; the cache may hold less.
    """

    device: str
    available: int
    weights: int
    activations: int
    graphs: int = 0
    cache: int
    num_blocks: int
    block_size: int
    max_model_len: int
    model_len: int

    def table(self) -> str:
        """The plan as lines of text."""
        tokens = self.num_blocks * self.block_size
        left = self.available - self.weights - self.activations - self.graphs - self.cache
        rows = [
            ("available", format_bytes(self.available), ""),
            ("weights", format_bytes(self.weights), ""),
            ("activations", format_bytes(self.activations), "one step at its largest"),
            *([("graphs", format_bytes(self.graphs), "captured decode steps")] if self.graphs else []),
            (
                "cache",
                format_bytes(self.cache),
                f"{tokens:,} tokens in {self.num_blocks:,} blocks of {self.block_size}",
            ),
            ("left", format_bytes(left), ""),
        ]
        lines = [f"  {name:<12} {size:>12}  {note}".rstrip() for name, size, note in rows]
        if self.num_blocks:
            concurrent = tokens / self.max_model_len
            lines.append(f"  {concurrent:,.1f} requests of {self.max_model_len:,} tokens fit at a time")
            if self.max_model_len < self.model_len:
                lines.append(f"  a request ends there, short of {self.model_len:,}: the cache holds no more")
        return "\n".join([f"Memory on {self.device}:", *lines])


class MemoryPlanner:
    """The default planner, for decoders of the shapes in `TransformerConfig`."""

    def __init__(self, config: ModelConfig, engine_config: ResolvedConfig) -> None:
        self.config = config
        self.engine_config = engine_config

    def activation_bytes(self, itemsize: int) -> int:
        """Bytes of the tensors that a step with the whole token budget has alive at a time, from above."""
        config, options = self.config, self.engine_config
        width, inner = 4 * config.hidden_size, config.hidden_size
        if isinstance(config, TransformerConfig):
            width = 3 * config.hidden_size + 3 * config.intermediate_size
            inner = max(inner, config.intermediate_size)
            width += 2 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        if isinstance(config, MoETransformerConfig):
            # Of each pair of token and expert: its input, what its two products give, and the fp32 parts of the sum.
            width += config.n_top_k * (4 * config.hidden_size + 3 * config.expert_intermediate_size)
            width += 3 * config.shared_intermediate_size
        tokens = options.max_batch_tokens * width * itemsize
        logits = options.max_running * config.vocab_size * (itemsize + 4)
        # A part of a packed weight that products of many tokens have multiplied out.
        panel = 4 * PANEL * inner if options.device == "cpu" else 0
        return tokens + logits + panel

    def plan(
        self, specs: Sequence[CacheSpec], weights: int, available: int, measured: tuple[int, int] | None = None
    ) -> MemoryPlan:
        """Sizes the cache.

        Args:
            specs: the model's cache groups.
            weights: bytes of the loaded weights.
            available: bytes that may be used on the device, those of the weights included.
            measured: bytes of a prefill step at its largest and of a decode step that will be captured, where they were
                run; else the former is reckoned, and the latter is 0.

        Raises:
            NotEnoughMemoryError: with the table and settings that fit, if the cache has no room for what was asked.
        """
        token_bytes = sum(spec.bytes_per_token() for spec in specs)
        plan, fault = self._size(token_bytes, weights, available, measured)
        if fault:
            remedies = list(self._remedies(plan, token_bytes, measured))
            hint = "Choose a smaller model or a larger machine."
            if remedies:
                hint = "Any of these helps:\n  " + "\n  ".join(remedies)
            raise NotEnoughMemoryError(f"{fault}.\n{plan.table()}", hint=hint)
        return plan

    def _size(
        self, token_bytes: int, weights: int, available: int, measured: tuple[int, int] | None = None
    ) -> tuple[MemoryPlan, str]:
        """The plan, and what is wrong with it, if anything is."""
        options = self.engine_config
        dtype: torch.dtype = getattr(torch, options.dtype)
        block = token_bytes * options.block_size
        activations, graphs = measured or (self.activation_bytes(dtype.itemsize), 0)
        room = available - weights - activations - graphs
        wanted_len = options.max_model_len or self.config.max_position_embeddings
        if options.kv_cache_memory is None:
            num_blocks = max(0, min(self._default_cache(room, block, wanted_len), room) // block)
        else:
            num_blocks = bytes_of(options.kv_cache_memory, available) // block
        longest = num_blocks * options.block_size
        plan = MemoryPlan(
            device=options.device,
            available=available,
            weights=weights,
            activations=activations,
            graphs=graphs,
            cache=num_blocks * block,
            num_blocks=num_blocks,
            block_size=options.block_size,
            max_model_len=max(1, min(wanted_len, longest)),
            model_len=wanted_len,
        )
        fault = ""
        if room <= 0:
            fault = f"Weights and a step at its largest leave no room for a cache: they take {format_bytes(-room)} more"
        elif plan.cache > room:
            fault = f"The cache of {format_bytes(plan.cache)} that was asked for does not fit"
        elif num_blocks < 1 or (options.max_model_len is not None and options.max_model_len > longest):
            need = format_bytes(-(-wanted_len // options.block_size) * block)
            fault = f"One request of {wanted_len:,} tokens needs a cache of {need}; it has {format_bytes(plan.cache)}"
        return plan, fault

    def _remedies(self, plan: MemoryPlan, token_bytes: int, measured: tuple[int, int] | None) -> Iterator[str]:
        """Settings in place of those of `plan`, each tried: with it a plan is found."""
        options = self.engine_config
        block = token_bytes * options.block_size
        fits = max(0, plan.available - plan.weights - plan.activations - plan.graphs) // block
        one_request = -(-(options.max_model_len or self.config.max_position_embeddings) // options.block_size)
        changes: list[dict[str, Any]] = [
            {"max_model_len": plan.max_model_len},
            {"kv_cache_memory": one_request * block},
            *([{"max_model_len": fits * options.block_size, "kv_cache_memory": fits * block}] * (one_request > fits)),
            {"dtype": "bfloat16"},
            *({"max_batch_tokens": count} for count in (2048, 512, 128)),
            *({"max_running": count} for count in (64, 16, 4)),
            {"block_size": 16},
        ]
        given: set[tuple[str, ...]] = set()
        for change in changes:
            differs = all(value and value != getattr(options, name) for name, value in change.items())
            if tuple(change) not in given and differs and self._is_remedy(change, plan, token_bytes, measured):
                given.add(tuple(change))
                yield " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())

    def _is_remedy(
        self, change: Mapping[str, Any], plan: MemoryPlan, token_bytes: int, measured: tuple[int, int] | None
    ) -> bool:
        halves = 2 if "dtype" in change and self.engine_config.dtype == "float32" else 1
        other = copy.copy(self)
        other.engine_config = dataclasses.replace(self.engine_config, **change)
        if measured is not None:
            measured = (max(1, measured[0] - self._saved(other, measured[0])), measured[1])
        return not other._size(token_bytes // halves, plan.weights // halves, plan.available, measured)[1]

    def _saved(self, other: MemoryPlanner, measured: int) -> int:
        """How much less than `measured` a step of `other` takes at its largest, from below: as much as is reckoned, or
        its part where less was measured than reckoned.
        """
        own, others = (
            planner.activation_bytes(getattr(torch, planner.engine_config.dtype).itemsize) for planner in (self, other)
        )
        return int((own - others) * min(1.0, measured / own))

    def _default_cache(self, room: int, block: int, wanted_len: int) -> int:
        if self.engine_config.device != "cpu":
            return room
        one_request = -(-wanted_len // self.engine_config.block_size) * block
        return min(room // 4, max(_CPU_CACHE, one_request))


def available_memory(device: torch.device, limit: MemorySize | None = None) -> int:
    """Bytes that the engine may use on `device`: what is free now, within the machine's or container's limits.

    Args:
        limit: the most, percent being of the GPU's memory, or of what is free on a CPU; by default 90 % of a GPU's.
    """
    if device.type == "cuda":
        return _within(*torch.cuda.mem_get_info(device), _GPU_MEMORY if limit is None else limit)
    free, left = _meminfo_available(), _cgroup_available(Path("/sys/fs/cgroup"))
    free = free if left is None else max(0, min(free, left))
    return free if limit is None else min(free, bytes_of(limit, free))


def planned_memory(total: int, limit: MemorySize | None = None) -> int:
    """Bytes that the engine may use of a GPU with `total` bytes on which nothing else runs."""
    return _within(total, total, _GPU_MEMORY if limit is None else limit)


def _within(free: int, total: int, limit: MemorySize) -> int:
    """What a GPU with so many bytes has for the engine."""
    return max(0, min(bytes_of(limit, total), free - bytes_of(_GPU_MARGIN, total)))


def _cgroup_available(folder: Path) -> int | None:
    """What a container's limit leaves; None where there is no limit.

    Files that were read count as used until the kernel needs their memory, which it takes back without a word; so
    those that lie idle are no obstacle.
    """
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _meminfo_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
