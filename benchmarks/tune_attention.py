"""Which configuration of the Triton attention kernels is fastest on this GPU, for the shapes of an 8B Llama?

    PYTHONPATH=src python benchmarks/tune_attention.py [--seconds 300] [--only decode|prefill]

Checks each configuration against the reference in fp32, then times it inside a CUDA graph of many calls, each on a part
of the cache of its own, so that the L2 cache holds nothing of the next one. Prints a line each as it goes (median time
a call, bytes of keys and values or floating-point operations, rate, worst error) and each shape's best at the end.
Exit code 1 if a configuration is wrong, 7 without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
import triton

from hookline_kernels.attention_decode import attention_decode, attention_decode_reference
from hookline_kernels.attention_decode_triton import DecodeConfig, attention_decode_triton
from hookline_kernels.attention_prefill import attention_prefill_reference
from hookline_kernels.attention_prefill_triton import PrefillConfig, attention_prefill_triton
from hookline_kernels.paged_context import PagedAttention

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, DTYPE = 32, 8, 128, 16, torch.bfloat16
CAPACITY = 32768  # the longest context that the decode calls allow for, as a captured graph would
ROTATED = 2**28  # bytes of cache that the calls of a graph go through at least; the L2 cache is 60 MB
SHARE_OF_COMPILING = 0.6  # of the seconds that there are
WORST, RMS = 1.6e-2, 2.4e-3  # errors allowed in bf16, as parts of the largest expected value

_TILES = [(64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (32, 4, 6), (32, 2, 4), (16, 1, 6), (64, 8, 3), (128, 4, 2)]
_TILES += [(128, 8, 2), (128, 8, 3)]
DECODE = [DecodeConfig(*tile) for tile in _TILES]
DECODE += [DecodeConfig(*tile, fused=False) for tile in _TILES]
DECODE += [DecodeConfig(programs=n) for n in (1, 3, 4, 8)] + [DecodeConfig(least=n) for n in (2, 4)]
DECODE += [DecodeConfig(128, 8, 2, programs=1), DecodeConfig(32, 4, 4, programs=4)]

PREFILL = [PrefillConfig(*tile) for tile in ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3))]
PREFILL += [PrefillConfig(*tile) for tile in ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (64, 128, 4, 2))]
PREFILL += [PrefillConfig(128, 64, 8, 2, registers=128), PrefillConfig(128, 32, 8, 3, registers=128)]
PREFILL += [replace(config, packed=True) for config in PREFILL[:6]]

Config = DecodeConfig | PrefillConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: each request's rows and context. One row each is a decode."""

    name: str
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def decode(self) -> bool:
        return max(self.rows) == 1

    @property
    def work(self) -> float:
        """Bytes of keys and values that a decode reads; operations of a prefill, of positions that are seen only."""
        if self.decode:
            return float(sum(self.contexts) * KV_HEADS * SIZE * 2 * DTYPE.itemsize)
        seen = sum(n * c - n * (n - 1) // 2 for n, c in zip(self.rows, self.contexts, strict=True))
        return 4.0 * seen * HEADS * SIZE


def _decodes(name: str, *contexts: int) -> Shape:
    return Shape(name, (1,) * len(contexts), contexts)


# Three quarters of them short, a few long, in no order: 128 requests of about 1,200 tokens on average.
_MIXED = tuple(8192 if i % 32 == 17 else 2048 if i % 4 == 1 else 200 + 37 * i % 900 for i in range(128))
SHAPES = [_decodes(f"decode {n} x 1,088", *[1088] * n) for n in (1, 32, 128, 256)]
SHAPES += [_decodes("decode 1 x 8,256", 8256), _decodes("decode mixed", *_MIXED)]
SHAPES += [Shape("prefill 1 x 8,192", (8192,), (8192,)), Shape("prefill 32 x 1,024", (1024,) * 32, (1024,) * 32)]
SHAPES += [Shape("prefill 512 on 7,680", (512,), (8192,))]


def label(config: Config) -> str:
    if isinstance(config, DecodeConfig):
        ways = f"p{config.programs} l{config.least} {'fused' if config.fused else 'two'}"
        return f"n{config.block_n} w{config.warps} s{config.stages} {ways}"
    ways = f"{' packed' if config.packed else ''}{f' r{config.registers}' if config.registers else ''}"
    return f"m{config.block_m} n{config.block_n} w{config.warps} s{config.stages}{ways}"


class Case:
    """The tensors of a shape: calls on parts of one cache, whose blocks lie in random order, and the right answer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        needed = [-(-context // BLOCK_SIZE) for context in shape.contexts]
        copies = max(2, -(-ROTATED // (sum(needed) * BLOCK_SIZE * KV_HEADS * SIZE * 2 * DTYPE.itemsize)))
        cache = torch.randn(2, copies * sum(needed), BLOCK_SIZE, KV_HEADS, SIZE, device="cuda", dtype=DTYPE)
        order = torch.randperm(copies * sum(needed), device="cuda", dtype=torch.int32).split(needed * copies)
        self.query_starts = torch.tensor([0, *shape.rows], device="cuda").cumsum(0).int()
        lens = torch.tensor(shape.contexts, device="cuda", dtype=torch.int32)
        counters = torch.zeros(len(needed) * KV_HEADS, device="cuda", dtype=torch.int32)
        self.calls = []
        for copy in range(copies):
            tables = torch.zeros(len(needed), CAPACITY // BLOCK_SIZE, device="cuda", dtype=torch.int32)
            for request, count in enumerate(needed):
                tables[request, :count] = order[copy * len(needed) + request]
            q = torch.randn(sum(shape.rows), HEADS, SIZE, device="cuda", dtype=DTYPE)
            numbers = (SIZE**-0.5, None, None, CAPACITY, torch.empty_like(q))
            self.calls.append(PagedAttention(q, cache[0], cache[1], tables, lens, *numbers, counters))
        self.run(self.calls[0], None)
        self.want = self.calls[0].out.float()

    def run(self, call: PagedAttention, config: Config | None) -> None:
        """One call by the kernel, or by the reference without a configuration."""
        if isinstance(config, DecodeConfig):
            attention_decode_triton(call, config)
        elif isinstance(config, PrefillConfig):
            attention_prefill_triton(call, self.query_starts, max(self.shape.rows), config)
        elif self.shape.decode:
            attention_decode_reference(call)
        else:
            attention_prefill_reference(call, self.query_starts, max(self.shape.rows))

    def error(self, config: Config) -> tuple[float, bool]:
        """The worst error, and whether it and the RMS error may be so."""
        call = self.calls[0]
        call.out.fill_(float("nan"))
        self.run(call, config)
        difference = (call.out.float() - self.want).abs() / self.want.abs().max()
        worst, rms = float(difference.max()), float(difference.square().mean().sqrt())
        counters = call.counters
        return worst, worst <= WORST and rms <= RMS and (counters is None or not bool(counters.any()))

    def seconds(self, config: Config) -> float:
        """Median over replays of a graph of all calls, in seconds a call."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in self.calls:
                self.run(call, config)
        times = []
        until = time.monotonic() + 0.1
        for replay in range(100):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(begin.elapsed_time(end) / 1e3 / len(self.calls))
            if len(times) >= 5 and time.monotonic() > until:
                break
        return float(statistics.median(times))


def compile_all(cases: list[Case], seconds: float) -> Iterator[tuple[Case, list[tuple[Config, str | None]]]]:
    """Each case with its configurations and, where one cannot be used, why; all are compiled side by side first."""

    def once(case: Case, config: Config) -> None:
        # Outputs and counters of its own: all of these run at the same time.
        call = case.calls[-1]
        counters = None if call.counters is None else torch.zeros_like(call.counters)
        case.run(call._replace(out=torch.empty_like(call.out), counters=counters), config)

    with ThreadPoolExecutor(max_workers=16) as pool:
        jobs: dict[tuple[int, Config], Future[None]] = {}
        for number, case in enumerate(cases):
            for config in DECODE if case.shape.decode else PREFILL:
                jobs[number, config] = pool.submit(once, case, config)
        wait(jobs.values(), timeout=seconds)
        pool.shutdown(cancel_futures=True)
        torch.cuda.synchronize()
        for number, case in enumerate(cases):
            found: list[tuple[Config, str | None]] = []
            for (owner, config), job in jobs.items():
                if owner == number:
                    error = "not compiled in time" if job.cancelled() else job.exception()
                    found.append((config, None if error is None else str(error).splitlines()[0]))
            yield case, found


def host_cost(call: PagedAttention) -> float:
    """Seconds that the host needs for a call of `attention_decode` which is not captured."""
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        attention_decode(*call[:6], max_context_len=call.max_context_len, out=call.out, counters=call.counters)
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return statistics.median(times)


def tune(cases: list[Case], seconds: float, say: Callable[[str], None]) -> bool:
    """Prints all lines; whether all that ran were right."""
    until = time.monotonic() + seconds
    best: dict[str, tuple[float, str]] = {}
    right = True
    for case, configs in compile_all(cases, seconds * SHARE_OF_COMPILING):
        shape = case.shape
        unit, scale = ("TB/s", 1e12) if shape.decode else ("TFLOP/s", 1e12)
        for config, problem in configs:
            line = f"{shape.name:<21} {label(config):<26}"
            if problem is not None or time.monotonic() > until:
                say(f"{line} {problem or 'no time left'}")
                continue
            worst, good = case.error(config)
            taken = case.seconds(config)
            amount = f"{shape.work / 1e6:8.1f} MB" if shape.decode else f"{shape.work / 1e9:8.1f} GFLOP"
            result = f"{taken * 1e6:9.2f} us {amount} {shape.work / taken / scale:7.2f} {unit}"
            say(f"{line} {result}  error {worst:.1e}{'' if good else '  WRONG'}")
            right &= good
            if good and taken < best.get(shape.name, (float("inf"), ""))[0]:
                best[shape.name] = taken, f"{line} {result}"
    say("\nbest of each shape")
    for _, line in best.values():
        say(line)
    return right


def main() -> None:
    """Tunes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="time in all, compiling included")
    parser.add_argument("--only", choices=("decode", "prefill"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_attention: no GPU is visible to torch; run this where nvidia-smi shows one", file=sys.stderr)
        sys.exit(7)
    begin = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    torch.manual_seed(0)
    cases = [Case(shape) for shape in SHAPES if arguments.only in (None, "decode" if shape.decode else "prefill")]
    right = tune(cases, arguments.seconds - (time.monotonic() - begin), lambda line: print(line, flush=True))
    for case in cases:
        if case.shape.name == "decode 32 x 1,088":
            print(f"host, a call of attention_decode without a graph: {host_cost(case.calls[0]) * 1e6:.1f} us")
    sys.exit(int(not right))


if __name__ == "__main__":
    main()
