"""Tokens that may not be chosen, taken out of chosen rows of logits in place, on the device.

Of row r, which mask m names, the logit of token i becomes -inf where bit i % 32 of word i / 32 of the mask is 0. A ban
takes the place of NaN and infinity too. A mask of row -1 is nobody's: where a captured step has more room than masks.

Shapes: logits [R, V], M masks of W words, 32 W >= V.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose

_BLOCK = 2048


def mask_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """The formula in plain torch."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    used = rows >= 0
    rows, bits = rows[used].long(), bits[used]
    allowed = ((bits[..., None] >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


@triton.jit(do_not_specialize=["stride", "words"])
def mask_tokens_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program a block of tokens of a mask. Only what is forbidden is written."""
    mask = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    if row >= 0:
        ids = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        word = tl.load(bits_ptr + mask * words + ids // 32, mask=inside, other=0)
        forbidden = (word >> (ids % 32).to(tl.int32)) & 1 == 0
        tl.store(logits_ptr + row * stride + ids, -float("inf"), mask=inside & forbidden)


def mask_tokens_triton(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """One launch."""
    count, words = bits.shape
    if count == 0:
        return
    vocab = logits.shape[1]
    mask_tokens_kernel[(triton.cdiv(vocab, _BLOCK), count)](
        logits, rows, bits, logits.stride(0), words, vocab, BLOCK=_BLOCK, num_warps=4
    )


class MaskTokens(Protocol):
    """What each implementation is: `mask_tokens` after its checks."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None: ...


IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], MaskTokens], ...] = (
    Implementation("triton", by_triton, mask_tokens_triton),
    Implementation("reference", anywhere, mask_tokens_reference),
)


def mask_tokens(
    logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, *, implementation: str | None = None
) -> None:
    """Writes -inf, in place, for every token that its row's mask does not allow.

    Args:
        logits: [R, V], any float type, tokens contiguous.
        rows: [M] int32, contiguous: each a row of the logits, none twice, or -1.
        bits: [M, W] int32, contiguous.
        implementation: `triton` or `reference`; by default `triton` on a GPU.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            f"mask_tokens: logits [R, V] of a float type expected, got {logits.dtype} {list(logits.shape)}"
        )
    for name, tensor, shape in (
        ("rows", rows, (len(bits),)),
        ("bits", bits, (len(bits), -(-logits.shape[1] // 32))),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"mask_tokens: {name} must be int32, got {tensor.dtype}")
        if tensor.shape != shape or tensor.device != logits.device or not tensor.is_contiguous():
            raise ValueError(
                f"mask_tokens: {name} must be contiguous {list(shape)} on {logits.device}, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )
    chosen = implementation or ("triton" if logits.is_cuda else "reference")
    choose(IMPLEMENTATIONS, (logits,), chosen)(logits, rows, bits)
