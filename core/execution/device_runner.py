"""The runner that keeps its batch on the device and waits for nothing inside a step.

`launch` puts a step on the device's queue; `collect` waits for its tokens. Between the two the next step can be
launched: its decode rows take their tokens from the slots, where the step before leaves them.

Requests whose choices depend on what only the host has (penalties, biases, banned words, log probabilities) make their
steps plain ones: `launch` then does all of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hookline.batch_processor import BatchProcessor, PreparedBatch, upload
from hookline.execution.decode_step import DecodeStep, Notice, choose_tokens
from hookline.execution.device_batch import DeviceBatch
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.model import CacheTensors, TransformerModel
from hookline.scheduling.request import Request, ScheduledBatch


@dataclass(frozen=True, slots=True)
class _TokenFlight(Flight):
    """A step whose tokens, one for each of `requests`, are on their way to `values` on the host."""

    requests: tuple[Request, ...] = ()
    values: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None


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
        self.decode = DecodeStep(model, cache, self.batch, max_model_len, processor.rope_lengths)
        # One more than steps in flight, as for the rows: an answer is read before its memory is written again.
        pinned = model.device.type == "cuda"
        self._answers = deque(torch.zeros(max_running, dtype=torch.int64, pin_memory=pinned) for _ in range(steps + 1))

    def capture(self, notice: Notice | None = None) -> float:
        """See `DecodeStep.capture`."""
        return self.decode.capture(notice)

    def release(self, request: Request) -> None:
        self.batch.release(request)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        on_host = any(states[part.request.request_id].needs_host for part in batch.requests)
        all_decode = batch.num_samples == batch.num_decodes == len(batch.requests)
        if all_decode and not on_host and all(self.batch.holds(part.request) for part in batch.requests):
            rows = self.batch.rows(batch.requests, self.decode.size_for(len(batch.requests)))
            return self._send(batch, [part.request for part in batch.requests], self.decode.run(rows))
        prepared = self.processor.prepare(batch, self.cache)
        self._fill_pending(batch, prepared)
        return self._launch_on_host(batch, prepared, states) if on_host else self._launch(batch, prepared, states)

    def collect(self, flight: Flight) -> StepResult:
        if not isinstance(flight, _TokenFlight) or flight.values is None:
            return super().collect(flight)
        if flight.arrived is not None:
            flight.arrived.synchronize()
        values: list[int] = flight.values.tolist()
        failed = [request for request, value in zip(flight.requests, values, strict=True) if value < 0]
        return StepResult([[value] for value in values], failed=tuple(failed))

    def _launch(self, batch: ScheduledBatch, prepared: PreparedBatch, states: Mapping[str, SamplingState]) -> Flight:
        """A step with prefill chunks in it, whose tokens the device chooses."""
        hidden = self.model.forward(prepared.forward)
        requests = prepared.sample_requests
        if not requests:
            return Flight(batch, StepResult([]))
        rows = hidden if prepared.sample_rows is None else hidden.index_select(0, prepared.sample_rows)
        slots = self.batch.take_in(requests, _tables(batch, prepared), states)
        tokens = choose_tokens(self.model.compute_logits(rows), self.batch.options(requests, slots))
        self.batch.kept.last_tokens.index_copy_(0, slots, tokens.clamp(min=0))
        return self._send(batch, requests, tokens)

    def _launch_on_host(
        self, batch: ScheduledBatch, prepared: PreparedBatch, states: Mapping[str, SamplingState]
    ) -> Flight:
        """A plain step; the slots take its tokens in for the steps after it."""
        result = self._run(prepared, states)
        if result.token_ids:
            slots = self.batch.take_in(prepared.sample_requests, _tables(batch, prepared), states)
            tokens = self.batch.upload([max(0, tokens[0]) for tokens in result.token_ids])
            self.batch.kept.last_tokens.index_copy_(0, slots, tokens)
        return Flight(batch, result)

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

    def _send(self, batch: ScheduledBatch, requests: Sequence[Request], tokens: torch.Tensor) -> Flight:
        self._answers.rotate()
        values = self._answers[0][: len(requests)]
        values.copy_(tokens[: len(requests)], non_blocking=True)
        arrived = None
        if tokens.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _TokenFlight(batch, requests=tuple(requests), values=values, arrived=arrived)


def _tables(batch: ScheduledBatch, prepared: PreparedBatch) -> torch.Tensor:
    """The block tables of the parts that sample."""
    tables = prepared.forward.block_tables
    if batch.num_samples == len(batch.requests):
        return tables
    rows = [row for row, part in enumerate(batch.requests) if part.samples]
    return tables.index_select(0, upload(torch.tensor(rows), tables.device))
