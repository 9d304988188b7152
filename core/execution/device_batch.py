"""The running requests as the device keeps them: one slot each, and the rows of a decode step.

The host writes only what the device cannot know: which requests run, where each one's token stands, and blocks that
were just given out. What a step chooses stays on the device, where the next step reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hookline.batch_processor import upload
from hookline.execution.sampling_state import SamplingState
from hookline.scheduling.request import Request, ScheduledRequest
from hookline_kernels.decode_inputs import DecodeInputs, RequestSlots, SamplingOptions


class DeviceBatch:
    """Slots and buffers.

    Args:
        max_running: most requests at a time.
        max_blocks: most cache blocks of a request.
        max_rows: most requests of a decode step, padding included.
        block_size: tokens of a block.
        steps: most steps in flight.
        each: rows of a request in such a step.
        height: numbers that the host writes for each request of it.
    """

    def __init__(
        self,
        max_running: int,
        max_blocks: int,
        max_rows: int,
        block_size: int,
        steps: int,
        device: torch.device,
        *,
        each: int = 1,
        height: int = 3,
    ) -> None:
        self.block_size = block_size
        self.device = device
        # The last slot is nobody's: rows of padding name it.
        self.kept = RequestSlots.zeros(max_running + 1, max_blocks, device)
        self.inputs = DecodeInputs.zeros(max_rows, max_blocks, device, each)
        self._height = height
        self._rows = torch.zeros(height * max_rows, dtype=torch.int32, device=device)
        self._padding = max_running
        self._free = list(reversed(range(max_running)))
        self._slots: dict[Request, int] = {}
        self._stays: dict[Request, int] = {}  # how often each of them had been preempted when it came
        # One more than steps in flight: what a step uploads is not written again before its result has come.
        pinned = device.type == "cuda"
        staging = [torch.zeros(height * max_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(steps + 1)]
        self._staging = deque((buffer, buffer.numpy()) for buffer in staging)

    def holds(self, request: Request) -> bool:
        """Whether the request has a slot, so that the device knows its last token.

        One that was preempted since has none of its cache left, though an interrupt may have kept its slot from being
        released.
        """
        return self._stays.get(request) == request.preemptions

    def release(self, request: Request) -> None:
        """Lets the request's slot go. It may be given on at once: steps run in the order of their launches."""
        self._stays.pop(request, None)
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def rows(self, parts: Sequence[ScheduledRequest], count: int, follows: bool = False) -> torch.Tensor:
        """The rows [3, count] of a decode step of `parts`, padded; uploaded, not waited for.

        Args:
            follows: whether the step before had the same requests in the same order, each a token less far.
        """
        (staging, array), (_, before) = self._staging[0], self._staging[-1]
        self._staging.rotate(-1)
        host = array[: 3 * count].reshape(3, count)
        real, slots, size = len(parts), self._slots, self.block_size
        if follows:
            host[:2] = before[: 2 * count].reshape(2, count)
            host[1, :real] += 1
        else:
            host[0, :real] = [slots[part.request] for part in parts]
            host[1, :real] = [part.start for part in parts]
        host[2, :real] = -1
        for row in np.flatnonzero(host[1, :real] % size == 0).tolist():
            part = parts[row]
            host[2, row] = part.request.block_table[part.start // size]
        host[0, real:] = self._padding
        host[1, real:] = -1
        return self._send(staging, count)

    def _send(self, staging: torch.Tensor, count: int) -> torch.Tensor:
        size = self._height * count
        rows = self._rows[:size]
        rows.copy_(staging[:size], non_blocking=True)
        return rows.view(-1, count)

    def padding_rows(self, count: int) -> torch.Tensor:
        """Rows [height, count] of a step of no request."""
        rows = torch.full((self._height, count), -1, dtype=torch.int32, device=self.device)
        rows[0] = self._padding
        return rows

    def last_tokens(self, requests: Sequence[Request]) -> torch.Tensor:
        """The tokens [len(requests)] int64 that steps in flight choose for these requests."""
        return self.kept.last_tokens.index_select(0, self.upload(self.slots(requests)))

    def take_in(
        self, requests: Sequence[Request], tables: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> torch.Tensor:
        """Gives slots to those of `requests` that have none, and takes all their block tables.

        Args:
            tables: [len(requests), blocks] int32, on the device.
            states: sampling states by request id.

        Returns:
            the slots [len(requests)] int64, on the device.
        """
        fresh = [request for request in requests if request not in self._slots]
        for request in fresh:
            self._slots[request] = self._free.pop()
            self._stays[request] = request.preemptions
        if fresh:
            self._write_options(fresh, [states[request.request_id] for request in fresh])
        slots = self.upload(self.slots(requests))
        self.kept.tables[:, : tables.shape[1]].index_copy_(0, slots, tables)
        return slots

    def _write_options(self, requests: Sequence[Request], states: Sequence[SamplingState]) -> None:
        slots = self.upload(self.slots(requests))
        floats = [(state.temperature, state.params.top_p, state.params.min_p) for state in states]
        integers = [(len(r.prompt_token_ids), s.top_k, s.signed_key()) for r, s in zip(requests, states, strict=True)]
        columns = upload(torch.tensor(floats, dtype=torch.float64).t().contiguous(), self.device)
        numbers = upload(torch.tensor(integers, dtype=torch.int64).t().contiguous(), self.device)
        kept = self.kept
        for target, values in ((kept.temperature, columns[0]), (kept.top_p, columns[1]), (kept.min_p, columns[2])):
            target.index_copy_(0, slots, values.to(target.dtype))
        for target, values in ((kept.prompt_lens, numbers[0]), (kept.top_k, numbers[1]), (kept.keys, numbers[2])):
            target.index_copy_(0, slots, values.to(target.dtype))

    def options(self, slots: torch.Tensor, numbers: torch.Tensor) -> SamplingOptions:
        """The sampling options of `slots` [R] whose requests have so many output tokens, `numbers` [R] int64."""
        kept = self.kept
        columns = {
            name: getattr(kept, name).index_select(0, slots)
            for name in ("temperature", "top_p", "min_p", "top_k", "keys")
        }
        return SamplingOptions(**columns, num_outputs=numbers.int())

    def slots(self, requests: Sequence[Request]) -> list[int]:
        """The slots that requests have."""
        return [self._slots[request] for request in requests]

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """`values` as int64 on the device; not waited for."""
        return upload(torch.tensor(values, dtype=torch.int64), self.device)
