"""Checks and times the kernels of a mixture of experts on this machine's GPU, one configuration beside the other.

    PYTHONPATH=src python benchmarks/tune_moe.py [--seconds 150] [--tokens 1,8192] [--output moe.json]
    PYTHONPATH=src python benchmarks/tune_moe.py --experts 256 --top-k 8 --model 6144 --size 2048
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/tune_moe.py --check

Both products of Mixtral-8x7B's layers by default, in bf16, with random routing that differs from call to call. Each
configuration is compared with the formula in fp32 and then timed: the median of the replays of a CUDA graph of calls
that go through more weights than the GPU's cache holds. A line each: microseconds, TB/s of the weights of the experts
that had tokens, TFLOP/s, worst error. "auto" is what the kernels choose by themselves, "library" torch's grouped
product with all that it needs around it. Then the routing kernels, a whole layer, the best of each row, and the best
ones once more on shapes that fit no tile. `--check` runs all of it on the CPU in Triton's interpreter with tiny shapes.
Exit code 1 if a result is wrong, 7 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from hookline_kernels.activation import SILU
from hookline_kernels.grouped_gemm import grouped_linear_combine, grouped_linear_gated
from hookline_kernels.grouped_gemm_triton import TilesConfig, combine_tiles, gated_tiles
from hookline_kernels.grouped_library import why_no_library
from hookline_kernels.grouped_small import GroupedSmallConfig, combine_small, gated_small
from hookline_kernels.launch import arrival_counters
from hookline_kernels.moe_routing import RoutingRule, choose_experts, sort_by_expert

TOKENS = (1, 8192, 32, 128, 8, 1024, 2, 4, 16, 64, 256)  # the most telling first
SHARED = 227 * 1024  # bytes that a program can have on Hopper
WORST = {torch.bfloat16: 1.6e-2, torch.float32: 1e-5}  # errors allowed, as parts of the largest expected value
GRAPH_US, READ_SPEED = 1500.0, 4.2e6  # least microseconds of a graph; bytes a microsecond that memory gives

Config = GroupedSmallConfig | TilesConfig | str
PRODUCTS = ("gated", "combine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer's sizes, as in grouped_gemm.py."""

    experts: int
    top_k: int
    model: int
    size: int


MIXTRAL = Shape(experts=8, top_k=2, model=4096, size=14336)
TINY = Shape(experts=4, top_k=2, model=32, size=48)


def small(tiles: Sequence[tuple[int, int, int, int]], splits: Sequence[int], **options: Any) -> list[Config]:
    """From block_m, block_n, block_k and stages."""
    return [
        GroupedSmallConfig(block_m=m, block_n=n, block_k=k, stages=stages, splits=split, **options)
        for m, n, k, stages in tiles
        for split in splits
    ]


def tiled(tiles: Sequence[tuple[int, int, int, int, int]], **options: Any) -> list[Config]:
    """From block_m, block_n, block_k, warps and stages."""
    return [
        TilesConfig(block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, **options)
        for m, n, k, warps, stages in tiles
    ]


def gated_candidates(tokens: int, rows: float) -> Iterator[Config]:
    """For T tokens and the mean rows of an active expert."""
    if tokens == 1:
        yield from small([(1, 2, 1024, 6), (1, 4, 512, 6), (1, 4, 1024, 4), (1, 8, 512, 4)], [1], form="vector")
        yield from small([(1, 2, 1024, 6)], [1], form="vector", pdl=True)
    if tokens <= 32:
        tiles = [(16, 128, 128, 3), (16, 64, 128, 6), (16, 64, 128, 3), (16, 128, 64, 6), (16, 64, 256, 3)]
        yield from small(tiles, [1, 2], pdl=True)
        yield from small(tiles[:1], [1])
        yield from small(tiles[:1], [1], pdl=True, warps=8)
    if 8 <= tokens <= 128:
        yield from small([(32, 128, 128, 3), (32, 64, 128, 5), (32, 128, 64, 5)], [1], pdl=True)
    if 32 <= tokens <= 256:
        yield from small([(64, 128, 64, 5), (64, 64, 128, 4), (64, 128, 128, 2)], [1], pdl=True)
        yield from small([(64, 128, 64, 4), (64, 64, 128, 4)], [1], pdl=True, form="rows")
    if tokens >= 32 and rows <= 300:
        yield from tiled([(64, 128, 64, 4, 4), (64, 64, 64, 4, 6), (64, 64, 64, 4, 4)], tma="both")
        yield from tiled([(64, 128, 64, 4, 4), (64, 64, 64, 4, 5)], tma="weight", persistent=False)
        yield from tiled([(64, 128, 64, 4, 4)], tma="none", persistent=False)
    if rows >= 32:
        yield from tiled([(128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 5)], tma="both")
        yield from tiled([(128, 128, 64, 8, 4), (128, 64, 64, 4, 3)], tma="both", persistent=False)
        yield from tiled([(128, 128, 64, 8, 4)], tma="weight", persistent=False)
    if rows >= 200:
        yield from tiled([(128, 128, 64, 8, 4), (128, 128, 64, 8, 3)], tma="both", overlap=False)
        yield from tiled([(128, 128, 64, 8, 3), (256, 64, 64, 8, 4), (128, 128, 128, 8, 2)], tma="both")
        for group_m in (4, 8, 64):
            yield from tiled([(128, 128, 64, 8, 4)], tma="both", group_m=group_m)
        yield from tiled([(128, 128, 64, 8, 4)], tma="weight", overlap=False)
        yield from tiled([(128, 128, 64, 8, 4)], tma="weight")
        yield from tiled([(128, 128, 64, 8, 4), (128, 128, 64, 8, 3)], tma="none", persistent=False)


def combine_candidates(tokens: int, rows: float) -> Iterator[Config]:
    """As `gated_candidates`."""
    if tokens == 1:
        yield from small([(1, 16, 256, 6), (1, 4, 1024, 6), (1, 8, 512, 6)], [1, 2], form="vector")
    if tokens <= 32:
        tiles = [(16, 64, 128, 6), (16, 64, 128, 4), (16, 128, 128, 5), (16, 64, 256, 5), (16, 32, 256, 6)]
        yield from small(tiles, [1, 2, 4], pdl=True)
        yield from small(tiles[:1], [2])
    if 8 <= tokens <= 128:
        yield from small([(32, 64, 128, 6), (32, 128, 128, 4), (32, 64, 256, 4)], [1, 2], pdl=True)
    if 32 <= tokens <= 256:
        yield from small([(64, 64, 128, 6), (64, 128, 128, 4), (64, 128, 64, 6)], [1, 2], pdl=True)
        yield from small([(64, 64, 128, 5), (64, 64, 256, 3)], [1, 2], pdl=True, form="rows")
    if tokens >= 32 and rows <= 300:
        yield from tiled([(64, 128, 64, 4, 5), (64, 256, 64, 4, 4), (64, 64, 128, 4, 5)], tma="both")
        yield from tiled([(64, 128, 64, 4, 4), (64, 64, 128, 4, 4)], tma="both", persistent=False)
    if rows >= 32:
        yield from tiled([(128, 256, 64, 8, 4), (128, 128, 64, 8, 5), (128, 128, 64, 4, 5)], tma="both")
        yield from tiled([(128, 256, 64, 8, 4), (128, 128, 64, 4, 3)], tma="both", persistent=False)
    if rows >= 200:
        yield from tiled([(128, 256, 64, 8, 4), (128, 256, 64, 8, 3)], tma="both", overlap=False)
        yield from tiled([(128, 256, 64, 8, 3), (256, 128, 64, 8, 4), (128, 256, 128, 8, 2)], tma="both")
        for group_m in (4, 8, 64):
            yield from tiled([(128, 256, 64, 8, 4)], tma="both", group_m=group_m)
        yield from tiled([(128, 256, 64, 8, 4), (128, 256, 64, 8, 3)], tma="weight", persistent=False)
        yield from tiled([(128, 256, 64, 8, 3)], tma="none", persistent=False)


def tiny_candidates() -> Iterator[Config]:
    """What the interpreter can do in no time."""
    yield from small([(16, 16, 32, 3)], [1, 2], pdl=True)
    yield from tiled([(16, 32, 16, 4, 3)], tma="both")
    yield from tiled([(16, 32, 32, 4, 3)], tma="none", persistent=False)


def label(config: Config) -> str:
    if isinstance(config, GroupedSmallConfig):
        tile = f"{config.form} {config.block_m}x{config.block_n}x{config.block_k} /{config.splits}"
        return f"{tile} w{config.warps} s{config.stages}{' pdl' if config.pdl else ''}"
    if isinstance(config, TilesConfig):
        tile = f"tiles {config.block_m}x{config.block_n}x{config.block_k} w{config.warps} s{config.stages}"
        ways = (" overlap" if config.overlap else " persistent") if config.persistent else ""
        return f"{tile} g{config.group_m} tma-{config.tma}{ways}"
    return config


class Layer:
    """The weights of a layer and the ways to multiply by them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, bias: bool = False) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.gate_up = self._random(shape.experts, 2 * shape.size, shape.model, scale=shape.model**-0.5)
        self.down = self._random(shape.experts, shape.model, shape.size, scale=shape.size**-0.5)
        self.biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if bias:
            self.biases = (self._random(shape.experts, 2 * shape.size), self._random(shape.experts, shape.model))

    def _random(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, device=self.device, dtype=self.dtype).mul_(scale)

    def run(self, call: Call, product: str, config: Config, compile_only: bool = False) -> torch.Tensor:
        """One product of one call."""
        is_gated = product == "gated"
        bias = self.biases[0 if is_gated else 1]
        if isinstance(config, str):
            how: dict[str, Any] = {"bias": bias, "implementation": None if config == "auto" else config}
            if is_gated:
                return grouped_linear_gated(call.x, self.gate_up, call.dispatch, "silu", **how)
            return grouped_linear_combine(call.h, self.down, call.dispatch, call.weights, **how)
        function: Any
        if isinstance(config, GroupedSmallConfig):
            function = gated_small if is_gated else combine_small
        else:
            function = gated_tiles if is_gated else combine_tiles
        first = (call.x, self.gate_up) if is_gated else (call.h, self.down)
        fourth = SILU if is_gated else call.weights
        return function(*first, call.dispatch, fourth, bias, config, compile_only=compile_only)  # type: ignore[no-any-return]


class Call:
    """One batch of tokens with random logits."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        shape = layer.shape
        self.rule = RoutingRule(top_k=shape.top_k, scoring="softmax", renormalize=True)
        self.x = layer._random(tokens, shape.model)
        self.h = layer._random(tokens * shape.top_k, shape.size)
        self.logits = layer._random(tokens, shape.experts)
        how = "triton" if layer.device.type == "cpu" else None
        ids, self.weights = choose_experts(self.logits, self.rule, implementation=how)
        self.dispatch = sort_by_expert(ids, shape.experts, implementation=how)
        self.active = len(set(ids.flatten().tolist()))


class Case:
    """Calls of T tokens each, and what their products should be."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.tokens = layer, tokens
        self.calls = [Call(layer, tokens) for _ in range(2 if tokens > 512 else 6)]
        self.expected = {product: layer.run(self.calls[0], product, "reference").float() for product in PRODUCTS}
        self.active = sum(call.active for call in self.calls) / len(self.calls)

    def candidates(self, product: str) -> list[Config]:
        """Named ways first."""
        shape = self.layer.shape
        rows = self.tokens * shape.top_k / min(self.tokens * shape.top_k, shape.experts)
        named: list[Config] = ["auto"]
        if self.layer.device.type == "cpu":
            return [*named, *tiny_candidates()]
        if why_no_library(self.calls[0].x, self.layer.gate_up) is None:
            named.append("library")
        found = gated_candidates if product == "gated" else combine_candidates
        return named + [
            config
            for config in dict.fromkeys(found(self.tokens, rows))
            if isinstance(config, str) or config.shared_bytes(2, product == "gated") <= SHARED
        ]

    def bytes(self, product: str) -> float:
        """Of the weights of the experts that have tokens, in the mean call."""
        shape = self.layer.shape
        return self.active * shape.model * shape.size * (2 if product == "gated" else 1) * self.layer.dtype.itemsize

    def operations(self, product: str) -> float:
        shape = self.layer.shape
        return 2.0 * self.tokens * shape.top_k * shape.model * shape.size * (2 if product == "gated" else 1)

    def wrong(self, product: str, config: Config) -> tuple[float, str | None]:
        """The worst error, and what is wrong if anything is."""
        try:
            y, again = (self.layer.run(self.calls[0], product, config) for _ in range(2))
        except (RuntimeError, ValueError, TypeError, AssertionError, triton.runtime.errors.TritonError) as error:
            return float("nan"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
        expected = self.expected[product]
        worst = float((y.float() - expected).abs().max() / expected.abs().max())
        if not worst <= WORST[self.layer.dtype]:
            return worst, "WRONG: the error is too large"
        if not torch.equal(y, again):
            return worst, "WRONG: two runs differ"
        left = int(arrival_counters(y.device).count_nonzero())
        return worst, f"WRONG: {left} counters are not zero" if left else None

    def floor_us(self, product: str) -> float:
        return max(self.bytes(product) / READ_SPEED, self.operations(product) / 7e8)


def microseconds(calls: Sequence[Callable[[], object]], floor_us: float, device: torch.device) -> float:
    """Of one call: the median of the replays of a graph of all calls, repeated until it is long enough."""
    if device.type == "cpu":
        begin = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - begin) * 1e6
    rounds = max(1, round(GRAPH_US / (floor_us * len(calls))))
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache every time.
    graph = torch.cuda.CUDAGraph()
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(7)]  # type: ignore[no-untyped-call]
        for mark in marks:
            graph.replay()
            mark.record()
    stream.synchronize()
    return float(median(a.elapsed_time(b) for a, b in pairwise(marks))) * 1e3 / (rounds * len(calls))


@cache
def _stream() -> Any:
    """One for all graphs, so that their memory is found again."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Tuner:
    """Prints as it goes, and keeps what it measured."""

    def __init__(self, layer: Layer, seconds: float, threads: int) -> None:
        self.layer, self.threads, self.right = layer, threads, True
        self.begin, self.until = time.monotonic(), time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)

    def compile(self, wanted: Sequence[tuple[Layer, Call, str, Config]]) -> None:
        """In threads; what fails to compile fails again, and with its reason, in `Case.wrong`."""
        if self.layer.device.type == "cpu":
            return
        with ThreadPoolExecutor(self.threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for layer, call, product, config in wanted:
                if not isinstance(config, str):
                    layer.run(call, product, config, compile_only=True)

    def measure(self, case: Case, product: str) -> None:
        """All candidates of one product."""
        calls = case.calls
        for config in case.candidates(product):
            line = f"{product:7} T {case.tokens:5}  {label(config):48}"
            if time.monotonic() > self.until:
                self.say(f"{line} no time left")
                continue
            worst, reason = case.wrong(product, config)
            if reason is not None:
                self.right &= not reason.startswith("WRONG") and "CUDA error" not in reason
                self.say(f"{line} {reason}, error {worst:.1e}")
                continue
            runs = [partial(self.layer.run, call, product, config) for call in calls]
            try:
                us = microseconds(runs, case.floor_us(product), self.layer.device)
            except RuntimeError as error:
                self.say(f"{line} cannot be timed: {(str(error).splitlines() or [''])[0][:90]}")
                continue
            terabytes, teraflops = case.bytes(product) / us / 1e6, case.operations(product) / us / 1e6
            self.say(f"{line} {us:9.1f} us {terabytes:5.2f} TB/s {teraflops:6.1f} TFLOP/s  error {worst:.1e}")
            row = {"product": product, "tokens": case.tokens, "config": label(config), "us": us, "error": worst}
            row |= {"terabytes": terabytes, "teraflops": teraflops, "choice": config}
            self.rows.append({**row, "values": {} if isinstance(config, str) else asdict(config)})

    def routing(self, case: Case) -> None:
        """The choice of experts and the sort, alone and with both products after them."""
        experts, device, calls = self.layer.shape.experts, self.layer.device, case.calls
        how = "triton" if device.type == "cpu" else None

        def route(call: Call) -> Any:
            ids, weights = choose_experts(call.logits, call.rule, implementation=how)
            return sort_by_expert(ids, experts, implementation=how), weights

        def whole(call: Call) -> torch.Tensor:
            dispatch, weights = route(call)
            h = grouped_linear_gated(call.x, self.layer.gate_up, dispatch)
            return grouped_linear_combine(h, self.layer.down, dispatch, weights)

        alone = microseconds([partial(route, call) for call in calls], 5.0, device)
        floor = sum(case.floor_us(product) for product in PRODUCTS)
        total = microseconds([partial(whole, call) for call in calls], floor, device)
        self.say(f"routing T {case.tokens:5}  {alone:.1f} us; a layer {total:.1f} us, bound / time {floor / total:.0%}")
        for name, us in (("routing", alone), ("layer", total)):
            self.rows.append({"product": name, "tokens": case.tokens, "config": "auto", "us": us})

    def best(self) -> list[dict[str, Any]]:
        """The fastest of each product and number of tokens, printed beside the library and what was chosen."""
        found = []
        measured = [row for row in self.rows if "choice" in row]
        for tokens in sorted({row["tokens"] for row in measured}):
            for product in sorted({row["product"] for row in measured if row["tokens"] == tokens}, reverse=True):
                own = [row for row in self.rows if (row["tokens"], row["product"]) == (tokens, product)]
                named = {row["config"]: row["us"] for row in own if not row["values"]}
                ours = sorted((row for row in own if row["values"]), key=lambda row: row["us"]) or own
                found.append(ours[0])
                beside = ", ".join(f"{name} {us:.1f}" for name, us in named.items())
                speeds = f"{ours[0]['terabytes']:5.2f} TB/s {ours[0]['teraflops']:6.1f} TFLOP/s"
                second = f"; then {ours[1]['config']} {ours[1]['us']:.1f}" if len(ours) > 1 else ""
                us, name = ours[0]["us"], ours[0]["config"]
                print(f"{product:7} T {tokens:5} {us:9.1f} us {speeds}  {name} ({beside}{second})")
        return found

    def ugly(self, rows: Sequence[dict[str, Any]]) -> None:
        """The configurations of rows on sizes that fit no tile, with biases."""
        tiny = self.layer.device.type == "cpu"
        model, size = (40, 24) if tiny else (1000, 712)
        shape = Shape(experts=5, top_k=3, model=model, size=size)
        layer = Layer(shape, self.layer.dtype, self.layer.device, bias=True)
        configs = {p: list(dict.fromkeys(r["choice"] for r in rows if r["product"] == p)) for p in PRODUCTS}
        cases = [Case(layer, tokens) for tokens in ((2,) if tiny else (1, 7, 150))]
        self.compile([(layer, cases[-1].calls[0], p, config) for p in PRODUCTS for config in configs[p]])
        checked = 0
        for case in cases:
            for product in PRODUCTS:
                for config in [*configs[product], "auto"]:
                    if time.monotonic() > self.until + 20.0:
                        continue
                    worst, reason = case.wrong(product, config)
                    checked += 1
                    if reason is not None:
                        self.right = False
                        self.say(f"ugly {product} T {case.tokens} {label(config)}: {reason}, error {worst:.1e}")
        self.say(f"{checked} checks on sizes that fit no tile")


def main() -> None:
    """Tunes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="time in all, compiling included")
    parser.add_argument("--tokens", help="numbers of tokens, the most telling first")
    for field, value in asdict(MIXTRAL).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=16, help="that compile")
    parser.add_argument("--output", type=Path, help="JSON with every row")
    parser.add_argument("--check", action="store_true", help="tiny shapes on the CPU, in the interpreter")
    args = parser.parse_args()
    if not args.check and not torch.cuda.is_available():
        print("tune_moe: no GPU is visible to torch; run this where nvidia-smi shows one", file=sys.stderr)
        sys.exit(7)
    if args.check and not triton.knobs.runtime.interpret:
        sys.exit("tune_moe: --check needs TRITON_INTERPRET=1")
    torch.manual_seed(0)
    device = torch.device("cpu") if args.check else torch.device("cuda", torch.cuda.current_device())
    shape = replace(MIXTRAL, **{field: getattr(args, field) for field in asdict(MIXTRAL)})
    layer = Layer(TINY if args.check else shape, torch.float32 if args.check else torch.bfloat16, device)
    name = "interpreter" if args.check else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {layer.shape}", flush=True)
    arrival_counters(device)
    tuner = Tuner(layer, args.seconds, args.threads)
    counts = args.tokens.split(",") if args.tokens else (1, 5) if args.check else TOKENS
    cases = [Case(layer, int(count)) for count in counts]
    tuner.compile([(layer, c.calls[0], p, config) for c in cases for p in PRODUCTS for config in c.candidates(p)])
    tuner.say("compiled")
    for case in cases:
        for product in PRODUCTS:
            tuner.measure(case, product)
        tuner.routing(case)
    tuner.ugly(tuner.best())
    if args.output:
        kept = [{key: value for key, value in row.items() if key != "choice"} for row in tuner.rows]
        result = {
            "device": name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "shape": asdict(layer.shape),
        }
        args.output.write_text(json.dumps({**result, "rows": kept}, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(not tuner.right))


if __name__ == "__main__":
    main()
