"""Which tokens run next: Dynamic SplitFuse under a token budget, over a pool of cache blocks.

Each `schedule` is answered by an `update`, in the same order; `add`, `abort` and `finish` may come at any moment
between. With more than one step in flight, a step is decided before the tokens of the one before are known: they are
pending, and a request whose end comes to light only then has computed one token too many, which is dropped.

Requests are served first come, first served. The running requests stand in the order in which they came, and all came
before those that wait. When blocks run out, the last-come of the running ones goes back to the front of the waiting
ones, keeping its tokens; a request never takes blocks from one that came before it. So the oldest always moves on, and
with it, one after the other, all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from hookline.errors import InvalidRequestError
from hookline.scheduling.admission import most_new_tokens
from hookline.scheduling.block_pool import BlockPool, RequestBlocks, check_owners
from hookline.scheduling.plan import Plan
from hookline.scheduling.request import FinishReason, Request, RequestStatus, ScheduledBatch, ScheduledRequest
from hookline.scheduling.steady import SteadyBatch, SteadyDecode

# Steps for which a request may be held back for others to come in with it.
ADMIT_AFTER = 16


class SchedulerError(RuntimeError):
    """The scheduler's verbs were called out of turn: a fault of the engine, not of a user."""


class Scheduler:
    """Decides each step's batch, and follows each request from `add` to its end.

    Args:
        pool: the cache blocks.
        max_batch_tokens: token budget of a step.
        max_running: most requests that hold blocks at a time.
        max_model_len: most tokens, prompt plus output, of a request.
        max_in_flight: most steps that are scheduled and not updated.
        admit_together: while others run, requests are let in when there is room for so many, or `ADMIT_AFTER` steps
            after the first could have come: steps of decodes alone can be far cheaper than those with a prefill.
        lookahead: tokens behind those of a step for which each request in it has places in the cache as well.
        max_chunk_tokens: most tokens of one request in a step; None leaves the budget alone to decide.
        preempt_every: fault switch for tests: preempt the last-come request every so many steps, whether blocks are
            short or not, unless it has gained no computed token since it was preempted last.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_model_len: int,
        max_in_flight: int = 1,
        admit_together: int = 1,
        lookahead: int = 0,
        max_chunk_tokens: int | None = None,
        preempt_every: int | None = None,
    ) -> None:
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._max_in_flight = max_in_flight
        self._admit_together = admit_together
        self._steps_held = 0
        self._lookahead = lookahead
        self._max_chunk_tokens = min(max_chunk_tokens or max_batch_tokens, max_batch_tokens)
        self._preempt_every = preempt_every
        self._steps_to_preemption = preempt_every or 0
        self._owners: dict[str, RequestBlocks] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []
        self._version = 0  # of `_running`, and of what was taken back
        self._decided_version: int | None = None
        self._steady: SteadyDecode | None = None
        self._in_flight: deque[ScheduledBatch] = deque()
        # Ended while steps were in flight that may still use their blocks, with the last of those steps.
        self._leaving: list[tuple[RequestBlocks, ScheduledBatch]] = []

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended; if so, and no step is in flight, `schedule` gives a batch to run."""
        return bool(self._owners)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and have not ended."""
        return len(self._running)

    @property
    def in_flight(self) -> Sequence[ScheduledBatch]:
        """Steps that were scheduled and not updated, lost or retracted, the oldest first; a view."""
        return self._in_flight

    def add(self, request: Request) -> None:
        """Put a request at the end of the waiting ones.

        Raises:
            InvalidRequestError: if it could not run even alone in an empty engine, or its id is in use.
            SchedulerError: if it was added before.
        """
        if request.request_id in self._owners:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", field="request_id")
        if request.status is not RequestStatus.WAITING or request.block_table:
            raise SchedulerError(f"request {request.request_id!r} is {request.status.value} and cannot be added again")
        request.max_output_tokens = most_new_tokens(
            prompt=len(request.prompt_token_ids),
            max_tokens=request.params.max_tokens,
            context=min(request.max_total_tokens, self._max_model_len),
            pool=self._pool,
            lookahead=self._lookahead,
        )
        self._owners[request.request_id] = RequestBlocks(self._pool, request)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands. None if there is no such request, or it has ended already."""
        owner = self._owners.get(request_id)
        if owner is None:
            return None
        self._end(owner.request, FinishReason.ABORT)
        return owner.request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request for a reason outside its tokens, such as a stop string. Nothing happens if it has ended."""
        if request.status is RequestStatus.FINISHED:
            return
        owner = self._owners.get(request.request_id)
        if owner is None or owner.request is not request:
            raise SchedulerError(f"request {request.request_id!r} cannot be finished: it was never added")
        self._end(request, reason)

    def schedule(self) -> ScheduledBatch:
        """The next step: decodes, then running prefills, then requests that come in, under the token budget.

        The batch is empty only when there is no request, or every one waits for a step in flight, or is held back for
        others while one does. Blocks for all its tokens are in the block tables.

        Raises:
            SchedulerError: if as many steps are in flight as may be.
        """
        if len(self._in_flight) >= self._max_in_flight:
            raise SchedulerError(f"schedule was called while {len(self._in_flight)} steps are in flight")
        batch = self._steady_batch() or self._decide()
        if batch.requests:
            self._in_flight.append(batch)
        return batch

    def _steady_batch(self) -> SteadyBatch | None:
        """The next step where it is one more of decodes alone with the same requests, and there is room for it."""
        steady = self._steady
        if steady is None or steady.version != self._version or not steady.goes_on or not self._is_closed:
            return None
        for request, start in steady.beginning():
            has_room = start < len(request.block_table) * self._pool.block_size
            if not has_room and not self._owners[request.request_id].extend(1):
                return None
        return steady.take()

    @property
    def _is_closed(self) -> bool:
        """Whether no request can come in or be preempted for reasons of its own."""
        full = len(self._running) == self._max_running
        return self._preempt_every is None and (full or not self._waiting)

    def _decide(self) -> ScheduledBatch:
        plan = Plan(self._max_batch_tokens)
        if self._preempt_every is not None:
            self._force_preemption(plan)
        prefills = self._schedule_decodes(plan)
        self._schedule_prefills(plan, prefills)
        self._admit(plan)
        batch = ScheduledBatch(
            requests=(*plan.ones, *plan.chunks),
            num_decodes=len(plan.ones),
            num_tokens=self._max_batch_tokens - plan.budget - plan.held,
            num_samples=plan.samples,
            preempted=tuple(plan.preempted),
            admitted=tuple(plan.admitted),
            version=self._version if 0 < plan.samples == len(plan.ones) == len(self._running) else None,
        )
        for part in batch.requests:
            request = part.request
            request.computed_tokens = part.start + part.count
            request.pending_tokens += part.samples + len(part.drafts)
        repeats = batch.version is not None and batch.version == self._decided_version and self._is_closed
        self._steady = SteadyDecode(batch, self._pool.block_size) if repeats else None
        self._decided_version = batch.version
        return batch

    def update(self, batch: ScheduledBatch, sampled: list[list[int]]) -> list[tuple[Request, list[int]]]:
        """Take what a step gave.

        Args:
            batch: the oldest that `schedule` returned and that has not been taken.
            sampled: the new tokens of each part that samples, in the batch's order.

        Returns:
            for each of `sampled`, its request and the tokens it kept: those after its end are dropped, and all of a
            request that ended while the step was in flight. `request.status` tells which have ended now.

        Raises:
            SchedulerError: if this is not the batch whose turn it is, or `sampled` has another length; nothing was
                changed.
        """
        self._check_turn(batch, 0)
        if len(sampled) != batch.num_samples:
            raise SchedulerError(f"{len(sampled)} lists of sampled tokens for {batch.num_samples} parts that sample")
        self._in_flight.popleft()
        if set(map(len, sampled)) - {1}:
            self._version += 1  # of requests that went further, or not at all, more than one token may be missing
        elif isinstance(batch, SteadyBatch) and batch.version == self._version and batch.ends_none(sampled):
            return self._update_steady(batch, sampled)
        running, finished, block_size = RequestStatus.RUNNING, RequestStatus.FINISHED, self._pool.block_size
        results: list[tuple[Request, list[int]]] = []
        every = sampled if len(sampled) == len(batch.requests) else _spread(batch, sampled)
        for part, tokens in zip(batch.requests, every, strict=True):
            request = part.request
            request.pending_tokens -= part.samples + len(part.drafts)
            if request.status is not finished:
                output, computed = request.output_token_ids, part.start + part.count
                output += tokens
                if part.drafts:
                    computed = request.reject(part.count - len(tokens))
                # One that was preempted meanwhile holds no blocks now; its token is as good as any.
                if computed % block_size < part.count and request.status is running:
                    self._owners[request.request_id].register(computed)
                if len(output) >= request.max_output_tokens or not request.end_token_ids.isdisjoint(tokens):
                    tokens = self._end_by_token(request, tokens)
            else:
                tokens = []
            if part.samples:
                results.append((request, tokens))
        self._release_leaving(batch)
        return results

    def _update_steady(self, batch: SteadyBatch, sampled: list[list[int]]) -> list[tuple[Request, list[int]]]:
        """`update` where every request goes on."""
        for request, tokens in zip(batch.deciding, sampled, strict=True):
            request.pending_tokens -= 1
            request.output_token_ids += tokens
        for request, computed in batch.filling:
            self._owners[request.request_id].register(computed)
        self._release_leaving(batch)
        return list(zip(batch.deciding, sampled, strict=True))

    def fail(self, batch: ScheduledBatch) -> list[Request]:
        """Take note that a step was lost: its requests end with ERROR. Returns those that had not ended before.

        Of several steps in flight the newest is lost first, for it builds on those before it.
        """
        self._check_turn(batch, -1)
        self._in_flight.pop()
        self._take_back(batch)
        lost = [part.request for part in batch.requests if part.request.status is not RequestStatus.FINISHED]
        for request in lost:
            self._end(request, FinishReason.ERROR)
        self._release_leaving(batch)
        return lost

    def retract(self, batch: ScheduledBatch) -> None:
        """Take note that the newest step did not happen: nothing is computed, its requests are scheduled anew."""
        self._check_turn(batch, -1)
        self._in_flight.pop()
        self._take_back(batch)
        self._release_leaving(batch)

    def check(self) -> None:
        """Recount all blocks and their owners: see `check_owners`."""
        check_owners(self._pool, [*self._owners.values(), *(owner for owner, _ in self._leaving)])

    def _schedule_decodes(self, plan: Plan) -> list[Request]:
        """One token for each running request that has just one to compute; returns the others.

        The budget suffices: a request is only admitted when all that run got a token and one more is left.
        """
        prefills = []
        append, take, block_size = plan.ones.append, self._take_blocks, self._pool.block_size
        for request in self._running:  # which may lose requests at its end, where this loop has not come yet
            start, pending = request.computed_tokens, request.pending_tokens
            outputs = len(request.output_token_ids) + pending
            if pending and outputs >= request.max_output_tokens:
                continue  # a step in flight chooses its last token
            if len(request.prompt_token_ids) + outputs - start != 1:
                prefills.append(request)
            elif start % block_size or start < len(request.block_table) * block_size or take(plan, request, 1):
                append(ScheduledRequest(request, start, 1, True))
        plan.budget -= len(plan.ones)
        plan.samples += len(plan.ones)
        return prefills

    def _schedule_prefills(self, plan: Plan, prefills: list[Request]) -> None:
        for request in prefills:
            if plan.budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            start = request.computed_tokens
            count = min(request.num_tokens - start, plan.budget, self._max_chunk_tokens)
            if count < 1:
                raise SchedulerError(f"request {request.request_id!r} got no token from the step that sampled for it")
            count = self._make_room(plan, request, count)
            if count > 0:
                plan.put(request, count)

    def _make_room(self, plan: Plan, request: Request, count: int) -> int:
        """Give a request blocks for its next `count` tokens. Returns for how many of them it has blocks now."""
        pool, table, end = self._pool, request.block_table, request.computed_tokens + self._lookahead
        while (missing := pool.blocks_for(end + count) - len(table)) > 0:
            if not self._take_blocks(plan, request, missing) or len(table) * pool.block_size > end:
                break
        return max(0, min(count, len(table) * pool.block_size - end))

    def _admit(self, plan: Plan) -> None:
        """Let waiting requests in, in order, while there is budget and room.

        One block for each running request is left alone, for it may need that soon; and who was preempted comes back
        only when all its tokens fit. Otherwise it would come and go, and compute the same tokens each time.
        """
        pool = self._pool
        room_for = self._max_running - len(self._running)
        if self._waiting and self._running and 0 < room_for < self._admit_together and self._steps_held < ADMIT_AFTER:
            self._steps_held += 1
            return
        self._steps_held = 0
        while self._waiting and plan.budget > 0 and len(self._running) < self._max_running:
            request = next(iter(self._waiting.values()))
            if request.preemptions and self._is_in_flight(request):
                return  # the token that it comes back with is not known yet
            owner = self._owners[request.request_id]
            room = pool.num_available - len(self._running)
            if room < 1:
                return
            # Logits of the whole prompt are wanted, so all of it has to run.
            prefix = owner.match_prefix() if request.params.prompt_logprobs is None else []
            room -= sum(pool.references(block_id) == 0 for block_id in prefix)
            start, ahead = len(prefix) * pool.block_size, self._lookahead
            least = request.num_tokens - start if request.preemptions else 1
            if room < pool.blocks_for(least + ahead):
                return
            count = min(request.num_tokens - start, plan.budget, self._max_chunk_tokens)
            blocks = min(pool.blocks_for(count + ahead), room)
            owner.take_prefix(prefix)
            owner.extend(blocks)
            del self._waiting[request.request_id]
            self._running.append(request)
            self._version += 1
            request.status = RequestStatus.RUNNING
            request.computed_tokens = start
            if request.preemptions == 0:
                request.cached_tokens = start
            plan.admitted.append(request)
            plan.put(request, min(count, blocks * pool.block_size - ahead))

    def _is_in_flight(self, request: Request) -> bool:
        return any(part.request is request for batch in self._in_flight for part in batch.requests)

    def _take_blocks(self, plan: Plan, request: Request, wanted: int) -> bool:
        """Give a request up to `wanted` blocks; if there is none at all, take from those that came later."""
        owner = self._owners[request.request_id]
        if owner.extend(wanted):
            return True
        while self._pool.num_available == 0 and self._running[-1] is not request:
            self._preempt(plan)
        taken = min(wanted, self._pool.num_available)
        return taken > 0 and owner.extend(taken)

    def _preempt(self, plan: Plan) -> None:
        """Send the last-come running request back to the front of the waiting ones."""
        request = self._running.pop()
        self._version += 1
        self._owners[request.request_id].release()
        request.status = RequestStatus.WAITING
        request.preemptions += 1
        request.preempted_at = max(request.preempted_at, request.computed_tokens)
        request.computed_tokens = 0
        request.draft_token_ids = ()
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        plan.preempted.append(request)
        plan.drop(request)

    def _force_preemption(self, plan: Plan) -> None:
        self._steps_to_preemption -= 1
        if self._steps_to_preemption > 0 or not self._running:
            return
        if self._running[-1].computed_tokens > self._running[-1].preempted_at:
            self._preempt(plan)
            self._steps_to_preemption = self._preempt_every or 0

    def _end_by_token(self, request: Request, tokens: list[int]) -> list[int]:
        """End a request whose new tokens may hold its end. Returns the tokens that it keeps."""
        before = len(request.output_token_ids) - len(tokens)
        if (reason := request.find_end(len(tokens))) is not None:
            self._end(request, reason)
        return request.output_token_ids[before:]

    def _end(self, request: Request, reason: FinishReason) -> None:
        owner = self._owners.pop(request.request_id)
        if request.status is RequestStatus.WAITING:
            del self._waiting[request.request_id]
        else:
            self._running.remove(request)
            self._version += 1
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self._in_flight:
            self._leaving.append((owner, self._in_flight[-1]))
        else:
            owner.release()

    def _release_leaving(self, batch: ScheduledBatch) -> None:
        """`batch` is over: those who waited for it, and all who wait for none that is left, let their blocks go."""
        if not self._leaving:
            return
        staying = []
        for owner, last in self._leaving:
            if last is batch or last not in self._in_flight:
                owner.release()
            else:
                staying.append((owner, last))
        self._leaving = staying

    def _take_back(self, batch: ScheduledBatch) -> None:
        self._version += 1
        for part in batch.requests:
            request = part.request
            request.pending_tokens -= part.samples + len(part.drafts)
            if request.status is RequestStatus.RUNNING:
                request.computed_tokens -= part.count

    def _check_turn(self, batch: ScheduledBatch, place: int) -> None:
        if not self._in_flight or self._in_flight[place] is not batch:
            raise SchedulerError(f"this batch is not the {'newest' if place else 'oldest'} step in flight")


def _spread(batch: ScheduledBatch, sampled: list[list[int]]) -> list[list[int]]:
    """`sampled` with an empty list for each part that does not sample."""
    rest = iter(sampled)
    return [next(rest) if part.samples else [] for part in batch.requests]
