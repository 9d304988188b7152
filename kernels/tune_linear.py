"""Finds, on a GPU, the fastest configuration of the products for few tokens: what fills the tables of `tuning.py`.

    sweep(products, tokens, seconds=240) -> TunedChoice for each product and number of tokens

For one product and M: every tile of a coarse list with the splits that fill the GPU, then warps, stages and dependent
launch around the best of them. A candidate is first checked against fp32, then timed: a CUDA graph of many calls that
go round copies of the weight, so that none is found in the second level cache. The library is timed in the same way.
The kernels are compiled by threads in parallel, about a second each; most serve several shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch
import triton

from hookline_kernels.activation import SILU, gated_activation
from hookline_kernels.launch import arrival_counters
from hookline_kernels.linear import linear_direct
from hookline_kernels.linear_small import (
    SmallConfig,
    linear_gated_small,
    linear_small,
    linear_small_reference,
)
from hookline_kernels.tuning import LIBRARY, TunedChoice, device_facts, type_name

# Our kernel is taken where it saves at least this part of the library's time.
GAIN = 0.01

# Bytes of weight copies that a graph goes round, and the least microseconds of one replay.
ROTATED, GRAPH_US = 512 * 1024 * 1024, 1500.0

# Shared memory of a program on Hopper; the worst error allowed by type, as a part of the largest value.
SHARED = 227 * 1024
WORST = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [n, k] and what is made of it: kinds as in `tuning.py`."""

    name: str
    kind: str
    n: int
    k: int


# By the time they take in a step.
LLAMA_8B = (
    Product("gate_up", "gated", 28672, 4096),
    Product("down", "plain", 4096, 14336),
    Product("qkv", "plain", 6144, 4096),
    Product("o", "plain", 4096, 4096),
    Product("lm_head", "wide", 128256, 4096),
)
TOKENS = (1, 32, 16, 8, 64)


class Trial(Protocol):
    """One product with one number of tokens, ready to be measured."""

    def compile(self, configs: Sequence[SmallConfig]) -> None:
        """Compiles what is not compiled yet, in parallel."""

    def wrong(self, config: SmallConfig) -> str | None:
        """Why the configuration cannot be used; None if its results are right."""

    def time(self, config: SmallConfig | None, replays: int) -> float:
        """Microseconds a call; the library's without a configuration."""


def coarse(product: Product, tokens: int, multiprocessors: int) -> list[SmallConfig]:
    """The first candidates: each tile with stages for about 100 KB, and the splits that make half a wave to five."""
    halves = 2 if product.kind == "gated" else 1
    tiles = [
        ("rows", n, k, 4) for n, k in ((32, 128), (64, 64), (64, 128), (32, 256), (64, 256), (128, 64), (128, 128))
    ]
    tiles += [("columns", n, k, 4) for n, k in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128))]
    if tokens <= 16:
        tiles += [("rows", 16, 128, 2), ("rows", 16, 256, 2), ("rows", 16, 512, 4), ("rows", 32, 512, 4)]
    if tokens == 1:
        tiles += [("vector", n, k, 4) for n, k in ((2, 1024), (4, 512), (4, 1024), (8, 512), (16, 256))]
    found = []
    for form, block_n, block_k, warps in tiles:
        config = SmallConfig(form=form, block_n=block_n, block_k=block_k, warps=warps, stages=1)
        config = replace(config, stages=max(3, min(6, 100 * 1024 // config.shared_bytes(tokens, 2, halves == 2))))
        if config.shared_bytes(tokens, 2, halves == 2) <= SHARED:
            found += split_ways(config, product, multiprocessors)
    return found


def split_ways(config: SmallConfig, product: Product, multiprocessors: int) -> list[SmallConfig]:
    """The configuration with each number of splits that makes sense for the shape."""
    rows = product.n // 2 if product.kind == "gated" else product.n
    tiles = -(-rows // config.block_n)
    steps = -(-product.k // config.block_k)
    most = 16 if config.form == "vector" else 5  # programs a multiprocessor
    ways = [
        splits
        for splits in (1, 2, 3, 4, 5, 6, 8)
        if splits <= max(1, steps // 2) and 0.45 * multiprocessors <= tiles * splits <= most * multiprocessors
    ]
    return [replace(config, splits=splits) for splits in ways or [1]]


def around(config: SmallConfig, tokens: int, gated: bool, pdl: bool) -> list[SmallConfig]:
    """Candidates that differ from a good one in warps, stages or dependent launch."""
    warps = [config.warps // 2, config.warps * 2]
    if config.form == "columns":
        warps = [8] if config.warps == 4 else [4]  # matrix instructions of four warps
    found = [replace(config, warps=count) for count in warps if 1 <= count <= 8]
    stages = (1, 2, 4) if config.form == "vector" else (config.stages - 1, config.stages + 1, config.stages + 2)
    found += [replace(config, stages=count) for count in stages if 1 <= count <= 8]
    if pdl:
        found.append(replace(config, pdl=True))
    return [other for other in found if other != config and other.shared_bytes(tokens, 2, gated) <= SHARED]


def tune(
    trial: Trial, product: Product, tokens: int, multiprocessors: int, *, until: float, pdl: bool
) -> tuple[SmallConfig | None, float, float, str]:
    """The best configuration (None: the library), its time, the library's, and what was tried.

    Args:
        until: of `time.monotonic`; candidates that are not begun by then are left out.
        pdl: whether dependent launch is among the candidates.
    """
    times: dict[SmallConfig, float] = {}
    wrong: list[str] = []

    def measure(configs: Iterable[SmallConfig]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in times]
        for part in range(0, len(new), 48):
            if time.monotonic() > until:
                return
            trial.compile(new[part : part + 48])
            for config in new[part : part + 48]:
                reason = trial.wrong(config) if time.monotonic() <= until else "no time"
                times[config] = trial.time(config, 3) if reason is None else float("inf")
                if reason not in (None, "no time"):
                    wrong.append(f"{describe(config)}: {reason}")

    def best(count: int) -> list[SmallConfig]:
        return sorted((config for config, us in times.items() if us != float("inf")), key=lambda c: times[c])[:count]

    library = trial.time(None, 9)
    measure(coarse(product, tokens, multiprocessors))
    kernels = {replace(config, splits=1): config for config in reversed(best(12))}  # the best splits of each kernel
    leaders = sorted(kernels.values(), key=lambda config: times[config])[:3]
    gated = product.kind == "gated"
    measure(other for leader in leaders for other in around(leader, tokens, gated, pdl))
    # Changes that helped alone, together; and the splits once more for the winner.
    measure(other for leader in best(2) for other in around(leader, tokens, gated, pdl))
    measure(other for leader in best(2) for other in split_ways(leader, product, multiprocessors))
    final = {config: trial.time(config, 15) for config in best(4)}
    library = min(library, trial.time(None, 15))
    tried = f"{len(times)} tried" + (f", {len(wrong)} unusable ({wrong[0]})" if wrong else "")
    winner = min(final, key=lambda config: final[config], default=None)
    if winner is None or final[winner] > (1.0 - GAIN) * library:
        return None, final.get(winner, library) if winner else library, library, tried
    return winner, final[winner], library, tried


def sweep(
    products: Sequence[Product] = LLAMA_8B,
    tokens: Sequence[int] = TOKENS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    seconds: float = 240.0,
    pdl: bool = True,
    threads: int = 16,
    report: Callable[[str], None] = print,
    prepare: Callable[[Product, int], Trial] | None = None,
) -> Iterator[TunedChoice]:
    """Tunes each product for each number of tokens, and yields each choice as it is made.

    Args:
        products, tokens: the most valuable first; tokens are buckets of `tuning.py`.
        dtype: float16 or bfloat16.
        seconds: for all together; a product that the time does not reach is left out.
        report: is given a line a choice.
        prepare: makes the trial; by default on the GPU.
    """
    start = time.monotonic()
    on = torch.device(device) if torch.device(device).index is not None else torch.device("cuda", 0)
    if prepare is None:
        facts = device_facts(on)
        name, multiprocessors = facts.name, facts.multiprocessors
    else:
        name, multiprocessors = str(device), 132
    pairs = [(product, count) for count in tokens for product in products]
    for index, (product, count) in enumerate(pairs):
        left = seconds - (time.monotonic() - start)
        if left <= 0.0:
            report(f"no time left for {len(pairs) - index} of {len(pairs)}")
            return
        begun = time.monotonic()
        until = begun + min(left, 3.0 * left / (len(pairs) - index))
        trial = GpuTrial(product, count, dtype, on, threads) if prepare is None else prepare(product, count)
        config, us, library_us, tried = tune(trial, product, count, multiprocessors, until=until, pdl=pdl)
        choice = TunedChoice(
            device=name,
            dtype=type_name(dtype),
            kind=product.kind,
            n=product.n,
            k=product.k,
            m=count,
            config=config,
            us=us,
            library_us=library_us,
        )
        report(f"{product.name:8} {line(choice)}; {tried}, {time.monotonic() - begun:.1f} s")
        yield choice


def describe(config: SmallConfig | None) -> str:
    """In one short phrase."""
    if config is None:
        return LIBRARY
    tile = f"{config.form} {config.block_n}x{config.block_k} / {config.splits}"
    return f"{tile}, {config.warps} warps, {config.stages} stages{', pdl' if config.pdl else ''}"


def line(choice: TunedChoice) -> str:
    """The choice and its times, with the speed at which the weight was read."""
    megabytes = choice.n * choice.k * (4 if choice.dtype == "float32" else 2) / 1e6
    speeds = [f"{us:7.1f} us {megabytes / us if us else 0.0:5.2f} TB/s" for us in (choice.us, choice.library_us)]
    shape = f"[{choice.n}, {choice.k}]"
    what = f"{choice.kind:5} {shape:15} M {choice.m:2}"
    return f"{what}  ours {speeds[0]}  library {speeds[1]}  -> {describe(choice.config)}"


class GpuTrial:
    """A product on the GPU, with random weights."""

    def __init__(self, product: Product, tokens: int, dtype: torch.dtype, device: torch.device, threads: int) -> None:
        self.kind, self.threads = product.kind, threads
        generator = torch.Generator(device).manual_seed(tokens)
        copies = max(1, -(-ROTATED // (product.n * product.k * dtype.itemsize)))
        shape = (product.n, product.k)
        self.weights = [
            torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(product.k**-0.5)
            for _ in range(copies)
        ]
        self.x = torch.randn(tokens, product.k, generator=generator, device=device, dtype=dtype)
        code = SILU if self.kind == "gated" else None
        self.expected = linear_small_reference(self.x, self.weights[0], None, True, code)
        floor_us = product.n * product.k * dtype.itemsize / 4.5e6
        self.calls = copies * max(1, -(-int(GRAPH_US / floor_us) // copies))
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, config: SmallConfig | None, weight: torch.Tensor, compile_only: bool = False) -> torch.Tensor:
        """One call."""
        if config is None:
            y = linear_direct(self.x, weight, None, self.kind == "wide")
            return gated_activation(y, "silu") if self.kind == "gated" else y
        if self.kind == "gated":
            return linear_gated_small(self.x, weight, None, SILU, config, compile_only=compile_only)
        return linear_small(self.x, weight, None, self.kind == "wide", config, compile_only=compile_only)

    def compile(self, configs: Sequence[SmallConfig]) -> None:
        """In threads; what fails to compile fails again, and with its reason, in `wrong`."""
        with ThreadPoolExecutor(self.threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.run(config, self.weights[0], compile_only=True)

    def wrong(self, config: SmallConfig) -> str | None:
        """By the worst error, two equal runs, and counters that are back at zero."""
        try:
            y, again = (self.run(config, self.weights[0]) for _ in range(2))
        except (RuntimeError, triton.runtime.errors.TritonError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        worst = float((y.float() - self.expected).abs().max() / self.expected.abs().max())
        if not worst <= WORST[y.dtype]:
            return f"worst error {worst:.1e}"
        if not torch.equal(y, again):
            return "two runs differ"
        return "counters are not zero" if int(arrival_counters(y.device).count_nonzero()) else None

    def time(self, config: SmallConfig | None, replays: int) -> float:
        """The median of the replays of a graph."""
        # Not torch.cuda.graph: it collects garbage and empties the allocator's cache every time.
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.run(config, self.weights[0])
            self.stream.synchronize()
            graph.capture_begin()
            try:
                for call in range(self.calls):
                    self.run(config, self.weights[call % len(self.weights)])
            finally:
                graph.capture_end()
            marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]  # type: ignore[no-untyped-call]
            for mark in marks:
                graph.replay()
                mark.record()
        self.stream.synchronize()
        return float(median(a.elapsed_time(b) for a, b in pairwise(marks))) * 1e3 / self.calls
