"""Driving the engine by hand, in the style of DeepSpeed Inference V2: `put` tokens, get logits, `flush`.

The caller keeps the text, chooses the tokens and decides what runs; the engine keeps the cache. Nothing is ever
written past a request's own blocks: what does not fit is refused as a whole, before anything changes.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence

import torch

from hookline.errors import InvalidRequestError
from hookline.execution.runner import Runner
from hookline.sampling_params import SamplingParams
from hookline.scheduling.admission import wrong_token_ids
from hookline.scheduling.block_pool import BlockPool, RequestBlocks
from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest


class SchedulingResult(enum.Enum):
    """Whether a `put` can run, and if not, which limit stands against it."""

    SUCCESS = "success"
    ENGINE_REQUEST_LIMIT = "more requests than the engine tracks at a time (max_running)"
    BATCH_REQUEST_LIMIT = "more requests than one batch takes (max_batch_tokens, one token each)"
    BATCH_TOKEN_LIMIT = "more tokens than one batch takes (max_batch_tokens)"
    CACHE_LIMIT = "not enough free cache blocks"
    REQUEST_TOKEN_LIMIT = "a request would grow beyond max_model_len"


class SchedulingError(InvalidRequestError):
    """A `put` that cannot run; nothing was changed.

    Attributes:
        result: which limit stands against it.
    """

    def __init__(self, result: SchedulingResult) -> None:
        super().__init__(f"The batch cannot run: {result.value}", hint="Ask can_schedule first, or flush a request.")
        self.result = result


class ManualDriver:
    """Requests by the caller's own ids, each with its blocks and the tokens that it has seen."""

    def __init__(
        self, runner: Runner, pool: BlockPool, *, max_requests: int, max_batch_tokens: int, max_model_len: int
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._max_requests = max_requests
        self._max_batch_tokens = max_batch_tokens
        self._max_model_len = max_model_len
        self._tracked: dict[Hashable, tuple[Request, RequestBlocks]] = {}

    def query(self, uid: Hashable, max_tokens: int, max_blocks: int) -> tuple[int, int]:
        """How many of `max_tokens` more tokens `uid` could take with at most `max_blocks` more blocks, and how many
        blocks those need. (0, 0) for a new uid when no more requests are tracked."""
        seen, held = self._state(uid)
        if uid not in self._tracked and len(self._tracked) >= self._max_requests:
            return 0, 0
        blocks = min(max_blocks, self._pool.num_available)
        room = (held + blocks) * self._pool.block_size - seen
        tokens = max(0, min(max_tokens, room, self._max_model_len - seen))
        return tokens, max(0, self._pool.blocks_for(seen + tokens) - held)

    def can_schedule(self, uids: Sequence[Hashable], lengths: Sequence[int]) -> SchedulingResult:
        """Whether `put` would run for so many new tokens of each uid.

        Raises:
            InvalidRequestError: if there are not as many lengths as uids.
        """
        if len(uids) != len(lengths):
            raise InvalidRequestError(
                f"can_schedule got {len(uids)} uids and {len(lengths)} lengths", field="lengths", hint="Give one each."
            )
        if len(uids) > self._max_batch_tokens:
            return SchedulingResult.BATCH_REQUEST_LIMIT
        if len(self._tracked.keys() | set(uids)) > self._max_requests:
            return SchedulingResult.ENGINE_REQUEST_LIMIT
        if sum(lengths) > self._max_batch_tokens:
            return SchedulingResult.BATCH_TOKEN_LIMIT
        states = [self._state(uid) for uid in uids]
        if any(seen + n > self._max_model_len for (seen, _), n in zip(states, lengths, strict=True)):
            return SchedulingResult.REQUEST_TOKEN_LIMIT
        if sum(self._new_blocks(uid, n) for uid, n in zip(uids, lengths, strict=True)) > self._pool.num_available:
            return SchedulingResult.CACHE_LIMIT
        return SchedulingResult.SUCCESS

    def put(self, uids: Sequence[Hashable], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Runs the new tokens of each uid, and gives the logits [len(uids), V] of each one's last token.

        Raises:
            SchedulingError: carrying the result of `can_schedule`; then nothing was changed.
            InvalidRequestError: for a uid that stands twice, no tokens, or token ids outside the vocabulary.
        """
        self._check(uids, tokens)
        lengths = [len(ids) for ids in tokens]
        result = self.can_schedule(uids, lengths)
        if result is not SchedulingResult.SUCCESS:
            raise SchedulingError(result)
        before = {uid: self._tracked.get(uid) for uid in uids}
        taken = {uid: self._new_blocks(uid, count) for uid, count in zip(uids, lengths, strict=True)}
        parts = []
        for uid, ids in zip(uids, tokens, strict=True):
            request, blocks = self._tracked.get(uid) or self._track(uid)
            blocks.extend(taken[uid])
            request.prompt_token_ids.extend(ids)
            parts.append(ScheduledRequest(request, request.computed_tokens, len(ids), samples=True))
        order = sorted(range(len(parts)), key=lambda index: parts[index].count != 1)
        batch = ScheduledBatch(tuple(parts[i] for i in order), sum(n == 1 for n in lengths), sum(lengths))
        try:
            logits = self._runner.logits(batch)
        except BaseException:
            self._undo(before, parts, taken)
            raise
        for part in parts:
            part.request.computed_tokens += part.count
        inverse = torch.tensor(order).argsort().to(logits.device)
        return logits.index_select(0, inverse)

    def flush(self, uid: Hashable) -> None:
        """Forgets `uid` and frees its blocks.

        Raises:
            InvalidRequestError: if it is not tracked.
        """
        if uid not in self._tracked:
            raise InvalidRequestError(
                f"uid {uid!r} is not tracked", field="uid", hint="Only uids that were put can be."
            )
        self._tracked.pop(uid)[1].release()

    def flush_all(self) -> None:
        """Forgets every uid."""
        for uid in list(self._tracked):
            self.flush(uid)

    @property
    def num_tracked(self) -> int:
        """Uids that hold cache blocks."""
        return len(self._tracked)

    def _track(self, uid: Hashable) -> tuple[Request, RequestBlocks]:
        request = Request(f"manual-{uid}", [], SamplingParams(), self._max_model_len)
        self._tracked[uid] = tracked = request, RequestBlocks(self._pool, request)
        return tracked

    def _state(self, uid: Hashable) -> tuple[int, int]:
        """Tokens seen and blocks held."""
        tracked = self._tracked.get(uid)
        return (0, 0) if tracked is None else (tracked[0].computed_tokens, len(tracked[0].block_table))

    def _new_blocks(self, uid: Hashable, count: int) -> int:
        seen, held = self._state(uid)
        return max(0, self._pool.blocks_for(seen + count) - held)

    def _undo(
        self,
        before: dict[Hashable, tuple[Request, RequestBlocks] | None],
        parts: Sequence[ScheduledRequest],
        taken: dict[Hashable, int],
    ) -> None:
        """Takes a failed batch back: its tokens, its blocks, and the uids that it brought."""
        for (uid, known), part in zip(before.items(), parts, strict=True):
            request, blocks = self._tracked[uid]
            del request.prompt_token_ids[part.start :]
            if known is None:
                blocks.release()
                del self._tracked[uid]
            else:
                blocks.give_back(taken[uid])

    def _check(self, uids: Sequence[Hashable], tokens: Sequence[Sequence[int]]) -> None:
        vocab_size = self._runner.model.shapes.vocab_size
        if len(uids) != len(tokens) or len(set(uids)) != len(uids) or not uids:
            raise InvalidRequestError(
                f"put got {len(uids)} uids ({len(set(uids))} different) and {len(tokens)} lists of tokens",
                field="uids",
                hint="Give each uid once, with one list of tokens.",
            )
        for uid, ids in zip(uids, tokens, strict=True):
            wrong = wrong_token_ids(ids, vocab_size)
            if not ids or wrong:
                found = f"the token ids {wrong[:5]}" if ids else "no tokens"
                raise InvalidRequestError(
                    f"uid {uid!r} brings {found}; expected ids from 0 to {vocab_size - 1}",
                    field="tokens",
                    hint="Put at least one token a request, each an index of the vocabulary.",
                )
