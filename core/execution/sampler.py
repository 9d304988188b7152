"""Chooses the next token of every row, batched, in fp32.

Every row is reduced with integer arithmetic: a token weighs floor(2**40 * exp((logit - largest) / temperature)), and
sums of whole numbers do not depend on the order of summation. So a row's token is the same bits alone and in any
batch, on one thread and on many. A token 2**-40 times as likely as the likeliest cannot be drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hookline.errors import UsageError
from hookline.execution.sampling_state import SamplingState, edit_logits
from hookline.execution.token_masks import TokenMasks
from hookline.scheduling.output import TokenLogprob

_SCALE = 2.0**40
_FIRST_CANDIDATES = 1024
_GROWTH = 16
_RUN = 256


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The tokens of one step.

    Attributes:
        token_ids: one a row; -1 in bad rows.
        bad_rows: rows without a token, whose requests must fail: their logits held NaN or infinity, or their own
            options left none.
        logprobs: one entry a row, None where the request wants none or the row is bad; None if no request wants any.
    """

    token_ids: list[int]
    bad_rows: list[int]
    logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class _Filters:
    """Options of the rows that are drawn, packed; every tensor is [R, 1].

    Attributes:
        rows: [R] int64, their rows in the logits; None if these are all rows in order.
        cuts: whether rows have a top-k or a top-p, which need the likeliest tokens in order.
    """

    states: tuple[SamplingState, ...]
    rows: torch.Tensor | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    cuts: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """What does not change as long as the same requests stand in the same rows."""

    states: tuple[SamplingState, ...]
    edited: tuple[tuple[int, SamplingState], ...]
    reported: tuple[int, ...]
    drawn: tuple[_Filters, ...]


class Sampler:
    """Chooses tokens.

    Args:
        vocab_size: width V of the logits.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.forget()

    def forget(self) -> None:
        """Lets go of the last step's requests, one of which has ended."""
        self._batch = _Batch((), (), (), ())

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
    ) -> SampleResult:
        """The next token of every row. Does not change `logits` or `states`.

        Args:
            logits: [R, V], any float type.
            states: the request of each row.
            masks: which tokens rows may choose.

        Raises:
            UsageError: if the logits' shape is not [number of states, V].
        """
        if logits.shape != (len(states), self.vocab_size):
            raise UsageError(f"logits are {tuple(logits.shape)}; expected {(len(states), self.vocab_size)}")
        if self._batch.states != tuple(states):
            self._batch = _pack(tuple(states), self.device)
        batch = self._batch
        raw = scores = logits.float()
        if masks is not None:
            scores = masks.apply(raw)
        if batch.edited:
            scores = scores.clone()
            edit_logits(scores, batch.edited)
        best = _argmax(scores)
        largest = scores.gather(-1, best)
        chosen = best[:, 0]
        for drawn in batch.drawn:
            if drawn.rows is None:
                chosen = _draw_rows(scores, largest, drawn)
            else:
                chosen = chosen.index_copy(0, drawn.rows, _draw_rows(scores[drawn.rows], largest[drawn.rows], drawn))
        token_ids: list[int] = chosen.masked_fill(~largest[:, 0].isfinite(), -1).tolist()
        bad_rows = [row for row, token_id in enumerate(token_ids) if token_id < 0]
        return SampleResult(token_ids, bad_rows, _report(raw, token_ids, batch) if batch.reported else None)


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """[R, 1], the first id of each row's largest score. torch looks for a largest value much faster than for its place:
    so it does so run by run, and for the place in one run of each row alone."""
    runs = scores.shape[1] // _RUN * _RUN
    if scores.device.type != "cpu" or runs != scores.shape[1]:
        return scores.argmax(dim=-1, keepdim=True)
    parts = scores.view(scores.shape[0], -1, _RUN)
    part = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
    inside = parts.gather(1, part[:, :, None].expand(-1, -1, _RUN))[:, 0].argmax(dim=-1, keepdim=True)
    return part * _RUN + inside


def _pack(states: tuple[SamplingState, ...], device: torch.device) -> _Batch:
    drawn: list[_Filters] = []
    for cuts in (False, True):
        rows = [
            row
            for row, state in enumerate(states)
            if state.temperature and (state.top_k > 0 or state.params.top_p < 1.0) is cuts
        ]
        if rows:
            chosen = tuple(states[row] for row in rows)
            columns = [(s.temperature, s.params.top_p, s.params.min_p) for s in chosen]
            packed = torch.tensor(columns, dtype=torch.float64, device=device)
            drawn.append(
                _Filters(
                    states=chosen,
                    rows=None if len(rows) == len(states) else torch.tensor(rows, device=device),
                    temperature=packed[:, :1].float(),
                    top_k=torch.tensor([[s.top_k] for s in chosen], device=device),
                    top_p=packed[:, 1:2],
                    min_p=packed[:, 2:].float(),
                    cuts=cuts,
                )
            )
    return _Batch(
        states=states,
        edited=tuple((row, state) for row, state in enumerate(states) if state.edits_logits),
        reported=tuple(row for row, state in enumerate(states) if state.params.logprobs is not None),
        drawn=tuple(drawn),
    )


def _draw_rows(scores: torch.Tensor, largest: torch.Tensor, filters: _Filters) -> torch.Tensor:
    """One token a row of `scores` [R, V], drawn from what the filters keep: [R].

    Args:
        largest: [R, 1], each row's largest score.
    """
    draws = torch.tensor([state.uniform() for state in filters.states], dtype=torch.float64, device=scores.device)
    if filters.cuts:
        return _draw_cut(scores, largest, filters, draws)
    min_p = filters.min_p if any(state.params.min_p for state in filters.states) else None
    return _draw(whole_weights(scores, largest, filters.temperature, min_p), draws)


def _draw_cut(scores: torch.Tensor, largest: torch.Tensor, filters: _Filters, draws: torch.Tensor) -> torch.Tensor:
    """`_draw_rows` for rows with top-k or top-p: sorts only as many likeliest tokens as the cut turns out to need."""
    if all(state.top_k for state in filters.states):
        totals = torch.zeros_like(filters.top_k)
    else:
        totals = whole_weights(scores, largest, filters.temperature).sum(dim=-1, keepdim=True)
    most = max(state.top_k for state in filters.states)
    size = 2 * most + 64 if all(state.top_k for state in filters.states) else max(2 * most, _FIRST_CANDIDATES)
    chosen = torch.zeros_like(filters.top_k[:, 0])
    rest = torch.arange(len(filters.states), device=scores.device)
    while rest.numel():
        part = scores if rest.numel() == scores.shape[0] else scores[rest]
        values, ids = likeliest(part, size)
        temperature, top_k, top_p, min_p = (
            column[rest] for column in (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
        )
        weights = whole_weights(values, largest[rest], temperature)
        kth = values.gather(-1, (top_k - 1).clamp(0, values.shape[-1] - 1))
        weights = weights.masked_fill((values < kth) & (top_k > 0), 0)
        total = torch.where(top_k > 0, weights.sum(dim=-1, keepdim=True), totals[rest])
        before = weights.cumsum(dim=-1) - weights
        kept = before.double() < top_p * total.double()
        last_kept = torch.where(top_k > 0, kth, values.gather(-1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0)))
        done = (values[:, -1:] < last_kept)[:, 0]
        if values.shape[-1] == scores.shape[-1]:
            done = torch.ones_like(done)
        weights = weights * (kept & (_ratios(values, largest[rest], temperature) >= min_p))
        ids, order = ids.sort(dim=-1)
        places = _draw(weights.gather(-1, order), draws[rest])
        tokens = ids.gather(-1, places[:, None])[:, 0]
        chosen[rest[done]] = tokens[done]
        rest = rest[~done]
        size *= _GROWTH
    return chosen


def likeliest(scores: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest of each row in falling order, the lower id first among equals: values and ids [R, size].

    Which ids stand for the last value is open where more than `size` tokens reach it.
    """
    if size >= scores.shape[-1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _ratios(scores: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probability over that of the likeliest token, [R, N] float32."""
    return (scores - largest).div_(temperature).exp_()


def whole_weights(
    scores: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor | None = None
) -> torch.Tensor:
    """Whole-number weights [R, N] int64 in proportion to the probabilities; the likeliest token weighs 2**40."""
    ratios = _ratios(scores, largest, temperature)
    if min_p is not None:
        ratios = ratios.masked_fill_(ratios < min_p, 0.0)
    return ratios.mul_(_SCALE).long()


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The place where the running sum of each row passes its draw's share of the total: [R].

    Args:
        weights: [R, N] int64.
        draws: [R] float64 in [0, 1).
    """
    rows, width = weights.shape
    missing = -width % _RUN
    runs = (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).view(rows, -1, _RUN)
    ends = runs.sum(dim=-1).cumsum(dim=-1)
    total = ends[:, -1]
    share = torch.minimum((draws * total.double()).long(), total - 1)[:, None]
    run = (ends <= share).sum(dim=-1, keepdim=True).clamp_(max=ends.shape[-1] - 1)
    share = share - torch.where(run > 0, ends.gather(-1, (run - 1).clamp(min=0)), 0)
    sums = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN))[:, 0].cumsum(dim=-1)
    place = run[:, 0] * _RUN + (sums <= share).sum(dim=-1)
    return place.clamp_(max=width - 1)


def _report(logits: torch.Tensor, token_ids: list[int], batch: _Batch) -> list[TokenLogprob | None]:
    """Logprobs of the rows that want them, from logits before any option."""
    answer: list[TokenLogprob | None] = [None] * len(batch.states)
    rows = [row for row in batch.reported if token_ids[row] >= 0]
    if rows:
        most = max(batch.states[row].params.logprobs or 0 for row in rows)
        found = token_logprobs(logits[rows], [token_ids[row] for row in rows], most)
        for row, entry in zip(rows, found, strict=True):
            top = batch.states[row].params.logprobs or 0
            answer[row] = dataclasses.replace(entry, top=entry.top[:top])
    return answer


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top_n: int) -> list[TokenLogprob]:
    """Logprob, rank and `top_n` likeliest tokens of each row.

    Args:
        logits: [N, V] float32.
        token_ids: one a row.
        top_n: at most V.
    """
    chosen = torch.tensor(token_ids, device=logits.device)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = whole_weights(logits, largest, torch.ones_like(largest))
    norm = largest.double() + (weights.sum(dim=-1, keepdim=True).double() / _SCALE).log()
    own = logits.gather(-1, chosen[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    logprobs = (own.double() - norm)[:, 0].tolist()
    values, ids = _top(logits, top_n)
    tops = (values.double() - norm).tolist()
    rows = zip(token_ids, logprobs, ranks.tolist(), ids.tolist(), tops, strict=True)
    return [
        TokenLogprob(token_id, logprob, rank, tuple(zip(top_ids, top, strict=True)))
        for token_id, logprob, rank, top_ids, top in rows
    ]


def _top(logits: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_n` likeliest of each row, the lower id first among equals, however many are level: values and ids."""
    size = top_n + 12
    while True:
        values, ids = likeliest(logits, size)
        level = top_n and values.shape[-1] < logits.shape[-1] and bool((values[:, -1] == values[:, top_n - 1]).any())
        if not level:
            return values[:, :top_n], ids[:, :top_n]
        size *= _GROWTH
