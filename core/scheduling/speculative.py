"""Steps that verify drafts: a request's next token and the drafts behind it run together.

Of K drafts n are accepted, and the step yields n + 1 tokens. The cache of the K - n others is written over by the next
step before anything reads it, so the scheduler only counts the accepted ones as computed.

With a second step in flight, a request's place in it is not known when it is decided: the step before may accept any
number of drafts. It gets blocks for the case that all are accepted; the device knows the place, and the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.plan import Plan
from hookline.scheduling.request import Request, RequestStatus, ScheduledBatch
from hookline.scheduling.scheduler import Scheduler, SchedulerError

# Stands in a part for a draft that only the device knows.
UNKNOWN_DRAFT = -1


class SpeculativeScheduler(Scheduler):
    """A scheduler whose requests may have drafts.

    Drafts cost no request that decodes its place: every one gets its token first, budget and blocks that are left go to
    drafts, and those that do not fit are dropped. A prefill that runs beside them may find fewer blocks.

    Args:
        pool: the cache blocks.
        lookahead: places that the proposer writes to behind a request's tokens, at most D for D drafts.
        num_drafts: how many drafts every step leaves each request; needed with several steps in flight.
        options: of `Scheduler`.
    """

    def __init__(self, pool: BlockPool, *, lookahead: int = 0, num_drafts: int = 0, **options: Any) -> None:
        super().__init__(pool, lookahead=lookahead, **options)
        if self._max_in_flight > 1 and not num_drafts:
            raise SchedulerError("drafts that are known when a step was updated leave room for one in flight alone")
        self._unknown = (UNKNOWN_DRAFT,) * num_drafts

    def take_drafts(self, batch: ScheduledBatch, drafts: Sequence[Sequence[int]]) -> None:
        """Take what was proposed in a step that was updated: for each part that samples, in the batch's order.

        Raises:
            SchedulerError: if `drafts` has another length; nothing was changed.
        """
        if len(drafts) != batch.num_samples:
            raise SchedulerError(f"{len(drafts)} lists of drafts for {batch.num_samples} parts that sample")
        rest = iter(drafts)
        for part in batch.requests:
            if part.samples:
                proposed, request = next(rest), part.request
                request.draft_token_ids = tuple(proposed) if request.status is RequestStatus.RUNNING else ()

    def _schedule_decodes(self, plan: Plan) -> list[Request]:
        """One token for each running request that has just one to compute, and drafts behind it; returns the others."""
        prefills, decodes = list[Request](), list[Request]()
        for request in self._running:  # which may lose requests at its end, where this loop has not come yet
            if request.num_tokens - request.computed_tokens != 1:
                prefills.append(request)
            elif self._may_run_ahead(request) if request.pending_tokens else self._make_room(plan, request, 1):
                decodes.append(request)
            elif request.pending_tokens:
                plan.hold()
        for others, request in zip(reversed(range(len(self._running))), decodes, strict=False):
            drafts = self._drafts_of(request, plan.budget - others - 1)
            if drafts or not request.pending_tokens:
                plan.put(request, 1, drafts)
            else:
                plan.hold()
        return prefills

    def _may_run_ahead(self, request: Request) -> bool:
        """Whether a request whose tokens are not all known can have another step, without a cost to others."""
        if len(request.output_token_ids) + 1 >= request.max_output_tokens:
            return False  # a step in flight chooses its last token
        missing = self._pool.blocks_for(request.computed_tokens + 1 + self._lookahead) - len(request.block_table)
        return missing <= 0 or self._owners[request.request_id].extend(missing)

    def _drafts_of(self, request: Request, budget: int) -> Sequence[int]:
        """The drafts for which there is room. Where fewer tokens may come, the output is cut, not what is verified."""
        drafts = self._unknown if request.pending_tokens else request.draft_token_ids
        left = min(request.max_total_tokens, self._max_model_len) - request.num_tokens
        most = min(len(drafts), budget, self._max_chunk_tokens - 1, left)
        if most <= 0:
            return ()
        pool, end = self._pool, request.computed_tokens + 1 + self._lookahead
        missing = pool.blocks_for(end + most) - len(request.block_table)
        if missing > 0:
            self._owners[request.request_id].extend(min(missing, pool.num_available))
        return drafts[: max(0, min(most, len(request.block_table) * pool.block_size - end))]

    @property
    def _is_closed(self) -> bool:
        """Never: steps differ by their drafts, so that none is like the one before it."""
        return False
