"""The runner that keeps its batch on the device and waits for nothing inside a step.

`launch` puts a step on the device's queue; `collect` waits for its tokens. Between the two the next step can be
launched: its decode rows take their tokens from the slots, where the step before leaves them.

Every row's token is chosen from the logits as they are. Rows of requests that change their logits (penalties, biases,
bans) are then chosen once more from edited copies, so that a step without them, and its CUDA graph, know nothing of it.
So are rows whose request has a matcher, which has to see each token before it can tell what may follow: while one has a
slot, steps take turns with the host, which fills the masks while the forward pass runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hookline.batch_processor import BatchProcessor, PreparedBatch, upload
from hookline.execution.decode_step import DeviceStep, Notice, choose_tokens
from hookline.execution.device_edits import DeviceEdits
from hookline.execution.device_logprobs import LogprobsOnTheWay, logprob_values, to_host
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.execution.token_masks import make_masks
from hookline.model import CacheTensors, TransformerModel
from hookline.scheduling.output import TokenLogprob
from hookline.scheduling.request import Request, ScheduledBatch

# By request id, the place of the first prompt token, and what is reported of it and of those after it.
Prompts = tuple[tuple[str, int, tuple[LogprobsOnTheWay, ...]], ...]


# Steps that may be launched and not collected.
STEPS = 2


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
    prompts: Prompts = ()


class DeviceRunner(Runner):
    """Runs steps ahead of their results.

    Args:
        decode: a step of decodes alone, with the slots of the requests.
    """

    max_in_flight = STEPS

    def __init__(
        self,
        model: TransformerModel,
        processor: BatchProcessor,
        cache: Mapping[str, Sequence[CacheTensors]],
        decode: DeviceStep,
    ) -> None:
        super().__init__(model, processor, cache)
        self.decode, self.batch, max_running = decode, decode.batch, decode.sizes[-1]
        self.edits = DeviceEdits(max_running + 1, model.shapes.vocab_size, model.device)
        # Requests in slots that want log probabilities of their tokens, and how many likeliest.
        self._reporting: dict[Request, int] = {}
        self._limited: dict[Request, SamplingState] = {}  # requests in slots that have a matcher
        # The requests of the last step, where each decoded a token, and the scheduler's version of them.
        self._decoding: tuple[Request, ...] = ()
        self._version: int | None = None
        # One more than steps in flight, as for the rows: an answer is read before its memory is written again.
        shape, pinned = self._answer_shape(max_running), model.device.type == "cuda"
        self._answers = deque(torch.zeros(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(STEPS + 1))

    def _answer_shape(self, max_running: int) -> tuple[int, ...]:
        return (max_running,)

    @property
    def steps_ahead(self) -> int:
        return 1 if self._limited else self.max_in_flight

    def capture(self, notice: Notice | None = None) -> float:
        """See `DeviceStep.capture`."""
        return self.decode.capture(notice)

    def reserve(self, state: SamplingState) -> None:
        self.edits.reserve(state)

    def release(self, request: Request) -> None:
        super().release(request)
        self.batch.release(request)
        self.edits.release(request)
        self._reporting.pop(request, None)
        self._limited.pop(request, None)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        follows = batch.version is not None and batch.version == self._version
        if follows or self._is_decode(batch):
            requests, self._version = self._decoding, batch.version
            tokens, logits = self.decode.run(
                self.batch.rows(batch.requests, self.decode.size_for(len(requests)), follows)
            )
            return self._send(batch, requests, self._choose_again(requests, tokens, logits), logits)
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
        return StepResult(
            token_ids=[[value] for value in values],
            logprobs=named_logprobs(flight.requests, values, flight.reported, flight.logprobs),
            prompt_logprobs=prompt_entries(flight.prompts),
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
        _, tokens, logits = self._choose(batch, prepared, hidden, states)
        return self._send(batch, requests, tokens, logits, prompts)

    def _choose(
        self, batch: ScheduledBatch, prepared: PreparedBatch, hidden: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots [R], tokens [R] and unedited logits [R, V] of the parts that sample; the slots know the tokens then.

        Args:
            hidden: of the rows whose logits are wanted.
        """
        requests = prepared.sample_requests
        rows = hidden if prepared.sample_rows is None else hidden.index_select(0, prepared.sample_rows)
        logits = self.model.compute_logits(rows)
        slots = self._take_in(requests, tables_of(batch, prepared), states)
        tokens = choose_tokens(logits, self.batch.options(slots, self.batch.upload(_num_outputs(requests))))
        self.batch.kept.last_tokens.index_copy_(0, slots, tokens.clamp(min=0))
        return slots, self._choose_again(requests, tokens, logits), logits

    def _take_in(
        self, requests: Sequence[Request], tables: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> torch.Tensor:
        """See `DeviceBatch.take_in`; what else is kept of requests that come to a slot as well."""
        fresh = [request for request in requests if not self.batch.holds(request)]
        for request in fresh:
            self.release(request)  # what is left of a stay that an interrupt ended
        slots = self.batch.take_in(requests, tables, states)
        self.edits.take_in(fresh, self.batch.slots(fresh), [states[request.request_id] for request in fresh])
        wanted = ((request, request.params.logprobs) for request in fresh)
        self._reporting.update({request: top for request, top in wanted if top is not None})
        held = ((request, states[request.request_id]) for request in fresh)
        self._limited.update({request: state for request, state in held if state.matcher is not None})
        return slots

    def _choose_again(self, requests: Sequence[Request], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`tokens`, changed in place where requests limit or edit their logits, as are the slots' last tokens."""
        limited = [row for row, request in enumerate(requests) if request in self._limited] if self._limited else []
        if limited:
            logits = self._mask(requests, limited, logits)
        rows = self.edits.rows(requests)
        if rows:
            edited = [requests[row] for row in rows]
            numbers = _num_outputs(edited)
            columns = self.batch.upload([*rows, *self.batch.slots(edited), *numbers]).view(3, -1)
            scores = self.edits.edit(logits, columns[:2], edited, numbers)
            self.edits.append(columns[1], self._replace(tokens, columns, scores))
        others = [row for row in limited if row not in rows]
        if others:
            chosen = [requests[row] for row in others]
            columns = self.batch.upload([*others, *self.batch.slots(chosen), *_num_outputs(chosen)]).view(3, -1)
            self._replace(tokens, columns, logits.index_select(0, columns[0]))
        return tokens

    def _mask(self, requests: Sequence[Request], rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """A copy of `logits` [R, V] with what the matchers of the requests in `rows` allow; their tokens are known."""
        states = [(row, self._limited[requests[row]]) for row in rows]
        for row, state in states:
            state.follow(requests[row].output_token_ids)
        limited = [(row, state.matcher, ()) for row, state in states if state.matcher is not None]
        masks = make_masks(limited, logits.shape[1], logits.device)
        return logits if masks is None else masks.apply(logits)

    def _replace(self, tokens: torch.Tensor, columns: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Chooses some tokens anew, here and in the slots: the last tokens [E] of those.

        Args:
            tokens: [R].
            columns: [3, E] int64: rows of `tokens`, the requests' slots, and how many output tokens they have.
            scores: [E, V].
        """
        chosen = choose_tokens(scores, self.batch.options(columns[1], columns[2]))
        last = chosen.clamp(min=0)
        tokens.index_copy_(0, columns[0], chosen)
        self.batch.kept.last_tokens.index_copy_(0, columns[1], last)
        return last

    def _prompts(self, prepared: PreparedBatch, hidden: torch.Tensor) -> Prompts:
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
        prompts: Prompts = (),
    ) -> Flight:
        """Sends the answer on its way, with the log probabilities, under unedited `logits`, of those who want them."""
        reported, logprobs = self._logprobs_of(requests, tokens, logits)
        self._answers.rotate()
        values = self._answers[0][: len(requests)]
        values.copy_(tokens[: len(requests)], non_blocking=True)
        return _TokenFlight(batch, None, tuple(requests), values, arrival(tokens.device), reported, logprobs, prompts)

    def _logprobs_of(
        self, requests: Sequence[Request], tokens: torch.Tensor, logits: torch.Tensor
    ) -> tuple[Sequence[int], LogprobsOnTheWay | None]:
        """Which of `requests` want log probabilities of their tokens [R] under logits [R, V], and those."""
        reporting = self._reporting
        reported = [row for row, request in enumerate(requests) if request in reporting] if reporting else []
        if not reported:
            return (), None
        tops = [reporting[requests[row]] for row in reported]
        rows = self.batch.upload(reported)
        found = logprob_values(logits, rows, tokens.index_select(0, rows).clamp(min=0), max(tops))
        return reported, LogprobsOnTheWay(None, tops, to_host(found))


def arrival(device: torch.device) -> torch.cuda.Event | None:
    """When all that `device` was told to send to the host so far has come; None on a CPU."""
    if device.type != "cuda":
        return None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return arrived


def named_logprobs(
    requests: Sequence[Request], tokens: Sequence[int], reported: Sequence[int], logprobs: LogprobsOnTheWay | None
) -> dict[str, Sequence[TokenLogprob]]:
    """By request id, the entries that have come of `reported` requests' tokens."""
    if logprobs is None:
        return {}
    entries = logprobs.entries([tokens[row] for row in reported])
    named = zip((requests[row].request_id for row in reported), entries, strict=True)
    return {request_id: [entry] for request_id, entry in named if entry.token_id >= 0}


def prompt_entries(prompts: Prompts) -> dict[str, tuple[int, list[TokenLogprob]]]:
    """By request id, the first prompt token's place, and the entries that have come from there."""
    return {name: (start, [entry for part in parts for entry in part.entries()]) for name, start, parts in prompts}


def _num_outputs(requests: Sequence[Request]) -> list[int]:
    """How many output tokens requests have whose tokens of this step are pending already, without those."""
    return [len(request.output_token_ids) + request.pending_tokens - 1 for request in requests]


def tables_of(batch: ScheduledBatch, prepared: PreparedBatch) -> torch.Tensor:
    """The block tables of the parts that sample."""
    tables = prepared.forward.block_tables
    if batch.num_samples == len(batch.requests):
        return tables
    rows = [row for row, part in enumerate(batch.requests) if part.samples]
    return tables.index_select(0, upload(torch.tensor(rows), tables.device))
