"""The running requests as the device keeps them where it verifies drafts: where each stands, and what is proposed.

The host learns both a step later. It writes which requests run, how many of their drafts count, and new blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hookline.execution.device_batch import DeviceBatch
from hookline.execution.sampling_state import SamplingState
from hookline.execution.speculative_runner import COIN
from hookline.scheduling.request import Request, ScheduledRequest
from hookline_kernels.draft_inputs import BLOCKS, COLUMN, LIMIT, SLOT, DraftSlots


class DraftDeviceBatch(DeviceBatch):
    """Slots with drafts.

    Args:
        max_running: most requests at a time, and of a step.
        max_tokens: most places of a request, those for rows and look-ahead behind its end included.
        num_drafts: K.
        block_size: tokens of a block.
        steps: most steps in flight.
    """

    def __init__(
        self, max_running: int, max_tokens: int, num_drafts: int, block_size: int, steps: int, device: torch.device
    ) -> None:
        each, blocks = num_drafts + 1, -(-max_tokens // block_size)
        # A table grows by a step's rows between two steps; by no more than twice as many, whatever was held back.
        self._new_blocks = -(-2 * each // block_size) + 1
        height = BLOCKS + self._new_blocks
        super().__init__(max_running, blocks, max_running, block_size, steps, device, each=each, height=height)
        self.drafting = DraftSlots.zeros(max_running + 1, num_drafts, device)
        self._known: dict[Request, int] = {}  # columns of the slot's table that are written

    def release(self, request: Request) -> None:
        super().release(request)
        self._known.pop(request, None)

    def rows(self, parts: Sequence[ScheduledRequest], count: int, follows: bool = False) -> torch.Tensor:
        """The columns [3 + W, count] of a step of `parts`, padded; uploaded, not waited for."""
        staging, array = self._staging[0]
        self._staging.rotate(-1)
        host = array[: self._height * count].reshape(self._height, count)
        host[:] = -1
        host[SLOT] = self._padding
        for row, part in enumerate(parts):
            request, table = part.request, part.request.block_table
            known = self._known[request]
            host[SLOT, row], host[LIMIT, row], host[COLUMN, row] = self._slots[request], len(part.drafts), known
            if len(table) > known:
                host[BLOCKS : BLOCKS + len(table) - known, row] = table[known:]
            self._known[request] = len(table)
        return self._send(staging, count)

    def take_in(
        self, requests: Sequence[Request], tables: torch.Tensor, states: Mapping[str, SamplingState]
    ) -> torch.Tensor:
        fresh = [request for request in requests if not self.holds(request)]
        slots = super().take_in(requests, tables, states)
        self._known.update((request, len(request.block_table)) for request in requests)
        if fresh:
            keys = self.upload([states[request.request_id].signed_key(COIN) for request in fresh])
            self.drafting.coin_keys.index_copy_(0, self.upload(self.slots(fresh)), keys)
        return slots

    def take_state(
        self, slots: torch.Tensor, last_tokens: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor
    ) -> None:
        """Where requests of `slots` [R] stand: last tokens [R], places of those [R], the drafts behind them [R, K]."""
        self.kept.last_tokens.index_copy_(0, slots, last_tokens)
        self.drafting.positions.index_copy_(0, slots, positions.int())
        self.drafting.drafts.index_copy_(0, slots, drafts)
