"""What is noted of a call, so that the metrics and the log learn of its end exactly once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hookline.scheduling.output import OutputDelta, Timing
from hookline.serving.api_errors import ApiError
from hookline.serving.metrics import Metrics
from hookline.serving.replies.answers import Answer

_REASONS_OF_CODE = {"deadline": "deadline", "queue_deadline": "deadline", "shutting_down": "shutdown"}
_REASONS_OF_CODE |= {"engine_dead": "engine_fault", "aborted": "engine_fault"}
_log = logging.getLogger(__name__)


class CallRecord:
    """One call from its arrival to its end.

    Args:
        metrics: are told of the arrival now, and of the end by `end`.
        label: the client's own id, for the log alone.
    """

    def __init__(self, metrics: Metrics, label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._arrived = time.monotonic()
        self._answer: Answer | None = None
        self._stream = False
        self._eos: frozenset[int] = frozenset()
        self._reason = ""
        self._last: dict[tuple[int, int], float] = {}  # when each continuation had news
        self._timings: list[Timing] = []
        metrics.received()

    def begin(self, answer: Answer, eos_token_ids: frozenset[int]) -> None:
        """The call is in the engine."""
        self._answer, self._stream, self._eos = answer, answer.call.stream, eos_token_ids
        self._label = answer.call.label  # it may have come within the body

    def take(self, number: int, deltas: Sequence[OutputDelta]) -> None:
        """News of the prompt `number`, as they come."""
        now = time.monotonic()
        for delta in deltas:
            if self._stream:
                self._note_gap((number, delta.index), len(delta.token_ids), now)
            if delta.timing is not None:
                self._timings.append(delta.timing)
            if delta.finish_reason is not None:
                by_eos = delta.finish_reason == "stop" and delta.stop_reason in self._eos
                self._reason = "eos" if by_eos else delta.finish_reason

    def _note_gap(self, key: tuple[int, int], count: int, now: float) -> None:
        if not count:
            return
        before = self._last.get(key)
        if before is not None:
            self._metrics.tokens(count, now - before)
        elif not self._last:
            self._metrics.first_token(now - self._arrived)
        self._last[key] = now

    def fail(self, error: ApiError) -> None:
        """The call ends with an error."""
        reason = _REASONS_OF_CODE.get(error.code or "")
        if reason is None:
            reason = "invalid" if error.status < 429 else "engine_fault" if error.status == 500 else "overloaded"
        self.end(reason)

    def end(self, reason: str = "") -> None:
        """The call ends: with its last continuation's reason, where none is given."""
        reason = reason or self._reason
        total = time.monotonic() - self._arrived
        answer, timings = self._answer, self._timings
        queued = min((t.queued for t in timings if t.queued is not None), default=None)
        first = min((t.time_to_first_token for t in timings if t.time_to_first_token is not None), default=None)
        if not self._stream and first is not None:
            self._metrics.first_token(first)
        if answer is None:
            self._metrics.ended(reason, total=total)
        else:
            self._metrics.ended(
                reason,
                prompt_tokens=answer.prompt_tokens,
                generated=answer.completion_tokens,
                queued=queued,
                prefill=None if first is None or queued is None else first - queued,
                decode=None if first is None else max(t.total for t in timings) - first,
                total=total,
                n=answer.n,
                max_tokens=answer.call.prompts[0].params.max_tokens,
            )
        name = "-" if answer is None else answer.call_id
        _log.info("%s ended: %s after %.3f s (the client's id: %r)", name, reason, total, self._label)
