"""The runner of models with a draft of their own that waits for nothing inside a step.

Requests that decode run as one `UnifiedStep`; chunks of prefill run beside it as a pass of their own, which leaves each
request that has come to its first token with drafts, so that the next step finds all requests alike.

What a request's tokens depend on beside the device's own numbers is the host's to do. Masks have to see each token
first: while a request has some, steps wait for one another, and the same step reads the masks of its rows. While there
is one with edits of logits or log probabilities of several tokens, steps take turns with the host, as
`SpeculativeRunner` runs them, and the slots take note of what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hookline.batch_processor import BatchProcessor, block_tables, upload
from hookline.config import SpeculativeConfig
from hookline.execution.device_logprobs import LogprobsOnTheWay
from hookline.execution.device_runner import DeviceRunner, Prompts, arrival, named_logprobs, prompt_entries
from hookline.execution.draft_batch import DraftDeviceBatch
from hookline.execution.runner import Flight, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.execution.speculative import shift
from hookline.execution.speculative_runner import SpeculativeRunner, hidden_states
from hookline.execution.token_masks import TokenMatcher, make_masks
from hookline.execution.unified_step import UnifiedStep
from hookline.model import CacheTensors, DraftBatch, TransformerModel
from hookline.scheduling.output import SpeculativeStep
from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What a pass over chunks has on its way to the host.

    Attributes:
        requests: those that got their first token.
        answer: [len(requests), 2K + 2], as a `UnifiedStep` gives it.
        reported: which of `requests` want log probabilities.
        logprobs: of those.
        prompts: log probabilities of prompts.
    """

    requests: tuple[Request, ...] = ()
    answer: torch.Tensor | None = None
    reported: Sequence[int] = ()
    logprobs: LogprobsOnTheWay | None = None
    prompts: Prompts = ()


@dataclass(frozen=True, slots=True)
class _UnifiedFlight(Flight):
    """A step whose answer is on its way.

    Attributes:
        requests: those that get tokens, decodes first.
        values: [len(requests), 2K + 2], see `UnifiedStep`.
        arrived: when all of it has come; None on a CPU.
        prefill: what chunks gave; its requests are the last of `requests`.
    """

    requests: tuple[Request, ...] = ()
    values: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None
    prefill: _Prefill = _Prefill()


class UnifiedRunner(DeviceRunner):
    """Runs speculative steps ahead of their results.

    Args:
        step: with its slots.
        config: how drafts are accepted.
    """

    batch: DraftDeviceBatch
    decode: UnifiedStep

    def __init__(
        self,
        model: TransformerModel,
        processor: BatchProcessor,
        cache: Mapping[str, Sequence[CacheTensors]],
        step: UnifiedStep,
        config: SpeculativeConfig,
    ) -> None:
        self.num_drafts = self.lookahead = step.num_drafts
        super().__init__(model, processor, cache, step)
        self.proposer = step.proposer
        self._host = SpeculativeRunner(model, processor, cache, config)
        self._takers_of_turns: set[Request] = set()

    def _answer_shape(self, max_running: int) -> tuple[int, ...]:
        return (max_running, 2 * self.num_drafts + 2)

    @property
    def steps_ahead(self) -> int:
        return 1 if self._takers_of_turns else super().steps_ahead

    def release(self, request: Request) -> None:
        super().release(request)
        self._host.release(request)
        self._takers_of_turns.discard(request)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        decodes, chunks = list[ScheduledRequest](), list[ScheduledRequest]()
        for part in batch.requests:
            (decodes if self.batch.holds(part.request) else chunks).append(part)
        # A chunk with drafts is one of a request whose slot was lost to an interrupt.
        if self._takers_of_turns or any(part.drafts for part in chunks):
            return self._launch_in_turn(batch, states)
        self._answers.rotate()
        values, count = self._answers[0], len(decodes)
        if decodes:
            self._limit(decodes)
            (answer,) = self.decode.run(self.batch.rows(decodes, self.decode.size_for(count)))
            values[:count].copy_(answer[:count], non_blocking=True)
        prefill = self._prefill(chunks, states) if chunks else _Prefill()
        requests = (*(part.request for part in decodes), *prefill.requests)
        if prefill.answer is not None:
            values[count : len(requests)].copy_(prefill.answer, non_blocking=True)
        if not requests and not prefill.prompts:
            return Flight(batch, StepResult([]))
        return _UnifiedFlight(batch, None, requests, values[: len(requests)], arrival(self.batch.device), prefill)

    def collect(self, flight: Flight) -> StepResult:
        if not isinstance(flight, _UnifiedFlight) or flight.values is None:
            return super().collect(flight)
        if flight.arrived is not None:
            flight.arrived.synchronize()
        answers: list[list[int]] = flight.values.tolist()
        told = dict(zip(flight.requests, answers, strict=True))
        token_ids, steps, failed = list[list[int]](), list[SpeculativeStep](), list[Request]()
        for part in flight.batch.requests:
            if part.samples:
                count, *numbers = told[part.request]
                tokens, drafts = numbers[:count], numbers[self.num_drafts + 1 :]
                token_ids.append(tokens)
                steps.append(SpeculativeStep(len(part.drafts), count - 1, tokens[-1], tuple(drafts)))
                if tokens[-1] < 0:
                    failed.append(part.request)
        prefill = flight.prefill
        first = [numbers[1] for numbers in answers[len(answers) - len(prefill.requests) :]]
        return StepResult(
            token_ids=token_ids,
            logprobs=named_logprobs(prefill.requests, first, prefill.reported, prefill.logprobs),
            prompt_logprobs=prompt_entries(prefill.prompts),
            failed=tuple(failed),
            speculative=steps,
        )

    def _limit(self, parts: Sequence[ScheduledRequest]) -> None:
        """Gives the step the masks of its rows: those of limited requests, whose tokens and drafts are known."""
        found = list[tuple[int, TokenMatcher, Sequence[int]]]()
        for place, part in enumerate(parts) if self._limited else ():
            state = self._limited.get(part.request)
            if state is not None and state.matcher is not None:
                state.follow(part.request.output_token_ids)
                found.append((place * self.decode.each, state.matcher, part.drafts))
        self.decode.masks.write(make_masks(found, self.model.shapes.vocab_size, self.batch.device))

    def _launch_in_turn(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        """A step that the host settles; no other is in flight."""
        flight = self._host.launch(batch, states)
        result = self._host.collect(flight)
        parts = [part for part in batch.requests if part.samples]
        if parts:
            slots = self._take_in([part.request for part in parts], self._upload_tables(parts), states)
            ends = zip(parts, result.token_ids, strict=True)
            places = [p.start + p.count - len(p.drafts) + len(tokens) - 1 for p, tokens in ends]
            last = self.batch.upload([max(tokens[-1], 0) for tokens in result.token_ids])
            drafts = upload(torch.tensor([step.drafts for step in result.speculative]), self.batch.device)
            self.batch.take_state(slots, last, self.batch.upload(places), drafts)
        return flight

    def _upload_tables(self, parts: Sequence[ScheduledRequest]) -> torch.Tensor:
        return upload(torch.from_numpy(block_tables(parts)), self.batch.device)

    def _take_in(
        self, requests: Sequence[Request], tables: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> torch.Tensor:
        slots = super()._take_in(requests, tables, states)
        for request in requests:
            state = states[request.request_id]
            if state.edits_logits or request.params.logprobs is not None:
                self._takers_of_turns.add(request)
        return slots

    def _prefill(self, parts: Sequence[ScheduledRequest], states: Mapping[str, SamplingState]) -> _Prefill:
        """A pass over chunks, which fills the draft's cache as well."""
        samples = [row for row, part in enumerate(parts) if part.samples]
        batch = ScheduledBatch(
            requests=parts,
            num_decodes=sum(part.count == 1 for part in parts),
            num_tokens=sum(part.count for part in parts),
            num_samples=len(samples),
        )
        prepared = self.processor.prepare(batch, self.cache)
        hidden, wanted = hidden_states(self.model, prepared)
        prompts = self._prompts(prepared, wanted)
        following = self.batch.upload([_next_known(part) for part in parts])
        last_rows = prepared.forward.query_starts[1:].long() - 1
        requests, rows = prepared.sample_requests, self.batch.upload(samples)
        if requests:
            slots, tokens, logits = self._choose(batch, prepared, wanted, states)
            following.index_copy_(0, rows, tokens.clamp(min=0))
        drafts = self.proposer.propose(
            DraftBatch(
                forward=prepared.forward,
                hidden=hidden,
                next_token_ids=shift(prepared.forward.token_ids, last_rows, following),
                last_rows=last_rows,
                num_drafts=self.num_drafts if requests else 1,  # which the first draft step's cache entries need
            )
        )
        if not requests:
            return _Prefill(prompts=prompts)
        drafts = drafts.index_select(0, rows)
        self.batch.take_state(slots, tokens.clamp(min=0), prepared.forward.context_lens.index_select(0, rows), drafts)
        answer = torch.cat([torch.ones_like(tokens)[:, None], tokens[:, None], torch.zeros_like(drafts), drafts], dim=1)
        return _Prefill(requests, answer, *self._logprobs_of(requests, tokens, logits), prompts)


def _next_known(part: ScheduledRequest) -> int:
    """The token behind a part, where it is known; 0 where the part's own step chooses it."""
    end = part.start + part.count
    return 0 if part.samples else part.request.token_ids(end, end + 1)[0]
