"""From what was measured to figures with their floors beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hookline.benchmark.experts import DistinctExperts
from hookline.benchmark.load_report import load_figures
from hookline.benchmark.measure import Latency, Steps, Throughput
from hookline.benchmark.open_loop import Serving
from hookline.benchmark.report import Figure
from hookline.benchmark.roofline import (
    PLAIN,
    Limits,
    ModelCosts,
    Speculation,
    decode_floor,
    prefill_floor,
    serial_decode_floor,
    workload_floor,
)
from hookline.benchmark.workload import Lengths
from hookline.config import SpeculativeConfig


def latency_figures(
    found: Latency,
    prompt: int,
    costs: ModelCosts,
    limits: Limits,
    steps: Steps | None = None,
    routing: str = "natural",
) -> list[Figure]:
    """TPOT, prefill and the rates that follow; a decode step's context is the prompt and half the output.

    `tpot_serial` is the same TPOT beside the floor of products and attention one after the other. With speculation the
    floors are those of a step divided by the tokens that a request gets in it.

    Args:
        steps: what was found of decode steps, with speculation.
    """
    context = prompt + found.output / 2
    speculation = PLAIN if steps is None else Speculation(steps.drafts, routing == "correlated")
    each = 1.0 if steps is None else 1 + steps.accepted
    step = decode_floor(costs, limits, found.batch, context, speculation)
    serial = serial_decode_floor(costs, limits, found.batch, context, speculation)
    first = prefill_floor(costs, limits, [prompt] * found.batch)
    tokens = found.batch * prompt
    figures = [
        Figure("prefill_batch", found.first, "s", first),
        Figure("prefill_rate", tokens / found.first, "tokens/s", first and tokens / first, is_rate=True),
    ]
    if found.output > 1:
        whole = None if first is None or step is None else first + step / each * (found.output - 1)
        figures += [
            Figure("tpot", 1e3 * found.tpot, "ms", step and 1e3 * step / each),
            Figure("tpot_serial", 1e3 * found.tpot, "ms", serial and 1e3 * serial / each),
            Figure("decode_rate", found.decode_rate, "tokens/s", step and found.batch * each / step, is_rate=True),
            Figure("total", found.whole, "s", whole),
        ]
    return figures


def step_figures(
    found: Steps, costs: ModelCosts, limits: Limits, experts: DistinctExperts | None, routing: str
) -> list[Figure]:
    """Decode steps in which every request runs: a step, its tokens, what it verifies and accepts, what a token takes.

    Drafts are those of one request.

    `step_counted` is the same step beside the floor with the distinct experts that were counted, in place of those that
    are expected.
    """
    expected = decode_floor(
        costs, limits, found.batch, found.context, Speculation(found.drafts, routing == "correlated")
    )
    figures = [
        Figure("step", 1e3 * found.seconds, "ms", expected and 1e3 * expected),
        Figure("step_tokens", found.tokens, "tokens"),
        Figure("step_drafts", found.drafts, "drafts"),
        Figure("step_accepted", found.accepted, "drafts"),
        Figure("step_tpot", 1e3 * found.tpot, "ms", expected and 1e3 * expected / (1 + found.accepted)),
    ]
    if experts is not None:
        counted = decode_floor(costs, limits, found.batch, found.context, experts.speculation(routing))
        figures.insert(1, Figure("step_counted", 1e3 * found.seconds, "ms", counted and 1e3 * counted))
    return figures


def expert_figures(experts: DistinctExperts | None) -> list[Figure]:
    """Distinct experts a layer, of the target and of the draft, where there are any."""
    if experts is None:
        return []
    figures = [Figure("distinct_experts", experts.mean, "a layer")]
    if experts.draft is not None:
        figures.append(Figure("draft_experts", experts.draft, "a pass"))
    return figures


def acceptance_note(speculative: SpeculativeConfig) -> str:
    """What a reader must know of the share of drafts that were accepted."""
    rate = speculative.synthetic_acceptance_rate
    if rate is not None:
        return f"Acceptance is pinned: {rate:.0%} of the drafts, whatever they are; the text makes no sense."
    return (
        "Acceptance is that of these prompts and weights, and says nothing of others: "
        "--synthetic-acceptance-rate pins it."
    )


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
    """The figures of a load, its times beside what one mean request alone would take."""
    prompt = round(statistics.fmean(length.prompt for length in work))
    context = statistics.fmean(length.prompt + length.output / 2 for length in work)
    return load_figures(found, prefill_floor(costs, limits, [prompt]), decode_floor(costs, limits, 1, context))
