"""What decoders have in common around their layers."""

from __future__ import annotations

import torch

from hookline_kernels.rms_norm import rms_norm


def last_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rows: torch.Tensor
) -> torch.Tensor:
    """norm(residual + hidden) of the `rows` [R] whose logits are wanted: [R, M].

    Args:
        hidden: [T, M], what the last layer adds.
        residual: [T, M], the stream that it is added to.
        rows: [R] int64, rising; R == T means all.
    """
    if len(rows) < len(hidden):
        hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
    return rms_norm(hidden, weight, eps, residual)[0]
