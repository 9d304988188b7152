"""A step while it is being decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hookline.scheduling.request import Request, ScheduledRequest


@dataclass(slots=True)
class Plan:
    """What is decided so far.

    Attributes:
        budget: tokens that may still be scheduled.
        held: tokens kept for running requests that get none in this step, but will in the next.
        ones: parts of one token, which come first in the batch.
        chunks: parts of more.
        preempted: requests that lost their blocks in this step.
        admitted: requests that came in.
        samples: how many of the parts sample.
    """

    budget: int
    held: int = 0
    samples: int = 0
    ones: list[ScheduledRequest] = field(default_factory=list)
    chunks: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def put(self, request: Request, count: int, drafts: Sequence[int] = ()) -> None:
        """Decide that the next `count` tokens of a request run, and `drafts` behind them."""
        start = request.computed_tokens
        part = ScheduledRequest(request, start, count + len(drafts), start + count == request.num_tokens, drafts)
        count = part.count
        (self.ones if count == 1 else self.chunks).append(part)
        self.budget -= count
        self.samples += part.samples

    def hold(self) -> None:
        """Keep a token's place in the budget for a request that sits this step out."""
        self.budget -= 1
        self.held += 1

    def drop(self, request: Request) -> None:
        """Take back a decode that was decided already, for its request was preempted."""
        for parts in (self.ones, self.chunks):
            for index, part in enumerate(parts):
                if part.request is request:
                    del parts[index]
                    self.budget += part.count
                    self.samples -= part.samples
                    return
