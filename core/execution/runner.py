"""Runs a scheduled batch: tensors, forward pass, logits, sampling.

`Runner` does all of a step in `launch`. `DeviceRunner` (device_runner.py) answers to the same two verbs, and lets the
next step be launched before this one's result is collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hookline.batch_processor import BatchProcessor, PreparedBatch, PromptSpan
from hookline.execution.sampler import Sampler, token_logprobs
from hookline.execution.sampling_state import SamplingState
from hookline.execution.token_masks import make_masks
from hookline.model import CacheTensors, TransformerModel
from hookline.scheduling.output import SpeculativeStep, TokenLogprob
from hookline.scheduling.request import Request, ScheduledBatch

_LOGPROB_ROWS = 128


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, by request id.

    Attributes:
        token_ids: the new tokens of each part of the batch that samples, in the batch's order.
        logprobs: of requests that asked for them, for each new token.
        prompt_logprobs: of requests that asked for them: the first prompt token's place, and the entries from there.
        failed: requests whose logits were no numbers, or left no token to choose.
        speculative: where drafts are proposed, what became of them, for each of `token_ids`.
    """

    token_ids: list[list[int]]
    logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    failed: tuple[Request, ...] = ()
    speculative: Sequence[SpeculativeStep] = ()


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    Attributes:
        batch: what it computes.
        result: what it gave, where that is known; None while it is on its way.
    """

    batch: ScheduledBatch
    result: StepResult | None = None


class Runner:
    """One model and its cache.

    Args:
        model: with its weights.
        processor: makes the batch's tensors.
        cache: the memory of all cache groups.

    Attributes:
        max_in_flight: steps that may be launched and not collected.
        lookahead: places behind a request's tokens that a step may write to.
    """

    max_in_flight = 1
    lookahead = 0

    def __init__(
        self, model: TransformerModel, processor: BatchProcessor, cache: Mapping[str, Sequence[CacheTensors]]
    ) -> None:
        self.model = model
        self.processor = processor
        self.cache = cache
        self.sampler = Sampler(model.shapes.vocab_size, model.device)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        """One forward pass, and one token for each request whose known tokens are all computed then.

        Args:
            states: sampling state by request id.
        """
        return Flight(batch, self._run(self.processor.prepare(batch, self.cache), states))

    def collect(self, flight: Flight) -> StepResult:
        """What a step gave, once it is there; steps are collected in the order in which they were launched."""
        if flight.result is None:
            raise RuntimeError("the step was launched by another runner")
        return flight.result

    @property
    def steps_ahead(self) -> int:
        """How many steps may be in flight now, at most `max_in_flight`; 1 makes each wait for the host."""
        return self.max_in_flight

    def reserve(self, state: SamplingState) -> None:
        """Makes room for what a request's options need on the device, before it is put in line.

        Raises:
            NotEnoughMemoryError: if there is none.
        """

    def release(self, request: Request) -> None:
        """Takes note that a request has ended or lost its cache."""
        self.sampler.forget()

    def _run(self, prepared: PreparedBatch, states: Mapping[str, SamplingState]) -> StepResult:
        hidden = self.model.forward(prepared.forward)
        prompts = {
            span.request.request_id: (span.start + 1, self._prompt_logprobs(span, hidden))
            for span in prepared.prompt_spans
        }
        requests = prepared.sample_requests
        if not requests:
            return StepResult([], prompt_logprobs=prompts)
        rows = hidden if prepared.sample_rows is None else hidden.index_select(0, prepared.sample_rows)
        chosen = [states[request.request_id] for request in requests]
        for state, request in zip(chosen, requests, strict=True):
            state.follow(request.output_token_ids)
        logits = self.model.compute_logits(rows)
        limited = [(row, state.matcher, ()) for row, state in enumerate(chosen) if state.matcher is not None]
        masks = make_masks(limited, logits.shape[1], logits.device)
        result = self.sampler.sample(logits, chosen, masks)
        entries = result.logprobs or [None] * len(requests)
        return StepResult(
            token_ids=[[token] for token in result.token_ids],
            logprobs={r.request_id: [entry] for r, entry in zip(requests, entries, strict=True) if entry is not None},
            prompt_logprobs=prompts,
            failed=tuple(requests[row] for row in result.bad_rows),
        )

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits [len(batch.requests), V] of each request's last token, without sampling."""
        prepared = self.processor.prepare(batch, self.cache)
        return self.model.compute_logits(self.model.forward(prepared.forward))

    def _prompt_logprobs(self, span: PromptSpan, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Entries of prompt tokens `span.start + 1` and on."""
        found: list[TokenLogprob] = []
        for logits, targets in self._prompt_rows(span, hidden):
            found += token_logprobs(logits.float(), targets, span.request.params.prompt_logprobs or 0)
        return found

    def _prompt_rows(self, span: PromptSpan, hidden: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Logits of a span and the prompt tokens that follow each; a few rows at a time."""
        for offset in range(0, span.count, _LOGPROB_ROWS):
            count = min(_LOGPROB_ROWS, span.count - offset)
            first = span.start + offset + 1
            logits = self.model.compute_logits(hidden[span.row + offset : span.row + offset + count])
            yield logits, span.request.prompt_token_ids[first : first + count]
