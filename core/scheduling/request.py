"""A request: what a user asked, with its tokens and state."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from hookline.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. A preempted request is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended; every request ends exactly once with one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One request and all its state in the scheduler.

    The token lists and the block table only change in place.

    Attributes:
        request_id: the engine's own id, unique.
        prompt_token_ids: the tokens asked; at least one.
        params: how to choose the next ones.
        max_total_tokens: prompt plus output may not grow beyond this.
        eos_token_ids: the model's end tokens, which stop the request unless `params.ignore_eos`.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        output_token_ids: tokens chosen so far, a stop token included; preemption never drops them.
        finish_reason: set once, when the status becomes FINISHED.
        stop_token_id: the token that ended the output, if one did.
        draft_token_ids: proposed to follow `output_token_ids`, for the next step to verify; no tokens of the request.
        computed_tokens: tokens, from the first, whose cache is filled, by the steps in flight as well.
        pending_tokens: tokens that steps in flight choose: they are there, but not known yet. Drafts that such a step
            verifies count as accepted until its update, here and in `computed_tokens`.
        cached_tokens: of those, how many came from the prefix cache when the request was first scheduled.
        preemptions: how often it lost its blocks.
        preempted_at: the computed tokens it had when it last lost its blocks.
        block_table: ids of the cache blocks in order, owned by this request until the pool releases them.
        max_output_tokens: most new tokens, from all limits together; set by the scheduler when it takes the request.
        end_token_ids: token ids that end the output, from model and params together.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: bytes = b""
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    draft_token_ids: Sequence[int] = ()
    computed_tokens: int = 0
    pending_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    preempted_at: int = 0
    block_table: list[int] = field(default_factory=list)
    max_output_tokens: int = field(init=False, default=0)
    end_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.end_token_ids = eos.union(self.params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those that are pending included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.pending_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens `start` to `stop`, over the border of prompt and output."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]

    def reject(self, count: int) -> int:
        """Takes note that a step whose tokens have come rejected so many drafts; drops what was proposed before it.

        Returns:
            the tokens that were computed after that step.
        """
        self.draft_token_ids = ()
        if self.status is RequestStatus.RUNNING:  # one that was preempted meanwhile has nothing computed
            self.computed_tokens -= count
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    def find_end(self, count: int) -> FinishReason | None:
        """Why the request ends with one of its last `count` output tokens, if it does; those after it are dropped."""
        output = self.output_token_ids
        for index in range(len(output) - count, len(output)):
            stops = output[index] in self.end_token_ids and index >= self.params.min_tokens
            if stops or index + 1 == self.max_output_tokens:
                self.stop_token_id = output[index] if stops else None
                del output[index + 1 :]
                return FinishReason.STOP if stops else FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request's part of a step: tokens `start` to `start + count` run.

    Not frozen: hundreds are made each step, and a frozen one takes four times as long.

    Attributes:
        samples: whether the request's last token is among them, so that the step yields a new one.
        drafts: the last of the `count` tokens, which the step verifies; it yields one more than it accepts.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """The decision for one step. Requests with one token come first, so that decodes form one contiguous part.

    Attributes:
        requests: the parts, decodes (count == 1) first.
        num_decodes: how many at the front have count == 1.
        num_tokens: sum of the counts.
        num_samples: how many of the parts sample.
        preempted: requests that lost their blocks to make room in this step; one may be back in `requests` already.
        admitted: requests that got their first blocks for this step, or got blocks again.
        version: of the running requests, where each of them decodes a token. A step with the version of the one before
            has the same requests in the same order, each a token further; None where any does something else.
    """

    requests: Sequence[ScheduledRequest]
    num_decodes: int
    num_tokens: int
    num_samples: int = 0
    preempted: tuple[Request, ...] = ()
    admitted: tuple[Request, ...] = ()
    version: int | None = None
