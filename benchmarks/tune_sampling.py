"""Checks and times the choice of tokens and the fused rotary and cache write on this machine's GPU.

    python benchmarks/tune_sampling.py --seconds 120 [--chunks] [--profile]

First the checks, a line each: share of tokens that are the reference's, and the largest error of logprobs. Greedy
tokens must all be; a drawn one may be another with a chance of 1e-7, exp's error, over the probability of a token: a
percent where all of the vocabulary is equally likely, nothing in rows like a model's. Then the times, a line each:
median microseconds of a call in a CUDA graph, the bytes that it must at least move, and TB/s of those. Logits of few
rows stay in the GPU's cache between calls, as they do after a model's last product. `--chunks` times all sizes of
chunks, `--profile` each launch by itself. Exit code 1 if a check fails, or without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from hookline_kernels.cache_write import cache_write
from hookline_kernels.decode_inputs import SamplingOptions
from hookline_kernels.rotary import apply_rotary, rotary_cos_sin
from hookline_kernels.rotary_cache import rotary_cache_write
from hookline_kernels.sampling import sample
from hookline_kernels.sampling_triton import sample_triton

VOCAB = 128256
ROWS = (256, 1, 32, 8, 128)  # the most telling first
TOKENS = (1, 32, 256, 8192)
HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 32, 8, 128, 16
CHUNKS = (1024, 2048, 4096, 8192)
OPTIONS: dict[str, dict[str, float]] = {
    "greedy": {},
    "t 0.8": {"temperature": 0.8},
    "t 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "t 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
    "t 0.8, top-k 50, top-p 0.95, min-p 0.05": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
}
# Standard deviations of the logits: flat ones, of which top-p keeps most of the vocabulary, and ones like a model's.
SPREADS = {"flat": 1.0, "peaked": 4.0}


def options_of(
    rows: int, temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0, top_k: float = 0
) -> SamplingOptions:
    """The same options for all rows, and keys of their own."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SamplingOptions(
        temperature=column(temperature, torch.float32),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float32),
        top_k=column(top_k, torch.int32),
        num_outputs=torch.arange(rows, dtype=torch.int32, device="cuda"),
        keys=torch.randint(-(2**62), 2**62, (rows,), device="cuda"),
    )


def microseconds(call: Callable[[], object], calls: int = 20, repeats: int = 15) -> float:
    """Median time of a call, many of which are captured in one graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def line(name: str, size: str, us: float, moved: int) -> str:
    """One row of the table."""
    return f"{name:<62} {size:<8} {us:9.1f} us {moved / 1e6:9.2f} MB {moved / us / 1e6:6.2f} TB/s"


def check_sampling() -> Iterator[tuple[str, bool]]:
    """Each set of options, on flat and peaked rows in fp32 and bf16, against the reference."""
    for dtype in (torch.float32, torch.bfloat16):
        for spread, scale in SPREADS.items():
            logits = (torch.randn(96, VOCAB, device="cuda") * scale).to(dtype)
            for name, chosen in OPTIONS.items():
                options = options_of(96, **chosen)
                found = sample(logits, options, logprobs=True, implementation="triton")
                wanted = sample(logits, options, logprobs=True, implementation="reference")
                share = float((found.token_ids == wanted.token_ids).float().mean())
                if found.logprobs is None or wanted.logprobs is None:
                    raise RuntimeError("logprobs were asked for")
                same = found.token_ids == wanted.token_ids
                error = float((found.logprobs - wanted.logprobs)[same].abs().max()) if bool(same.any()) else 9.0
                good = share == 1.0 if name == "greedy" else share > 0.9
                text = f"check {name}, {spread}, {dtype}: {share:.4f} of the tokens, logprobs within {error:.1e}"
                yield text, good and error < 1e-4 and not bool(found.bad.any())


def check_split() -> Iterator[tuple[str, bool]]:
    """Tokens for all sizes of chunks and lists, which must be the same; a level row; a row of NaN."""
    logits = torch.randn(8, VOCAB, device="cuda").bfloat16().float()
    logits[3] = 0.5
    logits[5, 1000] = torch.nan
    for name, chosen in OPTIONS.items():
        options, found = options_of(8, **chosen), []
        for chunk in CHUNKS:
            for capacity in (8192, 64):
                token_ids = torch.empty(8, dtype=torch.int64, device="cuda")
                bad = torch.empty(8, dtype=torch.int32, device="cuda")
                sample_triton(logits, options, logits, token_ids, bad, None, False, capacity=capacity, chunk=chunk)
                found.append(token_ids.tolist())
        good = all(tokens == found[0] for tokens in found) and found[0][5] == -1
        yield f"check {name}: the same tokens for all chunks and lists", good


def time_sampling(all_chunks: bool) -> Iterator[str]:
    """Greedy with and without the promise, and the other options, by rows."""
    for rows in ROWS:
        for spread, scale in SPREADS.items():
            logits = torch.randn(rows, VOCAB, device="cuda") * scale
            for name, chosen in OPTIONS.items():
                options = options_of(rows, **chosen)
                passes = 5 if "top" in name else 1 if name == "greedy" else 2
                moved = passes * logits.numel() * 4
                if name == "greedy":
                    if spread != "flat":
                        continue
                    us = microseconds(partial(sample, logits, options, greedy=True, implementation="triton"))
                    yield line("sample, greedy by promise", f"R {rows}", us, moved)
                us = microseconds(partial(sample, logits, options, implementation="triton"))
                yield line(f"sample, {name}, {spread}", f"R {rows}", us, moved)
                for chunk in CHUNKS if all_chunks else ():
                    us = microseconds(chunked(logits, options, chunk))
                    yield line(f"  in chunks of {chunk}", f"R {rows}", us, moved)


def chunked(logits: torch.Tensor, options: SamplingOptions, chunk: int) -> Callable[[], None]:
    """A call with chunks of that size."""
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device="cuda")
    bad = torch.empty(logits.shape[0], dtype=torch.int32, device="cuda")
    return lambda: sample_triton(logits, options, logits, token_ids, bad, None, False, chunk=chunk)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rotary_inputs(tokens: int) -> Tensors:
    """A projection, cos and sin, caches and scattered slots, of bf16."""
    blocks = -(-tokens // BLOCK_SIZE) + 64
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, SIZE, device="cuda").bfloat16()
    inv_freq = 10000.0 ** (-torch.arange(0, SIZE, 2, device="cuda") / SIZE)
    cos, sin = rotary_cos_sin(torch.arange(tokens, device="cuda"), inv_freq)
    caches = torch.zeros(2, blocks, BLOCK_SIZE, KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    return qkv, cos, sin, caches[0], caches[1], torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens]


def one_operation(inputs: Tensors) -> torch.Tensor:
    """The fused one."""
    return rotary_cache_write(*inputs, HEADS)


def two_operations(inputs: Tensors) -> None:
    """What it replaces."""
    qkv, cos, sin, k_cache, v_cache, slots = inputs
    q, k, v = qkv.tensor_split((HEADS, HEADS + KV_HEADS), dim=1)
    apply_rotary(q, k, cos, sin)
    cache_write((k, v), (k_cache, v_cache), slots)


def check_and_time_rotary() -> Iterator[tuple[str, bool]]:
    """The fused operation against the two, by tokens."""
    for tokens in TOKENS:
        inputs = rotary_inputs(tokens)
        qkv, cos, sin, k_cache, v_cache, slots = inputs
        other = (qkv.clone(), cos, sin, k_cache.clone(), v_cache.clone(), slots)
        one_operation(inputs)
        two_operations(other)
        pairs = ((qkv[:, :HEADS], other[0][:, :HEADS]), (k_cache, other[3]), (v_cache, other[4]))
        worst = max(float((one.float() - two.float()).abs().max()) for one, two in pairs)
        yield f"check rotary_cache_write, T {tokens}: within {worst:.1e} of the two operations", worst < 0.04
        moved = tokens * (2 * (HEADS + 2 * KV_HEADS) * SIZE * 2 + SIZE * 4 + 8)
        for name, call in (
            ("rotary_cache_write", one_operation),
            ("  apply_rotary and cache_write", two_operations),
        ):
            yield line(name, f"T {tokens}", microseconds(partial(call, inputs)), moved), True


def profile() -> None:
    """Microseconds of each launch at 256 rows."""
    logits = torch.randn(256, VOCAB, device="cuda")
    options = options_of(256, temperature=0.8, top_p=0.95)
    for _ in range(3):
        sample(logits, options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            sample(logits, options)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=40))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after the line that passes this time")
    parser.add_argument("--chunks", action="store_true", help="time all sizes of chunks")
    parser.add_argument("--profile", action="store_true", help="time each launch at 256 rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_sampling: this needs a CUDA device, and torch sees none")
    torch.manual_seed(0)
    end, failed = time.monotonic() + args.seconds, 0

    def lines() -> Iterator[tuple[str, bool]]:
        yield from check_and_time_rotary()
        yield from check_split()
        yield from check_sampling()
        yield from ((text, True) for text in time_sampling(args.chunks))

    if args.profile:
        profile()
    for text, good in lines():
        failed += not good
        print(text if good else f"{text}  FAILED", flush=True)
        if time.monotonic() > end:
            print(f"stopped: {args.seconds:g} seconds are over")
            break
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
