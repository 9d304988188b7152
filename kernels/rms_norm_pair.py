"""RMS norms of two tensors, side by side: what a product that takes both reads.

    y[t] = rms_norm(a[t]) * weight_a, rms_norm(b[t]) * weight_b

Shapes: a and b [T, M], weight_a and weight_b [M], y [T, 2M]. Each norm is what `rms_norm` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.launch import dependent_launch, wait_for_inputs
from hookline_kernels.rms_norm import rms_norm


def rms_norm_pair_by_parts(
    a: torch.Tensor,
    weight_a: torch.Tensor,
    b: torch.Tensor,
    weight_b: torch.Tensor,
    eps: float,
    implementation: str | None,
) -> torch.Tensor:
    """The two norms as `implementation` of their own table."""
    return torch.cat([rms_norm(x, w, eps, implementation=implementation) for x, w in ((a, weight_a), (b, weight_b))], 1)


@triton.jit
def rms_norm_pair_kernel(
    a_ptr: tl.tensor,
    weight_a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    weight_b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Two programs a row, one for each tensor; y is contiguous."""
    wait_for_inputs(PDL)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.where(side == 0, a_ptr + row * a_stride, b_ptr + row * b_stride) + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    weight = tl.load(tl.where(side == 0, weight_a_ptr, weight_b_ptr) + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y_ptr + (2 * row + side) * SIZE + column, (values * scale * weight).to(y_ptr.dtype.element_ty), mask=inside
    )


def rms_norm_pair_triton(
    a: torch.Tensor, weight_a: torch.Tensor, b: torch.Tensor, weight_b: torch.Tensor, eps: float
) -> torch.Tensor:
    """One launch; a row must fit one program's registers, which holds to M = 64k."""
    rows, size = a.shape
    y = a.new_empty((rows, 2 * size))
    if rows == 0:
        return y
    block = triton.next_power_of_2(size)
    rms_norm_pair_kernel[(rows, 2)](
        a,
        weight_a,
        b,
        weight_b,
        y,
        a.stride(0),
        b.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(a.device),
    )
    return y


NormPair = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], NormPair], ...] = (
    Implementation("torch", on_cpu, partial(rms_norm_pair_by_parts, implementation=None)),
    Implementation("triton", by_triton, rms_norm_pair_triton),
    Implementation("reference", anywhere, partial(rms_norm_pair_by_parts, implementation="reference")),
)


def rms_norm_pair(
    a: torch.Tensor,
    weight_a: torch.Tensor,
    b: torch.Tensor,
    weight_b: torch.Tensor,
    eps: float,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Normalises a and b [T, M] each over its last dimension, into one new tensor [T, 2M] of their type.

    Args:
        a, b: of one type; their last dimension contiguous.
        weight_a, weight_b: contiguous [M], of one type.
        eps: added to the mean of squares; positive.
        implementation: `torch`, `triton` or `reference`; by default the first that supports a.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if not a.is_floating_point() or a.dtype != b.dtype or weight_a.dtype != weight_b.dtype:
        raise TypeError(
            f"rms_norm_pair: floating point a and b of one type, and weights of one type, expected, "
            f"got {a.dtype} and {b.dtype}, {weight_a.dtype} and {weight_b.dtype}"
        )
    if a.dim() != 2 or a.shape != b.shape or not weight_a.shape == weight_b.shape == a.shape[1:]:
        raise ValueError(
            f"rms_norm_pair: a and b [T, M] and weights [M] expected, "
            f"got {list(a.shape)} and {list(b.shape)}, {list(weight_a.shape)} and {list(weight_b.shape)}"
        )
    if not eps > 0.0:
        raise ValueError(f"rms_norm_pair: eps must be positive, got {eps}")
    if a.stride(1) != 1 or b.stride(1) != 1 or not weight_a.is_contiguous() or not weight_b.is_contiguous():
        raise ValueError("rms_norm_pair: the last dimension of a and b, and the weights, must be contiguous")
    return choose(IMPLEMENTATIONS, (a,), implementation)(a, weight_a, b, weight_b, eps)
