"""Steps in which every running request decodes one token, one after the other with the same requests: nearly all steps.

What has to be looked at in such a step is known before it: who begins a cache block, who fills one, and when the first
request comes to its last token. So a step costs little for those that do none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest


class _Decodes(Sequence[ScheduledRequest]):
    """The parts of a step, made when somebody looks at them."""

    __slots__ = ("_further", "_requests", "_starts")

    def __init__(self, requests: Sequence[Request], starts: Sequence[int], further: int) -> None:
        self._requests = requests
        self._starts = starts
        self._further = further

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        for request, start in zip(self._requests, self._starts, strict=True):
            yield ScheduledRequest(request, start + self._further, 1, True)

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScheduledRequest]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | Sequence[ScheduledRequest]:
        if isinstance(index, slice):
            return _Decodes(self._requests[index], self._starts[index], self._further)
        return ScheduledRequest(self._requests[index], self._starts[index] + self._further, 1, True)


@dataclass(frozen=True, slots=True, eq=False)
class SteadyBatch(ScheduledBatch):
    """One such step.

    Attributes:
        deciding: the requests, in the order of `requests`.
        filling: of them, each whose newest block this step fills, with its computed tokens after the step.
        end_token_ids: token ids that may end any of them; with another, no request ends by its token.
    """

    deciding: tuple[Request, ...] = ()
    filling: tuple[tuple[Request, int], ...] = ()
    end_token_ids: frozenset[int] = frozenset()

    def ends_none(self, sampled: Sequence[Sequence[int]]) -> bool:
        """Whether no request ends by its new tokens."""
        return self.end_token_ids.isdisjoint(chain.from_iterable(sampled))


class SteadyDecode:
    """The steps after one of decodes alone, as long as the requests stay the same.

    Args:
        batch: that step.
        block_size: tokens of a cache block.
    """

    def __init__(self, batch: ScheduledBatch, block_size: int) -> None:
        self.version = batch.version
        self.requests = tuple(part.request for part in batch.requests)
        self._starts = [part.start for part in batch.requests]
        self._block_size = block_size
        self._further = 0
        # A step that starts at s chooses the token after s + 1 others; the last token is for the scheduler to take.
        self._last = min(
            len(request.prompt_token_ids) + request.max_output_tokens - 3 - start
            for request, start in zip(self.requests, self._starts, strict=True)
        )
        self._end_token_ids = frozenset[int]().union(*(request.end_token_ids for request in self.requests))
        self._rows: list[list[int]] = [[] for _ in range(block_size)]  # by their first place in a block
        for row, start in enumerate(self._starts):
            self._rows[start % block_size].append(row)

    @property
    def goes_on(self) -> bool:
        """Whether no request comes to its last token in the next step."""
        return self._further < self._last

    def beginning(self) -> list[tuple[Request, int]]:
        """The requests that begin a cache block in the next step, each with its computed tokens before it."""
        return self._at(self._further + 1)

    def take(self) -> SteadyBatch:
        """The next step, whose blocks are there. Its tokens are counted as computed and pending."""
        self._further += 1
        for request in self.requests:
            request.computed_tokens += 1
            request.pending_tokens += 1
        return SteadyBatch(
            requests=_Decodes(self.requests, self._starts, self._further),
            num_decodes=len(self.requests),
            num_tokens=len(self.requests),
            num_samples=len(self.requests),
            version=self.version,
            deciding=self.requests,
            filling=tuple(self._at(self._further + 1)),
            end_token_ids=self._end_token_ids,
        )

    def _at(self, further: int) -> list[tuple[Request, int]]:
        """Those who stand at the border of a block when they are so much further, and where that is."""
        rows = self._rows[-further % self._block_size]
        return [(self.requests[row], self._starts[row] + further) for row in rows]
