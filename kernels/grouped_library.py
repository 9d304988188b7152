"""Grouped products by torch's own `grouped_mm`, beside which ours are measured; bf16 on a GPU, without bias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hookline_kernels.activation import gated_activation
from hookline_kernels.grouped_rows import combine_parts
from hookline_kernels.moe_routing import Dispatch


def why_no_library(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why torch cannot multiply rows of x by the experts' weights [E, N, K]; None where it can."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it is for bf16 on a GPU from Ampere on"
    if not weight.is_contiguous() or weight.shape[1] % 8 or weight.shape[2] % 8:
        return "rows and columns of the weight are not multiples of 8 that lie together"
    return None


def _product(rows: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Rows [P, K] in the dispatch's order times weight [E, N, K] transposed: [P, N]."""
    grouped_mm: Any = F.grouped_mm
    product: torch.Tensor = grouped_mm(rows, weight.transpose(1, 2), offs=dispatch.starts[1:])
    return product


def gated_library(
    x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, activation: str, bias: torch.Tensor | None
) -> torch.Tensor:
    """h [P, F] of x [T, M] and weight [E, 2F, M]; the sums of gate and up are rounded to x's type."""
    _check_no(bias)
    rows = x.index_select(0, dispatch.order // dispatch.top_k)
    return gated_activation(_product(rows, weight, dispatch), activation)


def combine_library(
    h: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y [T, M] of h [P, F] and weight [E, M, F]; each expert's sums are rounded to h's type."""
    _check_no(bias)
    parts = h.new_empty((h.shape[0], weight.shape[1]))
    parts.index_copy_(0, dispatch.order.long(), _product(h, weight, dispatch))
    return combine_parts(parts.unsqueeze(1), weights, h.dtype)


def _check_no(bias: torch.Tensor | None) -> None:
    if bias is not None:
        raise ValueError("grouped_mm adds no bias of experts; use another implementation")
