"""Banned phrases of several tokens, kept on the device beside the last tokens of the requests that ban them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hookline.batch_processor import upload
from hookline.scheduling.request import Request

Phrases = Sequence[tuple[Sequence[int], int]]

# Before a phrase's own tokens stands what every token fits; before a request's first token, what fits no other.
_ANY, _NO_TOKEN = -1, -2


class DevicePhrases:
    """Bans the last token of a phrase in rows whose request has just put out the tokens before it.

    Args:
        slots: how many, the one of padding included.
        device: where they are.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._phrases: dict[Request, tuple[int, Phrases]] = {}
        self._tails = torch.full((slots, 0), _NO_TOKEN, dtype=torch.int64, device=device)
        # Of N phrases: the slot, the tokens before the last [N, L], and the last; None where it has to be made anew.
        self._table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def take_in(self, request: Request, slot: int, phrases: Phrases) -> None:
        """Takes a request that has come to a slot, with the tokens that it has."""
        self._phrases[request] = slot, phrases
        self._table = None
        known, longest = self._tails.shape[1], max(len(before) for before, _ in phrases)
        if longest > known:
            self._tails = torch.nn.functional.pad(self._tails, (longest - known, 0), value=_NO_TOKEN)
        width = max(longest, known)
        tail = request.token_ids(max(0, len(request.prompt_token_ids) + len(request.output_token_ids) - width), 2**62)
        row = [_NO_TOKEN] * (width - len(tail)) + tail
        self._tails[slot].copy_(upload(torch.tensor(row), self._device))

    def release(self, request: Request) -> None:
        """Forgets a request."""
        if self._phrases.pop(request, None) is not None:
            self._table = None

    def ban(self, out: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes -inf where a phrase would be complete.

        Args:
            out: [E + 1, V], contiguous: the logits of rows, and a row for what concerns none of them.
            slots: [E] int64, of the rows.
        """
        if not self._phrases:
            return
        owners, before, ends = self._table = self._table or self._make_table()
        rows, vocab = slots.shape[0], out.shape[1]
        tails = self._tails.index_select(0, owners)[:, -before.shape[1] :]
        complete = ((before == tails) | (before == _ANY)).all(dim=-1)
        row_of_slot = torch.full_like(self._tails[:, 0], rows)
        row_of_slot.index_copy_(0, slots, torch.arange(rows, device=slots.device))
        # All that concern no row go to the same one, so that nothing is written that depends on an order.
        row = torch.where(complete, row_of_slot.index_select(0, owners), rows)
        out.view(-1).index_fill_(0, row * vocab + ends, -torch.inf)

    def append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Takes the next token [E] of each of `slots` [E]."""
        if self._phrases:
            tails = self._tails.index_select(0, slots)
            self._tails.index_copy_(0, slots, torch.cat([tails[:, 1:], tokens[:, None]], dim=1))

    def _make_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        every = [(slot, before, end) for slot, phrases in self._phrases.values() for before, end in phrases]
        table = np.full((len(every), 2 + max(len(before) for _, before, _ in every)), _ANY, np.int64)
        for row, (slot, before, end) in enumerate(every):
            table[row, 0], table[row, 1] = slot, end
            table[row, table.shape[1] - len(before) :] = before
        found = upload(torch.from_numpy(table), self._device)
        return found[:, 0].contiguous(), found[:, 2:], found[:, 1].contiguous()
