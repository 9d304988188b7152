"""RMS norm over the last dimension, with the residual addition that stands before it in a block.

    residual <- residual + x                                      (when a residual is given; else x takes its place)
    y = residual / sqrt(mean(residual^2) + eps) * (weight + weight_offset)

Shapes: x, residual, y [T, M] (or more leading dimensions), weight [M]. All arithmetic is in fp32 with one rounding at
the end, except that the sum with the residual is rounded to the residual's type before it is normalised: it is what
later layers see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.launch import dependent_launch, wait_for_inputs
from hookline_kernels.native import LANES, native, why_not

# Elements up to which torch.rms_norm is the fastest on the CPU.
SMALL = 32768


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """The formula in plain torch; updates `residual` in place."""
    if residual is not None:
        x = residual.add_(x)
    rows = x.float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """For the CPU: torch's own call where the cost is that of calls, fewer passes over memory where it is that."""
    if residual is not None:
        x = residual.add_(x)
    if weight_offset != 0.0:
        weight = weight.float() + weight_offset
    if x.numel() <= SMALL and weight.dtype == x.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    rows = x.float()
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    normed = rows * norm.square_().mul_(1.0 / rows.shape[-1]).add_(eps).rsqrt_()
    return normed.mul_(weight).to(x.dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a row; y is contiguous."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        total = values + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(y_ptr + row * size + columns, (values * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """One launch; a row must fit one program's registers, which holds to M = 64k."""
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, size)
    if rows.shape[0] == 0:
        return y
    old = rows if residual is None else residual.view(-1, size)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows.shape[0],)](
        rows,
        weight,
        old,
        y,
        rows.stride(0),
        old.stride(0),
        size,
        eps,
        weight_offset,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return y


def rms_norm_native(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """For the CPU: one call for all rows."""
    y = torch.empty(x.shape, dtype=x.dtype)
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    stride = x.stride(-2) if x.dim() > 1 else size
    old = None if residual is None else residual.data_ptr()
    threads = torch.get_num_threads()
    native(x.dtype).rms_norm(x.data_ptr(), weight.data_ptr(), old, y.data_ptr(), rows, size, stride, eps, threads)
    return y


RmsNormQuery = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]


def _native_takes(query: RmsNormQuery) -> str | None:
    x, weight, residual, weight_offset = query
    if x.shape[-1] % LANES or x.dim() > 2 or weight_offset != 0.0:
        return f"it takes up to two dimensions, the last a multiple of {LANES}, and no weight offset"
    if weight.dtype != x.dtype or not weight.is_contiguous() or (residual is not None and residual.dtype != x.dtype):
        return "it takes tensors of one type, the weight contiguous"
    return why_not(x)


RmsNorm = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None, float], torch.Tensor]

IMPLEMENTATIONS: tuple[Implementation[RmsNormQuery, RmsNorm], ...] = (
    Implementation("native", _native_takes, rms_norm_native),
    Implementation("torch", on_cpu, rms_norm_torch),
    Implementation("triton", by_triton, rms_norm_triton),
    Implementation("reference", anywhere, rms_norm_reference),
)


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: None = None,
    *,
    weight_offset: float = 0.0,
    implementation: str | None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    *,
    weight_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    implementation: str | None = None,
) -> Any:
    """Normalises x [T, M], or x + residual, over its last dimension.

    Args:
        x: [..., M]; its last dimension contiguous.
        weight: [M].
        eps: added to the mean of squares; positive.
        residual: as x, contiguous. It is updated IN PLACE to residual + x, and returned.
        weight_offset: added to the weight; 1.0 for checkpoints that store the weight minus one.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports x.

    Returns:
        y without a residual, `(y, residual)` with one; y is new, contiguous and of x's type.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if not x.is_floating_point():
        raise TypeError(f"rms_norm: x must hold floating point numbers, got {x.dtype}")
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {list(weight.shape)} must have the size of x's last dimension, {list(x.shape)}"
        )
    if not eps > 0.0:
        raise ValueError(f"rms_norm: eps must be positive, got {eps}")
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError("rms_norm: x's last dimension and weight must be contiguous")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(
            f"rms_norm: residual must be contiguous {x.dtype} {list(x.shape)} as x is, "
            f"got {residual.dtype} {list(residual.shape)} with strides {residual.stride()}"
        )
    y = choose(IMPLEMENTATIONS, (x, weight, residual, weight_offset), implementation)(
        x, weight, eps, residual, weight_offset
    )
    return y if residual is None else (y, residual)
