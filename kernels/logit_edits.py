"""The options of a request that change its logits before a token is chosen, for chosen rows, on the device.

With x a row's logit of token i in fp32, and of the row's slot: b[i] what is added to it, -inf where the token is
banned; c[i] how often it stands in the output; r, f and p the repetition, frequency and presence penalty:

    x = -inf if b[i] = -inf, else x + b[i]
    x = (x * r if x < 0 else x / r)        if token i stands in the prompt or the output   (CTRL, Keskar et al. 2019)
    x = x - (c[i] * f + p)                 if it stands in the output                      (as OpenAI defines them)

These are the rules of the core's `edit_logits`, in its order and its arithmetic: each operation is rounded, none is
fused with the next. A ban takes the place of NaN and infinity too.

Shapes: logits [R, V], E rows of them, tables of Q slots [Q, V].
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose

# Added to a count of outputs where the token stands in the prompt.
IN_PROMPT = 2**30
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_BLOCK = 2048


def logit_edits_reference(
    logits: torch.Tensor,
    places: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The formula in plain torch."""
    rows, slots = places
    x = logits.index_select(0, rows).float()
    if bias is not None:
        added = bias.index_select(0, slots)
        x = torch.where(added == -torch.inf, -torch.inf, x + added)
    if counts is not None:
        found = counts.index_select(0, slots)
        repetition, frequency, presence = penalties.index_select(0, slots).t()[:, :, None]
        x = torch.where(found != 0, torch.where(x < 0, x * repetition, x / repetition), x)
        times = found % IN_PROMPT
        x = torch.where(times > 0, x - (times.float() * frequency + presence), x)
    out.copy_(x)


@triton.jit(do_not_specialize=["count", "stride"])
def logit_edits_kernel(
    logits_ptr: tl.tensor,
    places_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    COUNTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a block of tokens of a row."""
    row = tl.program_id(1).to(tl.int64)
    source = tl.load(places_ptr + row)
    slot = tl.load(places_ptr + count + row)
    ids = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits_ptr + source * stride + ids, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        added = tl.load(bias_ptr + slot * vocab + ids, mask=inside, other=0.0)
        x = tl.where(added == -float("inf"), -float("inf"), x + added)
    if COUNTS:
        found = tl.load(counts_ptr + slot * vocab + ids, mask=inside, other=0)
        repetition = tl.load(penalties_ptr + 3 * slot)
        frequency = tl.load(penalties_ptr + 3 * slot + 1)
        presence = tl.load(penalties_ptr + 3 * slot + 2)
        divided = tl.div_rn(x, tl.zeros_like(x) + repetition)
        x = tl.where(found != 0, tl.where(x < 0, x * repetition, divided), x)
        times = found % _IN_PROMPT
        x = tl.where(times > 0, x - (times.to(tl.float32) * frequency + presence), x)
    tl.store(out_ptr + row * vocab + ids, x, mask=inside)


def logit_edits_triton(
    logits: torch.Tensor,
    places: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One launch."""
    rows, vocab = out.shape
    if rows == 0:
        return
    logit_edits_kernel[(triton.cdiv(vocab, _BLOCK), rows)](
        logits,
        places,
        penalties,
        penalties if counts is None else counts,
        penalties if bias is None else bias,
        out,
        places.shape[1],
        logits.stride(0),
        vocab,
        COUNTS=counts is not None,
        BIAS=bias is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # a product that is not rounded before the sum is not the core's
    )


class EditLogits(Protocol):
    """What each implementation is: `edit_logits` after its checks."""

    def __call__(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        penalties: torch.Tensor,
        counts: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None: ...


IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], EditLogits], ...] = (
    Implementation("triton", by_triton, logit_edits_triton),
    Implementation("reference", anywhere, logit_edits_reference),
)


def edit_logits(
    logits: torch.Tensor,
    places: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Writes edited copies of some rows. Reads nothing on the host, so that a CUDA graph can hold it.

    Args:
        logits: [R, V], any float type, tokens contiguous. Not changed.
        places: [2, E] int64, contiguous: which row of the logits each row of `out` is made from, and its slot. What
            names no row or slot is not looked for.
        penalties: [Q, 3] float32, contiguous: repetition (1 is none), frequency and presence (0 is none).
        counts: [Q, V] int32, contiguous: how often each token stands in the output, and `IN_PROMPT` more where it
            stands in the prompt; None where no row has penalties.
        bias: [Q, V] float32, contiguous: what is added, -inf for a ban; None where no row has any.
        out: [E, V] float32, contiguous.
        implementation: `triton` or `reference`; by default `triton` on a GPU.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            f"edit_logits: logits [R, V] of a float type expected, got {logits.dtype} {list(logits.shape)}"
        )
    vocab, slots = logits.shape[1], penalties.shape[0]
    for name, tensor, dtype, shape in (
        ("places", places, torch.int64, (2, out.shape[0])),
        ("penalties", penalties, torch.float32, (slots, 3)),
        ("counts", counts, torch.int32, (slots, vocab)),
        ("bias", bias, torch.float32, (slots, vocab)),
        ("out", out, torch.float32, (out.shape[0], vocab)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"edit_logits: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape != shape or tensor.device != logits.device or not tensor.is_contiguous():
            raise ValueError(
                f"edit_logits: {name} must be contiguous {list(shape)} on {logits.device}, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )
    chosen = implementation or ("triton" if logits.is_cuda else "reference")
    choose(IMPLEMENTATIONS, (logits,), chosen)(logits, places, penalties, counts, bias, out)
