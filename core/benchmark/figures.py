"""From what was measured to figures with their floors beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hookline.benchmark.measure import Latency, Throughput
from hookline.benchmark.open_loop import Serving, percentile
from hookline.benchmark.report import Figure
from hookline.benchmark.roofline import (
    Limits,
    ModelCosts,
    decode_floor,
    prefill_floor,
    serial_decode_floor,
    workload_floor,
)
from hookline.benchmark.workload import Lengths


def latency_figures(found: Latency, prompt: int, costs: ModelCosts, limits: Limits) -> list[Figure]:
    """TPOT, prefill and the rates that follow; a decode step's context is the prompt and half the output.

    `tpot_serial` is the same TPOT beside the floor of products and attention one after the other.
    """
    context = prompt + found.output / 2
    step = decode_floor(costs, limits, found.batch, context)
    serial = serial_decode_floor(costs, limits, found.batch, context)
    first = prefill_floor(costs, limits, [prompt] * found.batch)
    tokens = found.batch * prompt
    figures = [
        Figure("prefill_batch", found.first, "s", first),
        Figure("prefill_rate", tokens / found.first, "tokens/s", first and tokens / first, is_rate=True),
    ]
    if found.output > 1:
        whole = None if first is None or step is None else first + step * (found.output - 1)
        figures += [
            Figure("tpot", 1e3 * found.tpot, "ms", step and 1e3 * step),
            Figure("tpot_serial", 1e3 * found.tpot, "ms", serial and 1e3 * serial),
            Figure("decode_rate", found.decode_rate, "tokens/s", step and found.batch / step, is_rate=True),
            Figure("total", found.whole, "s", whole),
        ]
    return figures


def concurrent_requests(work: Sequence[Lengths], max_running: int, cache_tokens: int) -> int:
    """How many requests of `work` run at a time, with half of each one's output in a cache of so many tokens."""
    mean = statistics.fmean(length.prompt + length.output / 2 for length in work)
    return max(1, min(len(work), max_running, int(cache_tokens / mean)))


def throughput_figures(
    found: Throughput, work: Sequence[Lengths], batch: int, costs: ModelCosts, limits: Limits
) -> list[Figure]:
    """Output tokens and requests a second, and the whole time; `batch` requests run at a time."""
    floor = workload_floor(costs, limits, work, batch)
    rates = [
        ("output_rate", found.output_rate, "tokens/s", found.output_tokens),
        ("request_rate", found.request_rate, "requests/s", found.requests),
        ("total_rate", (found.prompt_tokens + found.output_tokens) / found.seconds, "tokens/s", None),
    ]
    total = found.prompt_tokens + found.output_tokens
    return [
        Figure("total", found.seconds, "s", floor),
        *(
            Figure(name, value, unit, floor and (total if count is None else count) / floor, is_rate=True)
            for name, value, unit, count in rates
        ),
    ]


def serving_figures(found: Serving, work: Sequence[Lengths], costs: ModelCosts, limits: Limits) -> list[Figure]:
    """Times to the first token and between tokens, beside what one mean request alone would take; and goodput."""
    prompt = round(statistics.fmean(length.prompt for length in work))
    context = statistics.fmean(length.prompt + length.output / 2 for length in work)
    alone, step = prefill_floor(costs, limits, [prompt]), decode_floor(costs, limits, 1, context)
    figures = [
        Figure(f"ttft_p{share}", 1e3 * percentile(found.ttfts, share / 100), "ms", alone and 1e3 * alone)
        for share in (50, 99)
    ]
    if found.gaps:
        figures += [
            Figure(f"itl_p{share}", 1e3 * percentile(found.gaps, share / 100), "ms", step and 1e3 * step)
            for share in (50, 99)
        ]
    good = 100 * found.good / len(found.ttfts)
    return [
        *figures,
        Figure("output_rate", found.output_tokens / found.seconds, "tokens/s"),
        Figure("request_rate", len(found.ttfts) / found.seconds, "requests/s"),
        Figure("goodput", found.goodput, "requests/s"),
        Figure("good_requests", good, "%"),
    ]
