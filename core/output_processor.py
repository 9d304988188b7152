"""What becomes of tokens: text, stop strings, log probabilities, timing, and the reports that `step` gives."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hookline.scheduling.output import (
    CompletionOutput,
    OutputDelta,
    RequestOutput,
    SpeculativeStep,
    StopStringMatcher,
    Timing,
    TokenLogprob,
    Usage,
)
from hookline.scheduling.request import FinishReason, Request, RequestStatus, ScheduledBatch
from hookline.tokenizer import IncrementalDetokenizer, Tokenizer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Completion:
    """One of a request's continuations.

    Attributes:
        tokenizer: None where there is no text.
        detokenizer: None where nobody reads the text before its end: it is then made at once, which costs a fraction.
        taken_tokens: how many of the request's tokens deltas have reported.
        ended: whether a delta has reported the end.
        error: what failed at making its text; that ends it, and no other.
    """

    request: Request
    tokenizer: Tokenizer | None
    detokenizer: IncrementalDetokenizer | None
    matcher: StopStringMatcher
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    steps: list[SpeculativeStep] = field(default_factory=list)
    taken_tokens: int = 0
    ended: bool = False
    error: str | None = None

    def take(self, tokens: Sequence[int]) -> int:
        """Takes new tokens, up to one that completes a stop string; how many."""
        kept = 0
        while kept < len(tokens) and self.matcher.matched is None:
            if self.detokenizer is not None and tokens[kept] != self.request.stop_token_id:
                self.text.append(self.matcher.push(self.detokenizer.push(tokens[kept])))
            kept += 1
        return kept

    def fail(self, error: Exception) -> None:
        """Takes note that its text cannot be made."""
        _log.error("the text of %s cannot be made", self.request.request_id, exc_info=error)
        self.error = f"{type(error).__name__}: {error}"

    def flush(self) -> None:
        """Takes the text that was held back, at the end."""
        if self.detokenizer is not None and self.matcher.matched is None:
            self.text.append(self.matcher.push(self.detokenizer.flush()))
            self.text.append(self.matcher.flush())
        elif self.detokenizer is None and self.tokenizer is not None:
            ids, request = self.request.output_token_ids, self.request
            kept = ids if request.stop_token_id is None else ids[:-1]
            self.text.append(self.tokenizer.decode(kept, request.params.skip_special_tokens))

    @property
    def finish_reason(self) -> str | None:
        reason = self.request.finish_reason
        if reason is not None and self.error is not None:
            reason = FinishReason.ERROR
        if reason is FinishReason.LENGTH and self.matcher.matched is not None:
            reason = FinishReason.STOP  # its last token completed a stop string
        return None if reason is None else reason.value

    @property
    def stop_reason(self) -> str | int | None:
        return self.matcher.matched if self.matcher.matched is not None else self.request.stop_token_id

    def output(self, index: int) -> CompletionOutput:
        request = self.request
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        wants = request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=tuple(request.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if wants else None,
            cumulative_logprob=self.cumulative_logprob if wants else None,
            speculative=tuple(self.steps) or None,
        )

    def delta(self, request_id: str, index: int) -> OutputDelta | None:
        """What there is since the last delta; the text, log probabilities and steps of it are let go."""
        request = self.request
        ids, reason = request.output_token_ids[self.taken_tokens :], self.finish_reason
        if self.ended or not (ids or reason):
            return None
        self.taken_tokens += len(ids)
        self.ended = reason is not None
        delta = OutputDelta(request_id, index, "".join(self.text), ids, cached_tokens=request.cached_tokens)
        self.text.clear()
        self.steps.clear()
        if request.params.logprobs is not None:
            delta.logprobs, self.logprobs = self.logprobs, []
        if reason is not None:
            delta.finish_reason, delta.stop_reason = reason, self.stop_reason
        return delta


@dataclass(slots=True)
class _Group:
    """A user's request: its continuations, and what is known of it as a whole.

    Attributes:
        running: continuations whose end has not been taken.
        arrived, scheduled, first_token: of the monotonic clock.
    """

    request_id: str
    prompt: str | None
    completions: list[_Completion]
    stream: bool
    arrived: float
    running: int
    scheduled: float | None = None
    first_token: float | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def timing(self) -> Timing:
        return Timing(
            queued=None if self.scheduled is None else self.scheduled - self.arrived,
            time_to_first_token=None if self.first_token is None else self.first_token - self.arrived,
            total=time.monotonic() - self.arrived,
        )

    def deltas(self) -> list[OutputDelta]:
        """One of each continuation that has news."""
        each = (completion.delta(self.request_id, index) for index, completion in enumerate(self.completions))
        found = [delta for delta in each if delta is not None]
        if found and self.prompt_logprobs is not None:
            found[0].prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        for delta in found:
            if delta.finish_reason == FinishReason.ERROR.value:
                delta.error = self.error
        if found and not self.running:
            found[-1].timing = self.timing()
        return found

    def output(self) -> RequestOutput:
        first = self.completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(first.prompt_token_ids),
            outputs=tuple(c.output(index) for index, c in enumerate(self.completions)),
            finished=self.running == 0,
            usage=Usage(
                prompt_tokens=len(first.prompt_token_ids),
                completion_tokens=sum(len(c.request.output_token_ids) for c in self.completions),
                cached_tokens=first.cached_tokens,
            ),
            timing=self.timing(),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            error=self.error,
        )


class OutputProcessor:
    """Follows every request from its first token to its last report.

    Args:
        tokenizer: None where the checkpoint has none; outputs then have token ids and no text.

    Attributes:
        started: requests that have begun to run since the last report.
        drafted_tokens, accepted_tokens: of speculation, so far.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.started: list[str] = []
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._owners: dict[str, tuple[_Group, _Completion]] = {}
        # Those of whom each token is looked at when it comes: all until their first, then who streams or may stop.
        self._watched: dict[str, tuple[_Group, _Completion]] = {}
        self._news: dict[str, _Group] = {}

    @property
    def has_news(self) -> bool:
        """Whether `take_news` has anything to report."""
        return bool(self._news)

    @property
    def watched(self) -> Collection[str]:
        """Ids of the continuations whose tokens `take_tokens` wants to see; of others it has seen enough."""
        return self._watched

    def add(self, request_id: str, prompt: str | None, requests: Sequence[Request], *, stream: bool) -> None:
        """Takes note of a user's request and its continuations."""
        group = _Group(request_id, prompt, [], stream, time.monotonic(), running=len(requests))
        if requests[0].params.prompt_logprobs is not None:
            group.prompt_logprobs = [None] * len(requests[0].prompt_token_ids)
        for request in requests:
            params, tokenizer, detokenizer = request.params, self._tokenizer, None
            if tokenizer is not None and (stream or params.stop):
                detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            completion = _Completion(request, tokenizer, detokenizer, StopStringMatcher(params.stop))
            group.completions.append(completion)
            self._owners[request.request_id] = self._watched[request.request_id] = group, completion
        self._groups[request_id] = group

    def request_ids(self) -> list[str]:
        """Requests that have not been reported as finished."""
        return list(self._groups)

    def unfinished(self, request_id: str) -> list[Request]:
        """The continuations of a request that have not ended."""
        group = self._groups.get(request_id)
        completions = [] if group is None else group.completions
        return [c.request for c in completions if c.request.status is not RequestStatus.FINISHED]

    def note_scheduled(self, batch: ScheduledBatch) -> None:
        """Takes the time of requests that run for the first time."""
        for request in batch.admitted:
            owner = self._owners.get(request.request_id)
            if owner is not None and owner[0].scheduled is None:
                owner[0].scheduled = time.monotonic()
                self.started.append(owner[0].request_id)

    def take_prompt_logprobs(self, found: Mapping[str, tuple[int, list[TokenLogprob]]]) -> None:
        """Takes entries of prompt tokens: by request id, the first token's place and the entries from there on."""
        for request_id, (start, entries) in found.items():
            owner = self._owners.get(request_id)
            if owner is not None and owner[0].prompt_logprobs is not None:
                owner[0].prompt_logprobs[start : start + len(entries)] = entries

    def take_step(self, request: Request, step: SpeculativeStep) -> None:
        """Takes what a step did with a request's drafts."""
        self.drafted_tokens += step.num_drafts
        self.accepted_tokens += step.num_accepted
        owner = self._owners.get(request.request_id)
        if owner is not None:
            owner[1].steps.append(step)

    def take_tokens(self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Takes a request's new tokens; true if their text completes a stop string, or cannot be made.

        Tokens after a stop string are taken away from the request again.

        Args:
            logprobs: of the tokens, where they are asked for.
        """
        owner = self._watched.get(request.request_id)
        if owner is None or not tokens:
            return False
        group, completion = owner
        if group.first_token is None:
            group.first_token = time.monotonic()
        if completion.detokenizer is None and not group.stream and request.params.logprobs is None:
            del self._watched[request.request_id]
            return False
        try:
            kept = completion.take(tokens)
        except Exception as error:
            completion.fail(error)
            kept = len(tokens)
        completion.logprobs.extend(logprobs[:kept])
        for entry in logprobs[:kept]:  # one by one, as every report of the same tokens adds them up
            completion.cumulative_logprob += entry.logprob
        if kept < len(tokens):
            del request.output_token_ids[kept - len(tokens) :]
            request.stop_token_id = None
        if group.stream:
            self._news[group.request_id] = group
        return completion.matcher.matched is not None or completion.error is not None

    def finish(self, request: Request, error: str | None = None) -> None:
        """Takes note that a continuation has ended; the request is reported when its last one has."""
        owner = self._owners.pop(request.request_id, None)
        if owner is None:
            return
        group, completion = owner
        self._watched.pop(request.request_id, None)
        try:
            if completion.error is None:
                completion.flush()
        except Exception as fault:
            completion.fail(fault)
        group.error = group.error or error or completion.error
        group.running -= 1
        if group.stream or not group.running:
            self._news[group.request_id] = group
        if not group.running:
            del self._groups[group.request_id]

    def forget(self, request_id: str) -> None:
        """Drops what there is to report of a request that nobody waits for."""
        self._news.pop(request_id, None)

    def take_news(self, wanted: Collection[str] | None = None) -> list[RequestOutput]:
        """What there is to report since the last call, in the order in which it came.

        Args:
            wanted: requests to report; None for all. What there is of the others is kept.
        """
        self.started.clear()
        ids = [request_id for request_id in self._news if wanted is None or request_id in wanted]
        return [self._news.pop(request_id).output() for request_id in ids]

    def take_deltas(self) -> tuple[list[str], list[OutputDelta]]:
        """What is new since the last call: requests that have begun to run, and deltas in the order in which they came.

        It is gone from whole reports then: an engine is asked for the one or the other.
        """
        started, self.started = self.started, []
        news, self._news = self._news, {}
        return started, [delta for group in news.values() for delta in group.deltas()]
