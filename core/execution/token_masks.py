"""Which tokens a request may choose next, where something limits them token by token, such as a grammar.

What limits them is a `TokenMatcher`: it stands in the request's sampling state and follows its output there. For each
step the masks of all limited rows are filled on the host, sent up in one piece, and applied to the logits at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from hookline.batch_processor import upload
from hookline_kernels.token_mask import mask_tokens

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class TokenMatcher(Protocol):
    """Follows one output and tells how it may go on.

    A matcher that is given a token it does not allow allows none from there on.
    """

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        """Writes which tokens are allowed after each of `drafts`; what was accepted stays as it is.

        Args:
            mask: [len(drafts) + 1, ceil(V / 32)] int32, contiguous, on the host: bit i % 32 of word i / 32 stands for
                token i. Rows behind a draft that is not allowed, or that leaves nothing but an end, allow nothing.
            drafts: tokens that may follow.
        """

    def accept(self, token_id: int) -> None:
        """Takes in the next token of the output."""

    def restart(self) -> None:
        """Goes back to before the output's first token."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end token can follow, or one has come."""


class GuardedMatcher:
    """A matcher whose failure ends its request and no other: from then on it allows nothing.

    Args:
        matcher: what may fail.
    """

    def __init__(self, matcher: TokenMatcher) -> None:
        self._matcher = matcher
        self._failed = False

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        self._try(lambda: self._matcher.fill(mask, drafts))
        if self._failed:
            mask.zero_()

    def accept(self, token_id: int) -> None:
        self._try(lambda: self._matcher.accept(token_id))

    def restart(self) -> None:
        self._try(self._matcher.restart)

    @property
    def is_finished(self) -> bool:
        return self._try(lambda: self._matcher.is_finished) or False

    def _try(self, call: Callable[[], Answer]) -> Answer | None:
        if self._failed:
            return None
        try:
            return call()
        except Exception:
            _log.exception("what limits an output has failed; its request ends")
            self._failed = True
            return None


class DelayedMatcher:
    """A matcher whose limits begin behind a token, such as the one that ends a thought.

    Args:
        matcher: limits what comes behind it.
        after: the token's id.
    """

    def __init__(self, matcher: TokenMatcher, after: int) -> None:
        self._matcher = matcher
        self._after = after
        self._begun = False

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        free = 0 if self._begun else _places_before(drafts, self._after)
        mask[:free].fill_(-1)
        if free < len(mask):
            self._matcher.fill(mask[free:], drafts[free:])

    def accept(self, token_id: int) -> None:
        if self._begun:
            self._matcher.accept(token_id)
        self._begun = self._begun or token_id == self._after

    def restart(self) -> None:
        self._matcher.restart()
        self._begun = False

    @property
    def is_finished(self) -> bool:
        return self._begun and self._matcher.is_finished


def _places_before(drafts: Sequence[int], token_id: int) -> int:
    """How many of the places before, between and behind `drafts` come before the first `token_id` among them."""
    return next((place for place, draft in enumerate(drafts) if draft == token_id), len(drafts)) + 1


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step, on the device.

    Attributes:
        rows: [M] int32, the rows of the logits that have one.
        bits: [M, ceil(V / 32)] int32.
    """

    rows: torch.Tensor
    bits: torch.Tensor

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of `logits` [R, V] with minus infinity for what is not allowed."""
        masked = logits.clone(memory_format=torch.contiguous_format)
        mask_tokens(masked, self.rows, self.bits)
        return masked


class StepMasks:
    """Masks in memory that a captured step reads: as many as it has rows, of which those in use come first.

    Args:
        count: M, rows of the largest step.
        vocab_size: width V of the logits.
    """

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self._rows = torch.full((count,), -1, dtype=torch.int32, device=device)
        self._bits = torch.zeros((count, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self._used = 0

    def write(self, masks: TokenMasks | None) -> None:
        """Puts the masks of the next step in the place of those of the one before."""
        used = 0 if masks is None else len(masks.rows)
        if masks is not None:
            self._rows[:used].copy_(masks.rows)
            self._bits[:used].copy_(masks.bits)
        if used < self._used:
            self._rows[used : self._used].fill_(-1)
        self._used = used

    def apply(self, logits: torch.Tensor) -> None:
        """Writes minus infinity for what is not allowed into `logits` [R, V]."""
        count = logits.shape[0]
        mask_tokens(logits, self._rows[:count], self._bits[:count])


def make_masks(
    limited: Iterable[tuple[int, TokenMatcher, Sequence[int]]], vocab_size: int, device: torch.device
) -> TokenMasks | None:
    """Fills and uploads the masks of a step; None where nothing is limited.

    Args:
        limited: of each limited request its first row of the logits, its matcher, and its drafts, which have the rows
            behind that.
        vocab_size: width V of the logits.
        device: where the logits are.
    """
    parts = list(limited)
    if not parts:
        return None
    count, words = sum(len(drafts) + 1 for _, _, drafts in parts), -(-vocab_size // 32)
    packed = torch.empty(count * (1 + words), dtype=torch.int32)  # one piece, so that one copy brings it
    rows, bits = packed[:count], packed[count:].view(count, words)
    place = 0
    for first, matcher, drafts in parts:
        end = place + len(drafts) + 1
        rows[place:end] = torch.arange(first, first + end - place, dtype=torch.int32)
        matcher.fill(bits[place:end], drafts)
        place = end
    packed = upload(packed, device)
    return TokenMasks(packed[:count], packed[count:].view(count, words))


def mask_kind(vocab_size: int, device: torch.device) -> Callable[[], object]:
    """A mask that is applied, for its kernel's compilation."""
    logits = torch.zeros((1, vocab_size), device=device)
    rows, bits = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1,), (1, -(-vocab_size // 32))))
    return partial(mask_tokens, logits, rows, bits)
