"""The runner that keeps its batch on the device and waits for nothing inside a step.

`launch` puts a step on the device's queue; `collect` waits for its tokens. Between the two the next step can be
launched: its decode rows take their tokens from the slots, where the step before leaves them.

Every row's token is chosen from the logits as they are. Rows of requests that change their logits (penalties, biases,
bans) are then chosen once more from edited copies, so that a step without them, and its CUDA graph, know nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hookline.batch_processor import BatchProcessor, PreparedBatch, upload
from hookline.execution.decode_step import DecodeStep, Notice, choose_tokens
from hookline.execution.device_batch import DeviceBatch
from hookline.execution.device_edits import DeviceEdits
from hookline.execution.device_logprobs import LogprobsOnTheWay, logprob_values, to_host
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.model import CacheTensors, TransformerModel
from hookline.scheduling.output import TokenLogprob
from hookline.scheduling.request import Request, ScheduledBatch

# By request id, the place of the first prompt token, and what is reported of it and of those after it.
_Prompts = tuple[tuple[str, int, tuple[LogprobsOnTheWay, ...]], ...]


@dataclass(frozen=True, slots=True)
class _TokenFlight(Flight):
    """A step whose answer is on its way to the host.

    Attributes:
        requests: those that get a token.
        values: [len(requests)] the tokens, -1 where there is none.
        arrived: when all of it has come; None on a CPU.
        reported: which of `requests` want log probabilities.
        logprobs: of those.
        prompts: log probabilities of prompts.
    """

    requests: tuple[Request, ...] = ()
    values: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None
    reported: Sequence[int] = ()
    logprobs: LogprobsOnTheWay | None = None
    prompts: _Prompts = ()


class DeviceRunner(Runner):
    """Runs steps ahead of their results.

    Args:
        max_running: most requests at a time.
        max_model_len: most tokens of a request.
    """

    max_in_flight = 2

    def __init__(
        self,
        model: TransformerModel,
        processor: BatchProcessor,
        cache: Mapping[str, Sequence[CacheTensors]],
        *,
        max_running: int,
        max_model_len: int,
    ) -> None:
        super().__init__(model, processor, cache)
        size, steps = processor.block_size, self.max_in_flight
        self.batch = DeviceBatch(max_running, -(-max_model_len // size), max_running, size, steps, model.device)
        self.edits = DeviceEdits(max_running + 1, model.shapes.vocab_size, model.device)
        self.decode = DecodeStep(model, cache, self.batch, max_model_len, processor.rope_lengths)
        # Requests in slots that want log probabilities of their tokens, and how many likeliest.
        self._reporting: dict[Request, int] = {}
        # The requests of the last step, where each decoded a token, and the scheduler's version of them.
        self._decoding: tuple[Request, ...] = ()
        self._version: int | None = None
        # One more than steps in flight, as for the rows: an answer is read before its memory is written again.
        pinned = model.device.type == "cuda"
        self._answers = deque(torch.zeros(max_running, dtype=torch.int64, pin_memory=pinned) for _ in range(steps + 1))

    def capture(self, notice: Notice | None = None) -> float:
        """See `DecodeStep.capture`."""
        return self.decode.capture(notice)

    def reserve(self, state: SamplingState) -> None:
        self.edits.reserve(state)

    def release(self, request: Request) -> None:
        self.batch.release(request)
        self.edits.release(request)
        self._reporting.pop(request, None)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        follows = batch.version is not None and batch.version == self._version
        if follows or self._is_decode(batch):
            requests, self._version = self._decoding, batch.version
            tokens, logits = self.decode.run(
                self.batch.rows(batch.requests, self.decode.size_for(len(requests)), follows)
            )
            return self._send(batch, requests, self._choose_edited(requests, tokens, logits), logits)
        self._version = None
        prepared = self.processor.prepare(batch, self.cache)
        self._fill_pending(batch, prepared)
        return self._launch(batch, prepared, states)

    def _is_decode(self, batch: ScheduledBatch) -> bool:
        """Whether each request decodes a token after one that its slot knows; `_decoding` are they then."""
        if not batch.num_samples == batch.num_decodes == len(batch.requests):
            return False
        self._decoding = tuple(part.request for part in batch.requests)
        return all(map(self.batch.holds, self._decoding))

    def collect(self, flight: Flight) -> StepResult:
        if not isinstance(flight, _TokenFlight) or flight.values is None:
            return super().collect(flight)
        if flight.arrived is not None:
            flight.arrived.synchronize()
        values: list[int] = flight.values.tolist()
        logprobs: dict[str, Sequence[TokenLogprob]] = {}
        if flight.logprobs is not None:
            entries = flight.logprobs.entries([values[row] for row in flight.reported])
            named = zip((flight.requests[row].request_id for row in flight.reported), entries, strict=True)
            logprobs = {request_id: [entry] for request_id, entry in named if entry.token_id >= 0}
        return StepResult(
            token_ids=[[value] for value in values],
            logprobs=logprobs,
            prompt_logprobs={
                name: (start, [entry for part in parts for entry in part.entries()])
                for name, start, parts in flight.prompts
            },
            failed=tuple(flight.requests[row] for row, value in enumerate(values) if value < 0)
            if min(values, default=0) < 0
            else (),
        )

    def _launch(self, batch: ScheduledBatch, prepared: PreparedBatch, states: Mapping[str, SamplingState]) -> Flight:
        """A step with prefill chunks in it."""
        hidden = self.model.forward(prepared.forward)
        prompts = self._prompts(prepared, hidden)
        requests = prepared.sample_requests
        if not requests and not prompts:
            return Flight(batch, StepResult([]))
        if not requests:
            return self._send(batch, (), torch.zeros(0, dtype=torch.int64, device=hidden.device), hidden, prompts)
        rows = hidden if prepared.sample_rows is None else hidden.index_select(0, prepared.sample_rows)
        logits = self.model.compute_logits(rows)
        slots = self._take_in(requests, _tables(batch, prepared), states)
        tokens = choose_tokens(logits, self.batch.options(slots, self.batch.upload(_num_outputs(requests))))
        self.batch.kept.last_tokens.index_copy_(0, slots, tokens.clamp(min=0))
        return self._send(batch, requests, self._choose_edited(requests, tokens, logits), logits, prompts)

    def _take_in(
        self, requests: Sequence[Request], tables: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> torch.Tensor:
        """See `DeviceBatch.take_in`; what else is kept of requests that come to a slot as well."""
        fresh = [request for request in requests if not self.batch.holds(request)]
        slots = self.batch.take_in(requests, tables, states)
        self.edits.take_in(fresh, self.batch.slots(fresh), [states[request.request_id] for request in fresh])
        wanted = ((request, request.params.logprobs) for request in fresh)
        self._reporting.update({request: top for request, top in wanted if top is not None})
        return slots

    def _choose_edited(self, requests: Sequence[Request], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`tokens`, changed in place where requests edit their logits, as are the slots' last tokens."""
        rows = self.edits.rows(requests)
        if rows:
            edited = [requests[row] for row in rows]
            numbers = _num_outputs(edited)
            columns = self.batch.upload([*rows, *self.batch.slots(edited), *numbers]).view(3, -1)
            scores = self.edits.edit(logits, columns[:2], edited, numbers)
            chosen = choose_tokens(scores, self.batch.options(columns[1], columns[2]))
            last = chosen.clamp(min=0)
            tokens.index_copy_(0, columns[0], chosen)
            self.batch.kept.last_tokens.index_copy_(0, columns[1], last)
            self.edits.append(columns[1], last)
        return tokens

    def _prompts(self, prepared: PreparedBatch, hidden: torch.Tensor) -> _Prompts:
        found = []
        for span in prepared.prompt_spans:
            top = span.request.params.prompt_logprobs or 0
            parts = []
            for logits, targets in self._prompt_rows(span, hidden):
                values = logprob_values(logits, None, self.batch.upload(targets), top)
                parts.append(LogprobsOnTheWay(targets, [top] * len(targets), to_host(values)))
            found.append((span.request.request_id, span.start + 1, tuple(parts)))
        return tuple(found)

    def _fill_pending(self, batch: ScheduledBatch, prepared: PreparedBatch) -> None:
        """Puts the tokens of steps in flight where the host could not."""
        pending = [
            (row, part.request)
            for row, part in enumerate(batch.requests[: batch.num_decodes])
            if part.start >= len(part.request.prompt_token_ids) + len(part.request.output_token_ids)
        ]
        if pending:
            rows = self.batch.upload([row for row, _ in pending])
            tokens = self.batch.last_tokens([request for _, request in pending])
            prepared.forward.token_ids.index_copy_(0, rows, tokens)

    def _send(
        self,
        batch: ScheduledBatch,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        logits: torch.Tensor,
        prompts: _Prompts = (),
    ) -> Flight:
        """Sends the answer on its way, with the log probabilities, under unedited `logits`, of those who want them."""
        reporting, logprobs = self._reporting, None
        reported = [row for row, request in enumerate(requests) if request in reporting] if reporting else []
        if reported:
            tops = [reporting[requests[row]] for row in reported]
            rows = self.batch.upload(reported)
            found = logprob_values(logits, rows, tokens.index_select(0, rows).clamp(min=0), max(tops))
            logprobs = LogprobsOnTheWay(None, tops, to_host(found))
        self._answers.rotate()
        values = self._answers[0][: len(requests)]
        values.copy_(tokens[: len(requests)], non_blocking=True)
        arrived = None
        if tokens.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _TokenFlight(batch, None, tuple(requests), values, arrived, reported, logprobs, prompts)


def _num_outputs(requests: Sequence[Request]) -> list[int]:
    """How many output tokens requests have whose tokens of this step are pending already, without those."""
    return [len(request.output_token_ids) + request.pending_tokens - 1 for request in requests]


def _tables(batch: ScheduledBatch, prepared: PreparedBatch) -> torch.Tensor:
    """The block tables of the parts that sample."""
    tables = prepared.forward.block_tables
    if batch.num_samples == len(batch.requests):
        return tables
    rows = [row for row, part in enumerate(batch.requests) if part.samples]
    return tables.index_select(0, upload(torch.tensor(rows), tables.device))
