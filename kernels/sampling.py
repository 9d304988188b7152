"""The choice of the next token of every row of logits, on the device, without a word to the host.

With s a row's logits in fp32, m the largest, t the temperature and w[i] = floor(2**40 * exp((s[i] - m) / t)):

    greedy (t = 0)  the lowest id of those with s[i] = m
    top-k           leaves the ids with s[i] at least the k-th largest value; W = the sum of what is left of w
    top-p           of those, in falling order of s, the lower id first among equals: i stays where the w before it sum
                    to less than top_p * W
    min-p           of those, i stays where exp((s[i] - m) / t) >= min_p
    draw            U = the sum of the w that stay; the first id, in order of ids, where their running sum passes
                    min(floor(u * U), U - 1)
    u               53 bits of element `num_outputs` of the SplitMix64 stream (Steele, Lea, Flood 2014) of the row's key

A row with NaN or infinity, or with -inf alone, has no choice: its token is -1 and it is flagged. These are the rules of
the core's sampler. The reference does its arithmetic step by step, so on a CPU its tokens are the core's, given top_p
in float64. The Triton kernels' exp errs by a few units in the last place, so each w may differ by some parts in 10**7:
greedy tokens are the same always, as are u and what top-k leaves; a drawn token is, unless the share of the draw,
top-p's sum or min-p's ratio comes that near to a border (a chance of about 1e-7 over the probability of a token). Sums
are whole numbers: a row's token is the same alone, in any batch, and however it was split.

Shapes: logits [R, V], options [R].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hookline_kernels.decode_inputs import SamplingOptions
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose
from hookline_kernels.sampling_triton import sample_triton

_GAMMA, _MIX_1, _MIX_2 = (constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_DTYPES = {
    "temperature": (torch.float32,),
    "top_p": (torch.float32, torch.float64),
    "min_p": (torch.float32,),
    "top_k": (torch.int32, torch.int64),
    "num_outputs": (torch.int32, torch.int64),
    "keys": (torch.int64,),
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen.

    Attributes:
        token_ids: [R] int64; -1 in bad rows.
        bad: [R] int32; 1 where a row has no finite choice.
        logprobs: [R] float32, the token's unedited logit less the logarithm of the sum of their exponentials; NaN in
            bad rows; None if it was not asked for.
    """

    token_ids: torch.Tensor
    bad: torch.Tensor
    logprobs: torch.Tensor | None = None


def uniform_reference(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The draws in [0, 1) of `keys` and output `numbers` [R], float64: whole numbers of 64 bits wrap around."""

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        ones: int = (1 << (64 - bits)) - 1
        return (z >> bits) & ones

    z = keys + (numbers.long() + 1) * _GAMMA
    z = (z ^ shifted(z, 30)) * _MIX_1
    z = (z ^ shifted(z, 27)) * _MIX_2
    return shifted(z ^ shifted(z, 31), 11).double() * 2.0**-53


def sample_reference(
    logits: torch.Tensor,
    options: SamplingOptions,
    unedited: torch.Tensor,
    token_ids: torch.Tensor,
    bad: torch.Tensor,
    logprobs: torch.Tensor | None,
    greedy: bool,
) -> None:
    """The formula in plain torch, with a sort."""
    scores, vocab = logits.float(), logits.shape[1]
    largest = scores.amax(dim=-1, keepdim=True)
    is_bad = ~largest[:, 0].isfinite()
    chosen = torch.where(scores == largest, torch.arange(vocab, device=logits.device), vocab).amin(dim=-1)
    if not greedy:
        chosen = torch.where(options.temperature > 0, _drawn(scores, largest, options), chosen)
    token_ids.copy_(chosen.masked_fill_(is_bad, -1))
    bad.copy_(is_bad)
    if logprobs is not None:
        own = unedited.gather(-1, token_ids.clamp(min=0)[:, None])[:, 0].float()
        logprobs.copy_((own - unedited.float().logsumexp(dim=-1)).masked_fill(is_bad, torch.nan))


def _drawn(scores: torch.Tensor, largest: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """A token drawn in each row, [R]; anything where the row is greedy or bad."""
    vocab = scores.shape[1]
    temperature = torch.where(options.temperature > 0, options.temperature, 1.0)[:, None]
    top_k = torch.where(options.top_k < vocab, options.top_k, 0).long()[:, None]
    ratios = ((scores - largest) / temperature).exp()
    ratios = torch.where(ratios >= 0, ratios, 0.0)  # NaN, in bad rows, has no whole number
    weights = (ratios * 2.0**40).long()
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    ordered = weights.gather(-1, ids)
    kth = values.gather(-1, (top_k - 1).clamp(min=0))
    ordered = ordered.masked_fill((values < kth) & (top_k > 0), 0)
    before = ordered.cumsum(dim=-1) - ordered
    kept = before.double() < options.top_p.double()[:, None] * ordered.sum(dim=-1, keepdim=True).double()
    kept = torch.zeros_like(kept).scatter(-1, ids, kept & (ordered > 0)) & (ratios >= options.min_p[:, None])
    running = (weights * kept).cumsum(dim=-1)
    total = running[:, -1]
    share = torch.minimum((uniform_reference(options.keys, options.num_outputs) * total.double()).long(), total - 1)
    return (running <= share[:, None]).sum(dim=-1).clamp(max=vocab - 1)


class Sample(Protocol):
    """What each implementation is: `sample` after its checks, writing its answer into the last tensors."""

    def __call__(
        self,
        logits: torch.Tensor,
        options: SamplingOptions,
        unedited: torch.Tensor,
        token_ids: torch.Tensor,
        bad: torch.Tensor,
        logprobs: torch.Tensor | None,
        greedy: bool,
    ) -> None: ...


IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Sample], ...] = (
    Implementation("triton", by_triton, sample_triton),
    Implementation("reference", anywhere, sample_reference),
)


def sample(
    logits: torch.Tensor,
    options: SamplingOptions,
    *,
    logprobs: bool = False,
    unedited: torch.Tensor | None = None,
    greedy: bool = False,
    implementation: str | None = None,
) -> Sampled:
    """The next token of each row. Reads nothing on the host, so that a CUDA graph can hold it.

    Args:
        logits: [R, V], any float type, tokens contiguous, V at least 1. Not changed.
        options: [R] each, contiguous, on the logits' device. A temperature of 0 is greedy; a top_k of 0, or of V and
            more, is none; top_p is above 0, and 1 is none (float32, or float64 for the core's tokens to the last
            border); a min_p of 0 is none. What is outside these is not looked for.
        logprobs: whether to give the chosen token's logprob.
        unedited: [R, V], what logprobs are taken from; `logits` by default.
        greedy: a promise that every temperature is 0, which saves the launches that would find nothing to do.
        implementation: `triton` or `reference`; by default the first that supports the logits.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if logits.dim() != 2 or logits.shape[1] < 1 or not logits.is_floating_point():
        raise ValueError(f"sample: logits [R, V] of a float type expected, got {logits.dtype} {list(logits.shape)}")
    plain = logits if unedited is None else unedited
    if plain.shape != logits.shape or plain.device != logits.device or not plain.is_floating_point():
        raise ValueError(
            f"sample: unedited logits must be floats as the logits {list(logits.shape)} on {logits.device}, "
            f"got {plain.dtype} {list(plain.shape)} on {plain.device}"
        )
    if logits.stride(1) != 1 or plain.stride(1) != 1:
        raise ValueError("sample: the logits of a row must be contiguous")
    for name, dtypes in _DTYPES.items():
        column: torch.Tensor = getattr(options, name)
        if column.shape != logits.shape[:1] or column.device != logits.device or not column.is_contiguous():
            raise ValueError(
                f"sample: options must be contiguous [{logits.shape[0]}] on {logits.device}, "
                f"got {name} {list(column.shape)} on {column.device}"
            )
        if column.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"sample: {name} must be {wanted}, got {column.dtype}")
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    bad = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    chances = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) if logprobs else None
    choose(IMPLEMENTATIONS, (logits,), implementation)(logits, options, plain, token_ids, bad, chances, greedy)
    return Sampled(token_ids, bad, chances)
