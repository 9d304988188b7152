"""What the sampler keeps of one request, and the edits of its logits that depend on its tokens.

A request's draw for output number i depends on its seed and on i alone, so that neither its neighbours nor a
preemption changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hookline.execution.token_masks import GuardedMatcher, TokenMatcher
from hookline.sampling_params import GREEDY_TEMPERATURE, SamplingParams

_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15

Ids = npt.NDArray[np.int64]


def _mix(z: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _element(key: int, position: int) -> int:
    """Element `position` of SplitMix64's stream that starts at `key`."""
    return _mix((key + (position + 1) * _GAMMA) & _MASK64)


def derive_seed(seed: int, number: int) -> int:
    """A seed (63 bits) for request or continuation `number` of something that has the seed `seed`."""
    return _element(_mix((seed + _GAMMA) & _MASK64), number) >> 1


def _ids(values: Iterable[int], vocab_size: int) -> Ids:
    """Distinct token ids in ascending order, without those that the model cannot choose."""
    return np.array(sorted({value for value in values if 0 <= value < vocab_size}), dtype=np.int64)


class _TokenCounts:
    """Distinct token ids and how often each came, in arrays that grow."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        place = self._index.setdefault(token_id, len(self._index))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def copy(self) -> _TokenCounts:
        copied = _TokenCounts()
        copied._index, copied._ids, copied._counts = self._index.copy(), self._ids.copy(), self._counts.copy()
        return copied

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._index)]


class SamplingState:
    """One request's state in the sampler, made once at admission and kept until the request ends.

    Args:
        params: how to choose.
        prompt_token_ids: the prompt, for the repetition penalty and for bad words.
        eos_token_ids: the model's end tokens, which `min_tokens` keeps out of reach.
        vocab_size: width V of the logits. Ids outside it cannot be chosen and are left out here;
            `SamplingParams.check_against` refuses those that a user gave.
        seed: fixes all of the request's draws; `derive_seed` makes one for each of `n` continuations.
        bad_word_ids: token sequences; the last token of each is banned after the ones before it.
        output_token_ids: tokens that the request has already.
        matcher: limits the output token by token; None where nothing does.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int],
        vocab_size: int,
        seed: int,
        bad_word_ids: Sequence[Sequence[int]] = (),
        output_token_ids: Iterable[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        self.params = params
        self.temperature = 0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature
        self.top_k = params.top_k if params.top_k < vocab_size else 0
        self.key = _mix((seed + _GAMMA) & _MASK64)
        self.allowed_ids = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, vocab_size)
        self.bias_ids = _ids(params.logit_bias, vocab_size)
        self.bias_values = np.array([params.logit_bias[int(i)] for i in self.bias_ids], dtype=np.float32)
        self.end_ids = _ids([*eos_token_ids, *params.stop_token_ids], vocab_size)
        self.bad_ids = _ids([ids[0] for ids in bad_word_ids if len(ids) == 1], vocab_size)
        self.phrases = [(tuple(ids[:-1]), ids[-1]) for ids in bad_word_ids if len(ids) > 1 and ids[-1] < vocab_size]
        self._tail_len = max((len(before) for before, _ in self.phrases), default=0)
        self._prompt_tail = tuple(prompt_token_ids[-self._tail_len :]) if self._tail_len else ()
        self._prompt_ids = {i for i in prompt_token_ids if i < vocab_size} if params.repetition_penalty != 1.0 else ()
        self.matcher: TokenMatcher | None = None if matcher is None else GuardedMatcher(matcher)
        self._restart()
        self.edits_logits = bool(
            self.allowed_ids is not None or self.bias_ids.size or self.bad_ids.size or self.phrases
        )
        self.edits_logits |= bool(params.min_tokens or self.seen or self.counts)
        self.follow(list(output_token_ids))

    def _restart(self) -> None:
        """Without output tokens."""
        params = self.params
        self.num_outputs = 0
        self._tail = self._prompt_tail
        if self.matcher is not None:
            self.matcher.restart()
        self.seen = _TokenCounts(self._prompt_ids) if params.repetition_penalty != 1.0 else None
        self.counts = _TokenCounts() if params.presence_penalty or params.frequency_penalty else None

    def signed_key(self, stream: int = 0) -> int:
        """The key of a stream of draws (see `uniform`) as a signed number of 64 bits, for tensors."""
        key = self._key(stream)
        return key - 2**64 if key >= 2**63 else key

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in those of a request's output tokens that it has not yet."""
        try:
            for token_id in output_token_ids[self.num_outputs :]:
                self.append(token_id)
        except BaseException:
            self._restart()  # an interrupt may have left a token taken in by half
            raise

    def append(self, token_id: int) -> None:
        """Takes in the next output token."""
        self.num_outputs += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self.edits_logits:
            if self._tail_len:
                self._tail = (*self._tail, token_id)[-self._tail_len :]
            if self.seen is not None:
                self.seen.add(token_id)
            if self.counts is not None:
                self.counts.add(token_id)

    def after(self, token_id: int) -> SamplingState:
        """This state as it would be with one more output token; without its matcher, which knows drafts by itself."""
        copied = copy.copy(self)
        copied.matcher = None
        if self.edits_logits:
            copied.seen = None if self.seen is None else self.seen.copy()
            copied.counts = None if self.counts is None else self.counts.copy()
        copied.append(token_id)
        return copied

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Whether what limits the output leaves nothing after these tokens but an end token, or has seen one."""
        self.follow(output_token_ids)
        return self.matcher is not None and self.matcher.is_finished

    def uniform(self, ahead: int = 0, stream: int = 0) -> float:
        """The draw for the output token after `ahead` more: 53 bits, in [0, 1).

        Args:
            stream: which of several independent draws for that token; 0 is the one that chooses it.
        """
        return (_element(self._key(stream), self.num_outputs + ahead) >> 11) * 2.0**-53

    def _key(self, stream: int) -> int:
        return _mix(self.key ^ stream) if stream else self.key

    def banned_ids(self) -> Ids:
        """Tokens that cannot be chosen now, beside those outside `allowed_ids`."""
        banned = [self.bad_ids]
        if self.num_outputs < self.params.min_tokens:
            banned.append(self.end_ids)
        if self.phrases:
            ends = [last for before, last in self.phrases if self._tail[-len(before) :] == before]
            banned.append(np.array(ends, dtype=np.int64))
        return np.concatenate(banned)


def edit_logits(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingState]]) -> None:
    """Applies, in place, every option that comes before the temperature, in the order of `SamplingParams`.

    Args:
        logits: [R, V] float32.
        rows: the rows of `logits` whose request has such options.
    """
    allowed = [(row, state.allowed_ids) for row, state in rows if state.allowed_ids is not None]
    if allowed:
        places = _places(allowed, logits.device)
        kept = logits[places]
        logits[torch.tensor([row for row, _ in allowed], device=logits.device)] = -torch.inf
        logits[places] = kept
    logits[_places([(row, state.banned_ids()) for row, state in rows], logits.device)] = -torch.inf
    biased = [(row, state) for row, state in rows if state.bias_ids.size]
    if biased:
        places = _places([(row, state.bias_ids) for row, state in biased], logits.device)
        logits[places] += torch.from_numpy(np.concatenate([state.bias_values for _, state in biased])).to(logits.device)
    _penalize(logits, rows)


def _penalize(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingState]]) -> None:
    repeated = [(row, state.seen.ids, state.params) for row, state in rows if state.seen is not None]
    if repeated:
        places = _places([(row, ids) for row, ids, _ in repeated], logits.device)
        penalties = [np.full(ids.size, params.repetition_penalty, np.float32) for _, ids, params in repeated]
        factor = torch.from_numpy(np.concatenate(penalties)).to(logits.device)
        found = logits[places]
        logits[places] = torch.where(found < 0, found * factor, found / factor)
    counted = [(row, state.counts, state.params) for row, state in rows if state.counts is not None]
    if counted:
        places = _places([(row, counts.ids) for row, counts, _ in counted], logits.device)
        amounts = [counts.counts * p.frequency_penalty + p.presence_penalty for _, counts, p in counted]
        logits[places] -= torch.from_numpy(np.concatenate(amounts).astype(np.float32)).to(logits.device)


def _places(rows: Sequence[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token id of every place named, as two index tensors."""
    row_ids = np.repeat([row for row, _ in rows], [ids.size for _, ids in rows])
    token_ids = np.concatenate([ids for _, ids in rows])
    return torch.from_numpy(row_ids.astype(np.int64)).to(device), torch.from_numpy(token_ids).to(device)
