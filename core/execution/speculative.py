"""Speculation's arithmetic: merge drafts into a batch, decide which are accepted, shift tokens for the next proposal.

Plain torch over whole tensors. Nothing here reads a tensor on the host, and shapes follow from those of the arguments
alone, so that a step made of these functions can be a CUDA graph. K is the width of the drafts, and a request may have
fewer; V the vocabulary. Row j of a request, 0 to K, gives the token after its first j drafts.

Sources: Leviathan, Kalman, Matias 2023 and Chen et al. 2023 for sampled proposals; relaxed acceptance as TensorRT-LLM
has it for DeepSeek-R1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a verification gave.

    Attributes:
        counts: [B] int64, how many drafts each request accepted: n.
        next_tokens: [B] int64, the token after them: the recovered one of the first rejected draft, or the bonus.
    """

    counts: torch.Tensor
    next_tokens: torch.Tensor


def merge_drafts(
    token_ids: torch.Tensor, query_starts: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's tokens, then its drafts, end to end.

    Args:
        token_ids: [S].
        query_starts: [B + 1], first token of each request; the last entry is S.
        drafts: [B, K].
        num_drafts: [B], how many of each row count.

    Returns:
        the tokens [S + B * K], zeros behind the last, and the first row of each request [B + 1].
    """
    size, width = token_ids.shape[0] + drafts.numel(), drafts.shape[1]
    before = torch.nn.functional.pad(num_drafts.cumsum(0), (1, 0))
    starts = query_starts + before
    places = torch.arange(token_ids.shape[0], device=token_ids.device)
    owners = torch.searchsorted(query_starts[1:].contiguous(), places, right=True)
    merged = token_ids.new_zeros(size + 1)  # what does not count goes to the place behind the last
    merged.index_copy_(0, places + before[owners], token_ids)
    columns = torch.arange(width, device=drafts.device)
    rows = (starts[1:] - num_drafts)[:, None] + columns
    rows = torch.where(columns < num_drafts[:, None], rows, size)
    merged.index_copy_(0, rows.flatten(), drafts.flatten())
    merged[size:].zero_()  # a number of the host would be copied, which a graph cannot hold
    return merged[:size], starts


def shift(token_ids: torch.Tensor, last_rows: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The token after each row's: [T]. Of rows behind a request's last accepted token it is any token.

    Accepted drafts are the tokens that were emitted, so they follow each other as they stand, relaxed or not.

    Args:
        token_ids: [T], merged.
        last_rows: [B], the row of each request's last accepted token.
        following: [B], the token after it: the one that was chosen, or the prompt's next where the prompt goes on.
    """
    return token_ids.roll(-1).index_copy(0, last_rows, following)


def accept(matches: torch.Tensor, targets: torch.Tensor, num_drafts: torch.Tensor) -> Acceptance:
    """Accepts drafts up to the first that does not match.

    Args:
        matches: [B, K] bool, whether each draft would be accepted after those before it.
        targets: [B, K + 1] int64, what stands in its place where it is not, and in column `num_drafts` the bonus.
        num_drafts: [B].
    """
    columns = torch.arange(matches.shape[1], device=matches.device)
    kept = matches & (columns < num_drafts[:, None])
    counts = kept.long().cumprod(dim=1).sum(dim=1)
    return Acceptance(counts, targets.gather(1, counts[:, None])[:, 0])


def exact_matches(drafts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether each draft [B, K] is the token that the target itself chose there, by argmax or by its own draw.

    What is committed is then always the target's own choice: a request's output does not depend on its drafts.

    Args:
        targets: [B, K + 1].
    """
    return drafts == targets[:, : drafts.shape[1]]


def relaxed_matches(logits: torch.Tensor, drafts: torch.Tensor, top_k: int, delta: float) -> torch.Tensor:
    """Whether each draft is among the `top_k` likeliest tokens and at most `delta` less probable than the likeliest.

    One whose logit is minus infinity is forbidden, and never is.

    Args:
        logits: [B, K, V] before temperature and cuts.
        drafts: [B, K].
    """
    logits = logits.float()
    own = logits.gather(-1, drafts[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < drafts[..., None]))  # among equals the lower id comes first
    probabilities = logits.softmax(dim=-1)
    near = probabilities.gather(-1, drafts[..., None]) >= probabilities.amax(dim=-1, keepdim=True) - delta
    return (before.sum(dim=-1) < top_k) & near[..., 0] & (own > -torch.inf)[..., 0]


def sampled_matches(
    drafts: torch.Tensor, proposed: torch.Tensor, target: torch.Tensor, coins: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies drafts that were drawn: accepted with probability min(1, p / q), else one from max(p - q, 0).

    Args:
        drafts: [B, K].
        proposed: [B, K, V], q: the probabilities that they were drawn with.
        target: [B, K, V], p.
        coins, draws: [B, K] in [0, 1), for the decision and for the recovered token.

    Returns:
        matches [B, K] and recovered tokens [B, K]. What is committed has the distribution p.
    """
    places = drafts[..., None]
    matches = coins * proposed.gather(-1, places)[..., 0] < target.gather(-1, places)[..., 0]
    rest = (target - proposed).clamp(min=0)
    nothing_left = rest.sum(dim=-1, keepdim=True) <= 0  # p = q, where nothing is rejected but by rounding
    return matches, draw(torch.where(nothing_left, target, rest), draws)


def draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The place where the running sum of `weights` [..., V] passes the share `draws` [...] of its total."""
    sums = weights.double().cumsum(dim=-1)
    share = draws.double()[..., None] * sums[..., -1:]
    places = (sums <= share).sum(dim=-1)
    last = (weights > 0).to(torch.uint8).flip(-1).argmax(dim=-1)  # rounding must not lead behind the last with weight
    return torch.minimum(places, weights.shape[-1] - 1 - last)


def probabilities(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Probabilities [R, V] float32 after the options, in the order of `SamplingParams`; each option is [R, 1].

    Args:
        logits: [R, V], penalties and bans in them.
        top_k: 0 keeps all.
    """
    scores, order = (logits.float() / temperature.float()).sort(dim=-1, descending=True, stable=True)
    kth = scores.gather(-1, (top_k - 1).clamp(0, scores.shape[-1] - 1))
    scores = scores.masked_fill((scores < kth) & (top_k > 0), -torch.inf)
    weights = scores.double().softmax(dim=-1)
    kept = (weights.cumsum(dim=-1) - weights < top_p) & (weights >= min_p * weights[:, :1])
    weights = weights * kept
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(weights).scatter_(-1, order, weights).float()


def synthetic_chance(rate: float, num_drafts: int) -> float:
    """The chance a of each draft for which the share of accepted ones, sum of a**i over i = 1 to D, over D, is `rate`.

    A draft only counts after all before it, so the share is less than the chance.
    """
    low, high = 0.0, 1.0
    if rate in (low, high):
        return rate
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        share = sum(middle**i for i in range(1, num_drafts + 1)) / num_drafts
        low, high = (middle, high) if share < rate else (low, middle)
    return (low + high) / 2
