"""Rotary position embedding, in place on queries and keys.

    angle[t, i] = positions[t] * inv_freq[i];  cos = scale * cos(angle), sin = scale * sin(angle)
    a' = a cos - b sin,  b' = b cos + a sin            for each pair (a, b) of a head

Pair i of a head x is (x[i], x[i + R/2]) when half-split, as Llama has it, and (x[2i], x[2i + 1]) when interleaved. R,
the rotary size, may be smaller than D: the rest of the head stays as it is.

Shapes: positions [T], inv_freq [R/2], cos and sin [T, R/2] fp32, q [T, H, D], k [T, K, D]. Angles and products are
fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not


def rotary_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, R/2] in fp32 of positions [T] and inv_freq [R/2]; `scale` is some rope types' attention factor.

    Raises:
        ValueError: a shape that does not fit.
    """
    if positions.dim() != 1 or inv_freq.dim() != 1:
        raise ValueError(
            f"rotary_cos_sin: positions [T] and inv_freq [R/2] expected, "
            f"got {list(positions.shape)} and {list(inv_freq.shape)}"
        )
    angles = positions.to(torch.float32).unsqueeze(1) * inv_freq.to(torch.float32)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def apply_rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """The formula in plain torch."""
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x in (q, k):
        first = x[..., 0 : 2 * half : 2] if interleaved else x[..., :half]
        second = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
        a, b = first.float(), second.float()
        new_a, new_b = a * cos - b * sin, b * cos + a * sin
        first.copy_(new_a)
        second.copy_(new_b)


def apply_rotary_torch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """For the CPU: queries and keys that lie side by side are turned as one tensor of H + K heads."""
    joint = _joint_heads(q, k)
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x in (q, k) if joint is None else (joint,):
        turned = x if x.shape[2] == 2 * half else x[..., : 2 * half]
        work = turned.float()  # the same memory when it is fp32 already
        a, b = (work[..., 0::2], work[..., 1::2]) if interleaved else work.chunk(2, dim=-1)
        b_part = a * sin
        a.mul_(cos).addcmul_(b, sin, value=-1)
        b.mul_(cos).add_(b_part)
        if work is not turned:
            turned.copy_(work)


def _joint_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """[T, H + K, D] over the memory of q and k, when k's heads follow q's in the same rows."""
    tokens, heads, size = q.shape
    head_stride = q.stride(1)
    adjacent = (
        k.storage_offset() == q.storage_offset() + heads * head_stride
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and k.stride(1) == head_stride
        and (tokens == 1 or q.stride(0) == k.stride(0))  # a single row's stride may be anything
    )
    if not adjacent:
        return None
    return q.as_strided((tokens, heads + k.shape[1], size), (q.stride(0), head_stride, 1), q.storage_offset())


@triton.jit
def apply_rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_head: tl.tensor,
    query_heads: tl.tensor,
    kv_heads: tl.tensor,
    half: tl.tensor,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One program a token and BLOCK_HEADS heads of the H + K, queries first."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < half
    cos = tl.load(cos_ptr + token * half + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * half + pair, mask=inside, other=0.0)[None, :]
    q_row = q_ptr + token * q_stride_token + head.to(tl.int64) * q_stride_head
    k_row = k_ptr + token * k_stride_token + (head - query_heads).to(tl.int64) * k_stride_head
    row = tl.where(head < query_heads, q_row, k_row)[:, None]
    mask = (head < query_heads + kv_heads)[:, None] & inside[None, :]
    if INTERLEAVED:
        a_place = row + 2 * pair[None, :]
        b_place = a_place + 1
    else:
        a_place = row + pair[None, :]
        b_place = a_place + half
    a = tl.load(a_place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_place, mask=mask, other=0.0).to(tl.float32)
    tl.store(a_place, (a * cos - b * sin).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(b_place, (b * cos + a * sin).to(q_ptr.dtype.element_ty), mask=mask)


def apply_rotary_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """One launch for queries and keys."""
    tokens, heads = q.shape[0], q.shape[1] + k.shape[1]
    half = cos.shape[1]
    if tokens == 0 or half == 0:
        return
    block_heads = min(8, triton.next_power_of_2(heads))
    apply_rotary_kernel[(tokens, triton.cdiv(heads, block_heads))](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        q.shape[1],
        k.shape[1],
        half,
        INTERLEAVED=interleaved,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
    )


def apply_rotary_native(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """For the CPU: one pass, over queries and keys together where they lie side by side."""
    joint = _joint_heads(q, k)
    turn, half = native(q.dtype).rotary, cos.shape[1]
    for x in (q, k) if joint is None else (joint,):
        turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.shape[0], x.shape[1], half, x.stride(0), x.stride(1))


RotaryQuery = tuple[torch.Tensor, torch.Tensor, bool]


def _native_takes(query: RotaryQuery) -> str | None:
    q, cos, interleaved = query
    if interleaved or cos.shape[1] % LANES:
        return f"it takes half-split pairs alone, a multiple of {LANES}"
    return why_not(q)


ApplyRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], None]

IMPLEMENTATIONS: tuple[Implementation[RotaryQuery, ApplyRotary], ...] = (
    Implementation("native", _native_takes, apply_rotary_native),
    Implementation("torch", on_cpu, apply_rotary_torch),
    Implementation("triton", by_triton, apply_rotary_triton),
    Implementation("reference", anywhere, apply_rotary_reference),
)


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q [T, H, D] and k [T, K, D] IN PLACE, and returns them.

    Args:
        q, k: of one type; may be strided views, such as the parts of a fused projection [T, (H + 2K) * D], whose
            adjacent heads are turned in one go.
        cos, sin: [T, R/2] fp32, contiguous, of `rotary_cos_sin`; R at most D.
        interleaved: whether a pair is two neighbours instead of one element of each half.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ValueError(
            f"apply_rotary: q [T, H, D] and k [T, K, D] of one type expected, "
            f"got {q.dtype} {list(q.shape)} and {k.dtype} {list(k.shape)}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"apply_rotary: cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != q.shape[0] or 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(
            f"apply_rotary: cos and sin [T, R/2] with R at most D expected for q {list(q.shape)}, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    if q.stride(2) != 1 or k.stride(2) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError("apply_rotary: heads of q and k, and cos and sin, must be contiguous")
    choose(IMPLEMENTATIONS, (q, cos, interleaved), implementation)(q, k, cos, sin, interleaved)
    return q, k
