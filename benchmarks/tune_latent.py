"""Checks and times the kernels of latent attention and of the indexer on this machine's GPU, at the shape of GLM-5.2.

    PYTHONPATH=src python benchmarks/tune_latent.py [--seconds 110] [--only listed|causal|index]
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/tune_latent.py --check

64 heads over latents of 512 + 64 values in bf16, 32 indexer heads of 128, the best 2,048 positions. Each configuration
is compared with the formula in fp32 and then timed inside a CUDA graph of calls, each on a part of the cache of its
own, so that the L2 cache holds nothing of the next one. A line each: microseconds a call, bytes of the entries that its
rows read (of the keys in its requests' contexts, for the indexer), TB/s, TFLOP/s, worst error. "auto" is what the
kernels choose by themselves. Then the best of each shape. `--check` runs all of it but the timing on the CPU in
Triton's interpreter with tiny shapes. Exit code 1 if a result is wrong, 7 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import triton

from hookline_kernels.indexer_triton import IndexConfig, IndexTopk, index_topk_triton
from hookline_kernels.latent_attention import latent_attention_reference
from hookline_kernels.latent_attention_triton import LatentAttention, LatentConfig, latent_attention_triton
from hookline_kernels.paged_rows import PagedRows, row_positions, slots_of

ROTATED = 2**28  # bytes of cache that the calls of a graph go through at least; the L2 cache is 60 MB
WORST, RMS = 1.6e-2, 2.4e-3  # errors allowed in bf16, as parts of the largest expected value
SLACK = 1e-4  # by which a chosen score may be below the worst of the best, as a part of the largest score
SHARE_OF_COMPILING = 0.5  # of the seconds that there are

LATENT = [LatentConfig(stages=n, programs=p) for n in (4, 3) for p in (1, 2)]
LATENT += [LatentConfig(block_n=64, stages=2, programs=p) for p in (1, 2)]
LATENT += [LatentConfig(block_n=16, stages=6), LatentConfig(least=2), LatentConfig(least=4)]
INDEX = [IndexConfig(lanes=n, warps=w, stages=s) for n, w, s in ((32, 4, 3), (64, 4, 3), (128, 8, 3), (128, 8, 4))]
INDEX += [IndexConfig(block_m=64, lanes=64, warps=4, stages=4), IndexConfig(programs=1), IndexConfig(programs=4)]
INDEX += [IndexConfig(chunk=2048, select_warps=8), IndexConfig(chunk=8192, select_warps=32)]
INDEX += [IndexConfig(chunk=4096, select_warps=32), IndexConfig(segment=8192)]
TINY_LATENT = [LatentConfig(16, 16), LatentConfig(32, 16, programs=4, least=2)]
TINY_INDEX = [IndexConfig(block_m=16, lanes=16, chunk=64), IndexConfig(block_m=16, lanes=32, chunk=32, segment=64)]

Config = Any  # of LatentConfig or of IndexConfig, as the case takes it; None leaves the choice to the kernels


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, and of the room that the calls allow for as a captured graph would."""

    heads: int = 64
    latent: int = 512
    rope: int = 64
    index_heads: int = 32
    index_size: int = 128
    top_k: int = 2048
    block_size: int = 64
    capacity: int = 32768
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


TINY = Sizes(5, 32, 16, 3, 16, 40, 8, 256, torch.float16, "cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests: `kind` is listed, causal or index."""

    kind: str
    requests: int
    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x {self.rows} on {self.context:,}"


_BATCHES = ((1, 1), (1, 4), (32, 1), (32, 4))
SHAPES = [Shape("listed", *batch, context) for context in (4096, 32768) for batch in _BATCHES]
SHAPES += [Shape("listed", *_BATCHES[1], 1024), Shape("listed", *_BATCHES[2], 1024), Shape("listed", 1, 1024, 4096)]
SHAPES += [Shape("causal", *batch, 4096) for batch in _BATCHES]
SHAPES += [Shape("causal", *_BATCHES[1], 1024), Shape("causal", *_BATCHES[2], 1024), Shape("causal", 1, 1024, 2048)]
SHAPES += [Shape("index", *batch, context) for context in (4096, 32768) for batch in _BATCHES]
SHAPES += [Shape("index", *_BATCHES[1], 1024), Shape("index", 1, 1024, 4096)]
TINY_SHAPES = [Shape(kind, *batch) for kind in ("listed", "causal", "index") for batch in ((1, 1, 70), (2, 3, 130))]


class Case:
    """The tensors of a shape: calls on parts of one cache, whose blocks lie in random order, and the right answer."""

    configs: list[Config]

    def __init__(self, shape: Shape, sizes: Sizes, width: int) -> None:
        self.shape, self.sizes = shape, sizes
        needed = -(-shape.context // sizes.block_size)
        one = shape.requests * needed
        self.copies = max(2, -(-ROTATED // (one * sizes.block_size * width * 2))) if sizes.device == "cuda" else 1
        blocks = self.copies * one
        self.cache = self.random(blocks, sizes.block_size, width)
        order = torch.randperm(blocks, device=sizes.device, dtype=torch.int32)
        self.rows = []
        for own in order.view(self.copies, shape.requests, needed):
            tables = torch.zeros(shape.requests, sizes.capacity // sizes.block_size).int().to(sizes.device)
            tables[:, :needed] = own
            starts = torch.arange(shape.requests + 1, device=sizes.device, dtype=torch.int32) * shape.rows
            lens = torch.full((shape.requests,), shape.context, device=sizes.device, dtype=torch.int32)
            self.rows.append(PagedRows(tables, starts, lens, shape.rows, sizes.capacity))

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.sizes.device).to(self.sizes.dtype)

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        return row_positions(self.rows[0], self.shape.requests * self.shape.rows)

    def run(self, copy: int, config: Config) -> None:
        raise NotImplementedError

    def error(self, config: Config) -> tuple[float, bool]:
        """The worst error, and whether it may be so."""
        raise NotImplementedError

    def work(self) -> tuple[float, float]:
        """Bytes and operations."""
        raise NotImplementedError


class LatentCase(Case):
    """Latent attention, with lists of top_k positions (all that a row sees where those are fewer) or causal."""

    def __init__(self, shape: Shape, sizes: Sizes) -> None:
        super().__init__(shape, sizes, sizes.latent + sizes.rope)
        self.configs = LATENT if sizes.device == "cuda" else TINY_LATENT
        tokens = shape.requests * shape.rows
        lists = None
        _, own = self.positions()
        self.seen = float((own + 1).sum())
        if shape.kind == "listed":
            scores = torch.rand(tokens, max(shape.context, sizes.top_k), device=sizes.device)
            scores[torch.arange(scores.shape[1], device=sizes.device) > own.unsqueeze(1)] = -1.0
            best = scores.topk(sizes.top_k)
            lists = best.indices.masked_fill_(best.values < 0.0, scores.shape[1]).sort().values.int()
            lists.masked_fill_(lists == scores.shape[1], -1)
            self.seen = float((lists >= 0).sum())
        self.calls = []
        for rows in self.rows:
            q = self.random(tokens, sizes.heads, sizes.latent + sizes.rope)
            out = q.new_empty(tokens, sizes.heads, sizes.latent)
            scale = (sizes.latent + sizes.rope) ** -0.5
            self.calls.append(LatentAttention(q, self.cache, rows, scale, lists, out))
        latent_attention_reference(self.calls[0])
        self.want = self.calls[0].out.float()

    def run(self, copy: int, config: LatentConfig | None) -> None:
        latent_attention_triton(self.calls[copy], config)

    def error(self, config: LatentConfig | None) -> tuple[float, bool]:
        self.calls[0].out.fill_(float("nan"))
        self.run(0, config)
        difference = (self.calls[0].out.float() - self.want).abs() / self.want.abs().max()
        worst, rms = float(difference.max()), float(difference.square().mean().sqrt())
        return worst, worst <= WORST and rms <= RMS

    def work(self) -> tuple[float, float]:
        size, rope = self.sizes.latent, self.sizes.rope
        return self.seen * (size + rope) * 2, self.seen * self.sizes.heads * 2 * (2 * size + rope)


class IndexCase(Case):
    """The indexer's choice."""

    def __init__(self, shape: Shape, sizes: Sizes) -> None:
        super().__init__(shape, sizes, sizes.index_size)
        self.configs = INDEX if sizes.device == "cuda" else TINY_INDEX
        tokens = shape.requests * shape.rows
        self.calls = []
        for rows in self.rows:
            q = self.random(tokens, sizes.index_heads, sizes.index_size)
            weights = torch.rand(tokens, sizes.index_heads, device=sizes.device) - 0.2
            out = torch.empty(tokens, sizes.top_k, device=sizes.device, dtype=torch.int32)
            self.calls.append(IndexTopk(q, weights, self.cache, rows, out))
        requests, own = self.positions()
        place = torch.arange(shape.context, device=sizes.device)
        flat, call = self.cache.flatten(0, 1), self.calls[0]
        scores = []
        for row in range(tokens):
            keys = flat[slots_of(self.rows[0], requests[row], place, sizes.block_size)].float()
            scores.append(call.weights[row] @ (call.q[row].float() @ keys.T).relu())
        hidden = place > own.unsqueeze(1)
        self.scores = torch.stack(scores).masked_fill(hidden, -torch.inf)
        self.best = self.scores.topk(min(sizes.top_k, shape.context)).values
        self.seen = float((own + 1).sum())

    def run(self, copy: int, config: IndexConfig | None) -> None:
        index_topk_triton(self.calls[copy], config)

    def error(self, config: IndexConfig | None) -> tuple[float, bool]:
        out = self.calls[0].out.fill_(-99)
        self.run(0, config)
        chosen = out[:, : self.best.shape[1]].long()
        real = self.best > -torch.inf
        rising = (chosen.diff() > 0) | ~real[:, 1:]
        sound = bool(((chosen >= 0) == real).all() and rising.all() and (out[:, self.best.shape[1] :] == -1).all())
        if not sound or int(chosen.max()) >= self.shape.context:
            return float("inf"), False
        scores = self.scores.gather(1, chosen.clamp(min=0)).masked_fill(~real, -torch.inf)
        difference = (scores.sort(descending=True).values - self.best).masked_fill(~real, 0.0).abs()
        worst = float((difference / self.best[real].abs().max()).max())
        return worst, worst <= SLACK

    def work(self) -> tuple[float, float]:
        sizes, shape = self.sizes, self.shape
        keys = float(shape.requests * shape.context) if shape.context > sizes.top_k else 0.0
        operations = self.seen * sizes.index_heads * sizes.index_size * 2 if keys else 0.0
        return keys * sizes.index_size * 2, operations


def seconds(case: Case, config: Config) -> float:
    """Median over replays of a graph of all calls, in seconds a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(case.copies):
            case.run(copy, config)
    times = []
    until = time.monotonic() + 0.05
    for replay in range(50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / 1e3 / case.copies)
        if len(times) >= 5 and time.monotonic() > until:
            break
    return float(median(times))


def label(config: Config) -> str:
    """What differs from the default configuration."""
    if config is None:
        return "auto"
    plain = asdict(type(config)())
    return " ".join(f"{name} {value}" for name, value in asdict(config).items() if value != plain[name]) or "plain"


def compiled(case: Case, until: float) -> Iterator[tuple[Config, str | None]]:
    """A case's configurations, and why one cannot be used; all are compiled side by side first."""
    configs: list[Config] = [None, *case.configs]
    if case.sizes.device != "cuda":
        yield from ((config, None) for config in configs)
        return
    with ThreadPoolExecutor(max_workers=12) as pool:
        jobs = [(config, pool.submit(case.run, case.copies - 1, config)) for config in configs]
        wait([job for _, job in jobs], timeout=max(0.0, until - time.monotonic()))
        pool.shutdown(cancel_futures=True)
        torch.cuda.synchronize()
    for config, job in jobs:
        error = "not compiled in time" if job.cancelled() else job.exception()
        yield config, None if error is None else str(error).splitlines()[0]


def tune(shapes: list[Shape], sizes: Sizes, allowed: float, say: Callable[[str], None]) -> bool:
    """Prints all lines; whether all that ran were right."""
    begin, right = time.monotonic(), True
    best: dict[str, tuple[float, str]] = {}
    for number, shape in enumerate(shapes):
        case: LatentCase | IndexCase = (IndexCase if shape.kind == "index" else LatentCase)(shape, sizes)
        # What a shape leaves of its share is for those after it.
        until = begin + allowed * (number + SHARE_OF_COMPILING) / len(shapes) + 10.0
        for config, problem in compiled(case, until):
            line = f"{shape!s:<27} {label(config):<28}"
            if problem is not None or time.monotonic() > begin + allowed:
                say(f"{line} {problem or 'no time left'}")
                continue
            worst, good = case.error(config)
            right &= good
            remark = f"error {worst:.1e}{'' if good else '  WRONG'}"
            if sizes.device != "cuda":
                say(f"{line} {remark}")
                continue
            taken = seconds(case, config)
            read, operations = case.work()
            rates = f"{read / 1e6:7.1f} MB {read / taken / 1e12:5.2f} TB/s {operations / taken / 1e12:6.1f} TFLOP/s"
            say(f"{line} {taken * 1e6:8.2f} us {rates}  {remark}")
            if good and taken < best.get(str(shape), (float("inf"), ""))[0]:
                best[str(shape)] = taken, f"{line} {taken * 1e6:8.2f} us {rates}"
    say("\nbest of each shape")
    for _, line in best.values():
        say(line)
    return right


def main() -> None:
    """Tunes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="time in all, compiling included")
    parser.add_argument("--only", choices=("listed", "causal", "index"))
    parser.add_argument("--check", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    arguments = parser.parse_args()
    if not arguments.check and not torch.cuda.is_available():
        print("tune_latent: no GPU is visible to torch; run this where nvidia-smi shows one", file=sys.stderr)
        sys.exit(7)
    name = "Triton's interpreter" if arguments.check else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    torch.manual_seed(0)
    shapes = [shape for shape in (TINY_SHAPES if arguments.check else SHAPES) if arguments.only in (None, shape.kind)]
    sizes = TINY if arguments.check else Sizes()
    sys.exit(int(not tune(shapes, sizes, arguments.seconds, lambda line: print(line, flush=True))))


if __name__ == "__main__":
    main()
