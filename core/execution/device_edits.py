"""Penalties, biases and bans of the running requests, kept on the device: a slot each, as in `DeviceBatch`.

Written when a request takes its slot, and followed there token by token. The tables [slots, V] are made when the first
request comes that needs them: 4 bytes a place for penalties, 4 for biases and bans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from hookline.batch_processor import upload
from hookline.errors import NotEnoughMemoryError
from hookline.execution.device_phrases import DevicePhrases
from hookline.execution.sampling_state import Ids, SamplingState
from hookline.memory_planner import format_bytes
from hookline.scheduling.request import Request
from hookline_kernels.logit_edits import IN_PROMPT, edit_logits


class DeviceEdits:
    """What is kept of requests whose options change their logits.

    Args:
        slots: how many, the one of padding included.
        vocab_size: width V of the logits.
        device: where they are.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots, self._vocab, self._device = slots, vocab_size, device
        self._states: dict[Request, SamplingState] = {}
        self._penalties = torch.zeros((slots, 3), dtype=torch.float32, device=device)
        self._counts: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._phrases = DevicePhrases(slots, device)

    def reserve(self, state: SamplingState) -> None:
        """Makes the tables that a request needs.

        Raises:
            NotEnoughMemoryError: if there is no room for them.
        """
        if self._counts is None and _has_penalties(state):
            self._counts = self._table(torch.int32, "Penalties")
        if self._bias is None and _has_bias(state):
            self._bias = self._table(torch.float32, "Biases, banned words and allowed tokens")

    def _table(self, dtype: torch.dtype, what: str) -> torch.Tensor:
        try:
            return torch.zeros((self._slots, self._vocab), dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            size = format_bytes(self._slots * self._vocab * dtype.itemsize)
            raise NotEnoughMemoryError(
                f"{what} need a table of {size} on the device, which has no room for it",
                hint="Start the engine with less cache (kv_cache_memory) or fewer requests at a time (max_running).",
            ) from error

    def take_in(self, requests: Sequence[Request], slots: Sequence[int], states: Sequence[SamplingState]) -> None:
        """Takes those of `requests` that have just come to their slots and edit their logits, with their tokens."""
        own = [each for each in zip(requests, slots, states, strict=True) if each[2].edits_logits]
        if not own:
            return
        for request, slot, state in own:
            self.reserve(state)
            self._states[request] = state
            if state.phrases:
                self._phrases.take_in(request, slot, state.phrases)
        params = [state.params for _, _, state in own]
        penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        places = self._upload([slot for _, slot, _ in own])
        self._penalties.index_copy_(0, places, upload(torch.tensor(penalties, dtype=torch.float32), self._device))
        if self._counts is not None:
            self._take_counts(self._counts, own, places)
        if self._bias is not None:
            self._take_bias(self._bias, own, places)

    def _take_counts(
        self, counts: torch.Tensor, own: Sequence[tuple[Request, int, SamplingState]], places: torch.Tensor
    ) -> None:
        counts.index_fill_(0, places, 0)
        prompts = [
            (slot, np.array([i for i in request.prompt_token_ids if i < self._vocab], dtype=np.int64))
            for request, slot, state in own
            if state.seen is not None
        ]
        self._fill(counts, prompts, IN_PROMPT)
        chosen = self._flat([(slot, np.array(request.output_token_ids, np.int64)) for request, slot, _ in own])
        if chosen is not None:
            counts.view(-1).index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))

    def _take_bias(
        self, bias: torch.Tensor, own: Sequence[tuple[Request, int, SamplingState]], places: torch.Tensor
    ) -> None:
        bias.index_fill_(0, places, 0.0)
        limited = [(slot, state.allowed_ids) for _, slot, state in own if state.allowed_ids is not None]
        if limited:
            bias.index_fill_(0, self._upload([slot for slot, _ in limited]), -torch.inf)
            self._fill(bias, limited, 0.0)
        biased = self._flat([(slot, state.bias_ids) for _, slot, state in own])
        if biased is not None:
            values = np.concatenate([state.bias_values for _, _, state in own])
            bias.view(-1).index_add_(0, biased, upload(torch.from_numpy(values), self._device))
        self._fill(bias, [(slot, state.bad_ids) for _, slot, state in own], -torch.inf)

    def release(self, request: Request) -> None:
        """Forgets a request that leaves its slot."""
        if self._states.pop(request, None) is not None:
            self._phrases.release(request)

    def rows(self, requests: Sequence[Request]) -> list[int]:
        """Which of `requests` edit their logits."""
        states = self._states
        return [row for row, request in enumerate(requests) if request in states] if states else []

    def edit(
        self, logits: torch.Tensor, places: torch.Tensor, requests: Sequence[Request], numbers: Sequence[int]
    ) -> torch.Tensor:
        """Edited copies [E, V] float32 of the requests' rows.

        Args:
            logits: [R, V].
            places: [2, E] int64: the rows, and the requests' slots.
            requests: E of them.
            numbers: how many output tokens each has before the one that is chosen now.
        """
        rows, vocab = len(requests), self._vocab
        # The last row is nobody's: bans that do not hold are written there.
        out = torch.empty((rows + 1, vocab), dtype=torch.float32, device=logits.device)
        edit_logits(logits, places, self._penalties, self._counts, self._bias, out[:rows])
        early = [
            (row, self._states[request].end_ids)
            for row, (request, number) in enumerate(zip(requests, numbers, strict=True))
            if number < request.params.min_tokens
        ]
        self._fill(out, early, -torch.inf)
        self._phrases.ban(out, places[1])
        return out[:rows]

    def append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Takes the next token [E] of each of `slots` [E]."""
        if self._counts is not None:
            ones = torch.ones_like(slots, dtype=torch.int32)
            self._counts.view(-1).index_add_(0, slots * self._vocab + tokens, ones)
        self._phrases.append(slots, tokens)

    def _flat(self, ids: Sequence[tuple[int, Ids]]) -> torch.Tensor | None:
        """Places of token ids in a table [rows, V] read as one row, from pairs of a row and ids; None without any."""
        places = [row * self._vocab + each for row, each in ids if each.size]
        return upload(torch.from_numpy(np.concatenate(places)), self._device) if places else None

    def _fill(self, table: torch.Tensor, ids: Sequence[tuple[int, Ids]], value: float) -> None:
        places = self._flat(ids)
        if places is not None:
            table.view(-1).index_fill_(0, places, value)

    def _upload(self, values: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int64), self._device)


def edit_kinds(vocab_size: int, device: torch.device) -> list[Callable[[], object]]:
    """An edit of each kind that has a kernel of its own, for its compilation."""
    logits, penalties = torch.zeros((1, vocab_size), device=device), torch.ones((1, 3), device=device)
    places = torch.zeros((2, 1), dtype=torch.int64, device=device)
    kinds = [(counts, bias) for counts in (None, logits.int()) for bias in (None, logits)]
    return [
        partial(edit_logits, logits, places, penalties, counts, bias, torch.empty_like(logits))
        for counts, bias in kinds
    ]


def _has_penalties(state: SamplingState) -> bool:
    return state.seen is not None or state.counts is not None


def _has_bias(state: SamplingState) -> bool:
    return state.allowed_ids is not None or bool(state.bias_ids.size or state.bad_ids.size)
