"""Log probabilities that the device works out and the host reads when they have come.

The arithmetic is the sampler's, so that the numbers are, too; nothing in it asks the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hookline.execution.sampler import whole_weights
from hookline.scheduling.output import TokenLogprob

# Logits whose weights and keys, 8 bytes each, are in memory at a time.
_PLACES = 2**22


@dataclass(frozen=True, slots=True)
class LogprobsOnTheWay:
    """Log probabilities of N tokens, that may still be on their way to the host.

    Attributes:
        tokens: their ids; None where the step chooses them.
        tops: how many likeliest tokens each one wants.
        values: [N, 2 + 2 * most] float64 on the host: logprob, rank, the likeliest ids, and their logprobs.
    """

    tokens: Sequence[int] | None
    tops: Sequence[int]
    values: torch.Tensor

    def entries(self, chosen: Sequence[int] = ()) -> list[TokenLogprob]:
        """One a token, once they have come.

        Args:
            chosen: the tokens that the step chose, where they were not known before.
        """
        tokens = chosen if self.tokens is None else self.tokens
        most = (self.values.shape[1] - 2) // 2
        return [
            TokenLogprob(
                token, row[0], int(row[1]), tuple(zip(map(int, row[2 : 2 + top]), row[2 + most :], strict=False))
            )
            for token, top, row in zip(tokens, self.tops, self.values.tolist(), strict=True)
        ]


@torch.inference_mode()
def logprob_values(logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, most: int) -> torch.Tensor:
    """What `LogprobsOnTheWay.values` holds, on the device.

    Args:
        logits: [R, V], any float type.
        rows: [N] int64, which rows; None for all.
        token_ids: [N] int64, one a row.
        most: the likeliest tokens to report, at most V.
    """
    found = []
    each = max(1, _PLACES // logits.shape[1])
    for start in range(0, token_ids.shape[0], each):
        end = start + each
        part = logits[start:end] if rows is None else logits.index_select(0, rows[start:end])
        found.append(_values(part.float(), token_ids[start:end], most))
    return torch.cat(found)


def _values(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> torch.Tensor:
    largest = logits.amax(dim=-1, keepdim=True)
    weights = whole_weights(logits, largest, torch.ones_like(largest))
    norm = largest.double() + (weights.sum(dim=-1, keepdim=True).double() / 2.0**40).log()
    own = logits.gather(-1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1, keepdim=True) + 1
    ids = _likeliest(logits, most)
    return torch.cat([own.double() - norm, ranks.double(), ids.double(), logits.gather(-1, ids).double() - norm], dim=1)


def _likeliest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """Ids [N, most] of the largest of each row in falling order, the lower id first among equals.

    Whole numbers stand for value and id together: no two are equal, so that the order of equals is not left open.
    """
    if most == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # makes -0 level with 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    vocab = logits.shape[1]
    keys = order * 2**32 + torch.arange(vocab - 1, -1, -1, device=logits.device)
    return keys.topk(most, dim=-1).indices


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is complete when the stream has come so far; nothing waits for it here."""
    if not values.is_cuda:
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copy.copy_(values, non_blocking=True)
