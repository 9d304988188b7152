"""Closed measures: every request is there at the start, and the clock stops when the last one has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from hookline.benchmark.workload import Lengths, fixed_lengths, make_prompts
from hookline.errors import HooklineError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import RequestOutput, SpeculativeStep

Clock = Callable[[], float]
Say = Callable[[str], None]

# Steps of one timing, those that come before it when every request has its prefill behind it, and those in flight
# beyond it where a loop runs ahead of the host.
TIMED_STEPS = 32
SETTLING_STEPS = 4
SPARE_STEPS = 4


class Server(Protocol):
    """What is measured: the public surface of `Engine`, or something that behaves like it."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, prompt: list[int], params: SamplingParams, /, *, stream: bool = False) -> str: ...
    def step(self) -> list[RequestOutput]: ...
    def abort(self, request_id: str, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen in a benchmark: greedy, or drawn with a seed for each request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def params(self, max_tokens: int, number: int = 0) -> SamplingParams:
        """For one request, which ends at `max_tokens` and nowhere else."""
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=number,
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of requests that start together, in seconds, the best of the repeats.

    Attributes:
        first: for one token of each request: the prefill of the whole batch.
        whole: for all tokens of each.
        batch: requests.
        output: tokens of each.
    """

    first: float
    whole: float
    batch: int
    output: int

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first: what a decode step of the batch takes."""
        return (self.whole - self.first) / (self.output - 1)

    @property
    def decode_rate(self) -> float:
        """Decoded tokens a second, over all requests."""
        return self.batch / self.tpot


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps in which every request of a batch runs.

    Attributes:
        seconds: of a step, the best of the repeats.
        batch: requests.
        context: tokens of a request half way through the steps, the mean.
        drafts: that a step verifies of each request, the mean; 0 without speculation.
        accepted: how many of them it accepts, the mean.
    """

    seconds: float
    batch: int
    context: float
    drafts: float = 0.0
    accepted: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens a step, over all requests."""
        return self.batch * (1 + self.accepted)

    @property
    def tpot(self) -> float:
        """Seconds of a step for each of the tokens that a request gets in it."""
        return self.seconds / (1 + self.accepted)


@dataclass(frozen=True, slots=True)
class Throughput:
    """One run over many requests: seconds from the first to the last, and tokens that came in and out."""

    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def request_rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


def measure_latency(
    server: Server,
    vocab_size: int,
    batch: int,
    length: Lengths,
    repeats: int,
    choice: Choice,
    *,
    clock: Clock = time.perf_counter,
    say: Say = lambda text: None,
) -> Latency:
    """Runs the batch for one token and for `length.output` tokens in turn, after one run that does not count.

    Args:
        server: with prefix caching off, and room for the whole batch.
        vocab_size: prompts are drawn from so many token ids.
        say: is told each repeat's times.

    Raises:
        HooklineError: if a request ended early or with an error.
    """
    prompts = make_prompts(fixed_lengths(batch, length.prompt, length.output), vocab_size)
    run_all(server, prompts, [choice.params(min(3, length.output), n) for n in range(batch)], clock)
    firsts, wholes = [], []
    for number in range(repeats):
        firsts.append(run_all(server, prompts, [choice.params(1, n) for n in range(batch)], clock).seconds)
        wholes.append(run_all(server, prompts, [choice.params(length.output, n) for n in range(batch)], clock).seconds)
        say(f"repeat {number + 1} of {repeats}: first token {firsts[-1]:.4f} s, all tokens {wholes[-1]:.4f} s")
    return Latency(min(firsts), min(wholes), batch, length.output)


def settling_steps(batch: int, prompt: int, drafts: int, budget: int) -> int:
    """Steps after which every request decodes, where prefill chunks and decodes share `budget` tokens a step."""
    decoding = batch * (1 + drafts)
    return -(-batch * prompt // max(1, budget - decoding)) + 1 + SETTLING_STEPS


def measure_steps(
    server: Server,
    vocab_size: int,
    batch: int,
    prompt: int,
    repeats: int,
    choice: Choice,
    *,
    drafts: int,
    budget: int,
    room: int,
    clock: Clock = time.perf_counter,
) -> Steps:
    """Times decode steps of a batch that has its prefill behind it; its requests are aborted at the end.

    Args:
        server: with prefix caching off, and room for the whole batch.
        drafts: most that a step verifies of each request; 0 without speculation.
        budget: tokens of a step.
        room: most tokens of a request, prompt and output.

    Raises:
        HooklineError: if there is no room for a step, or a request did not run in each of them.
    """
    settling = settling_steps(batch, prompt, drafts, budget)
    fits = (room - prompt) // (1 + drafts) - settling - SPARE_STEPS
    steps = min(TIMED_STEPS, fits // repeats)
    if steps < 1:
        raise HooklineError(
            f"decode steps cannot be timed: of {room:,} tokens a prompt of {prompt:,} leaves room for "
            f"{max(0, fits)} of them, and {repeats} are needed",
            hint="Raise --max-model-len or --kv-cache-memory, or take shorter prompts.",
        )
    longest = (settling + repeats * steps + SPARE_STEPS) * (1 + drafts)
    prompts = make_prompts(fixed_lengths(batch, prompt, longest), vocab_size)
    ids = [server.add_request(each, choice.params(longest, number)) for number, each in enumerate(prompts)]
    done, times = list[RequestOutput](), list[float]()
    try:
        for _ in range(settling):
            done += server.step()
        for _ in range(repeats):
            start = clock()
            for _ in range(steps):
                done += server.step()
            times.append((clock() - start) / steps)
    finally:
        for request_id in ids:
            server.abort(request_id)
        while server.has_work:
            done += server.step()
    return _steps(done, min(times), batch, prompt, repeats * steps)


def _steps(done: Sequence[RequestOutput], seconds: float, batch: int, prompt: int, timed: int) -> Steps:
    """What the last `timed` steps of aborted requests verified and accepted."""
    records, contexts = list[SpeculativeStep](), list[float]()
    for output in done:
        (one,) = output.outputs
        every = one.speculative
        decoded = len(one.token_ids) - 1 if every is None else len(every) - 1  # but for the step of the first token
        if one.finish_reason != "abort" or decoded < timed:
            raise HooklineError(
                f"{output.request_id} was in {decoded} of {timed} decode steps: {output.error or one.finish_reason}",
                hint="The measure is void. Is max_model_len, the cache or the budget too small for the batch?",
            )
        own = (every or ())[-timed:]
        records += own
        contexts.append(prompt + len(one.token_ids) - (timed + sum(record.num_accepted for record in own)) / 2)
    if not records:
        return Steps(seconds, batch, fmean(contexts))
    drafts, accepted = (fmean(getattr(record, name) for record in records) for name in ("num_drafts", "num_accepted"))
    return Steps(seconds, batch, fmean(contexts), drafts, accepted)


def measure_prefill(
    server: Server,
    vocab_size: int,
    batch: int,
    prompt: int,
    repeats: int,
    *,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds to compute `batch` prompts and the first token of each; raises as `measure_latency`."""
    prompts = make_prompts(fixed_lengths(batch, prompt, 1), vocab_size)
    params = [Choice().params(1)] * batch
    return min(run_all(server, prompts, params, clock).seconds for _ in range(repeats + 1))


def measure_throughput(
    server: Server,
    vocab_size: int,
    work: Sequence[Lengths],
    choice: Choice,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Throughput:
    """Submits all of `work` at once. A few requests run first and do not count; raises as `measure_latency`."""
    prompts = make_prompts(work, vocab_size, seed)
    warm = [choice.params(min(4, length.output)) for length in work[:8]]
    run_all(server, prompts[:8], warm, clock)
    return run_all(server, prompts, [choice.params(one.output, n) for n, one in enumerate(work)], clock)


def run_all(server: Server, prompts: Sequence[list[int]], params: Sequence[SamplingParams], clock: Clock) -> Throughput:
    """Submits every prompt and steps until all have ended.

    Raises:
        HooklineError: if one of them ended early or with an error: a time without its work would be no result.
    """
    start = clock()
    wanted = {server.add_request(prompt, one): one.max_tokens for prompt, one in zip(prompts, params, strict=True)}
    done: list[RequestOutput] = []
    while len(done) < len(wanted) and server.has_work:
        done += [output for output in server.step() if output.finished]
    seconds = clock() - start
    for output in done:
        check_complete(output, wanted[output.request_id])
    if len(done) < len(wanted):
        raise HooklineError(f"{len(done)} of {len(wanted)} requests ended; the engine has no more work")
    return Throughput(
        seconds=seconds,
        requests=len(done),
        prompt_tokens=sum(output.usage.prompt_tokens for output in done),
        output_tokens=sum(output.usage.completion_tokens for output in done),
    )


def check_complete(output: RequestOutput, max_tokens: int | None) -> None:
    """Raises HooklineError unless a finished request has just as many tokens as it was to have."""
    found = output.usage.completion_tokens
    if output.error is not None or found != max_tokens:
        reason = output.error or ", ".join(str(one.finish_reason) for one in output.outputs)
        raise HooklineError(
            f"{output.request_id} ended with {found} of {max_tokens} tokens: {reason}",
            hint="The measure is void. Is max_model_len or the cache too small for prompt and output?",
        )
