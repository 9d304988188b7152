"""What follows the tokens of a request: stop strings over token borders, and the records that a user gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class StopStringMatcher:
    """Lets the text of one output through until a stop string is complete, whatever pieces it comes in.

    The match is the one that is complete first; of several complete at the same character, the longest. The text ends
    before it. What could still become part of a stop string is held back, and not one character more.

    Args:
        stops: the stop strings, none of them empty; without any, all text passes at once.
    """

    __slots__ = ("_first_characters", "_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Take more text; returns what may be shown now. After a match that is always nothing."""
        if not self._stops:
            return delta
        if self.matched is not None:
            return ""
        text = self._held + delta
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, cut, self.matched = min(found)
            self._held = ""
            return text[:cut]
        cut = self._safe_length(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back, at the end of the output: no stop string can come of it any more."""
        held, self._held = self._held, ""
        return held

    def _safe_length(self, text: str) -> int:
        """Where the longest suffix starts that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return start
        return len(text)


# The error of a request that could not go on.
NO_TOKEN = "the model's logits were no numbers, or the request's own options left no token to choose"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely one token was.

    Attributes:
        token_id: the token that stands in the text.
        logprob: its natural logarithm of probability.
        rank: its place among all tokens, the likeliest being 1.
        top: the likeliest token ids with their logprobs, as many as were asked for, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; a probability of 0 has a logprob of null."""
        return {
            "token_id": self.token_id,
            "logprob": _finite(self.logprob),
            "rank": self.rank,
            "top": [[token_id, _finite(logprob)] for token_id, logprob in self.top],
        }


@dataclass(frozen=True, slots=True)
class SpeculativeStep:
    """What one step did for one output, where drafts are proposed.

    Attributes:
        num_drafts: how many drafts were verified.
        num_accepted: how many of those were accepted; they come before `next_token`.
        next_token: the token that the model chose itself.
        drafts: what was proposed to come after it, for the next step to verify.
    """

    num_drafts: int
    num_accepted: int
    next_token: int
    drafts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"num_accepted": self.num_accepted, "next_token": self.next_token, "drafts": list(self.drafts)}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        """As JSON takes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request came: until it first ran, until its first token, until now or its end."""

    queued: float | None = None
    time_to_first_token: float | None = None
    total: float = 0.0

    def to_dict(self) -> dict[str, float | None]:
        """As JSON takes it; null for what has not happened."""
        return {"queued": self.queued, "time_to_first_token": self.time_to_first_token, "total": self.total}


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the `n` it is.
        text: the text so far, without the stop string and what was held back for it.
        token_ids: the tokens so far, a stop token included.
        finish_reason: `stop`, `length`, `abort` or `error`; None while it runs.
        stop_reason: the stop string or the stop token id that ended it, if one did.
        logprobs: one for each of `token_ids`, if asked for.
        cumulative_logprob: their sum, if asked for.
        speculative: its steps so far, where drafts are proposed; an end may have cut the tokens of the last.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    speculative: tuple[SpeculativeStep, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; logprobs and the steps of speculation stand there only if they were asked for."""
        result: dict[str, Any] = {
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.logprobs is not None:
            result["logprobs"] = [entry.to_dict() for entry in self.logprobs]
        if self.cumulative_logprob is not None:
            result["cumulative_logprob"] = _finite(self.cumulative_logprob)
        if self.speculative is not None:
            result["speculative"] = {"steps": [step.to_dict() for step in self.speculative]}
        return result


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a user's request gave so far.

    Attributes:
        request_id: the id that the engine gave or was given.
        prompt: the prompt's text; None if it came as token ids.
        prompt_token_ids: its tokens.
        outputs: the continuations in order of their index.
        finished: whether all of them have ended.
        usage: token counts over all continuations.
        timing: in seconds.
        prompt_logprobs: one for each prompt token, None for the first, if asked for.
        error: what went wrong, where a continuation ended with `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`: one continuation stands in it directly, several as a list of `outputs`."""
        result: dict[str, Any] = {"prompt_token_ids": list(self.prompt_token_ids)}
        if len(self.outputs) == 1:
            result |= self.outputs[0].to_dict()
        else:
            result["outputs"] = [{"index": output.index, **output.to_dict()} for output in self.outputs]
        if self.prompt_logprobs is not None:
            result["prompt_logprobs"] = [entry and entry.to_dict() for entry in self.prompt_logprobs]
        if self.error is not None:
            result["error"] = self.error
        return {**result, "usage": self.usage.to_dict(), "timing": self.timing.to_dict()}


@dataclass(slots=True)
class OutputDelta:
    """What a continuation gave since the last delta. Not frozen: hundreds are made each step.

    Attributes:
        request_id: of the user's request.
        index: which continuation it is.
        text: more of its text; what may be part of a stop string is held back.
        token_ids: more of its tokens; they may run ahead of the text.
        logprobs: one for each of `token_ids`, if asked for.
        prompt_logprobs: with the request's first delta, if asked for; see `RequestOutput`.
        finish_reason, stop_reason: with its last delta; see `CompletionOutput`.
        error: what went wrong, where it ended with `error`.
        cached_tokens: of the prompt, from the prefix cache.
        timing: with the last delta of the request.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do. What counts only grows from the engine's start.

    Attributes:
        running, waiting: continuations that hold cache, and that wait for it.
        used_blocks: cache blocks that requests hold.
        computed_tokens: tokens of all steps, those of lost ones included.
        preemptions: how often a continuation lost its blocks.
        queried_tokens, hit_tokens, evicted_blocks: see `PoolCounters`.
        drafted_tokens, accepted_tokens: of speculation.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
