"""The feed-forward part of a decoder layer."""

from __future__ import annotations

import torch

from hookline_kernels.linear import linear, linear_gated


def gated_mlp(
    x: torch.Tensor,
    mlp_1: torch.Tensor,
    mlp_2: torch.Tensor,
    activation: str,
    mlp_1_bias: torch.Tensor | None = None,
    mlp_2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)): `x` [T, M], `mlp_1` [2F, M] with gate before up, `mlp_2` [M, F]; gives [T, M]."""
    return linear(linear_gated(x, mlp_1, mlp_1_bias, activation), mlp_2, mlp_2_bias)
