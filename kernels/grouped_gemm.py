"""The two products of a mixture of experts: each row goes through the weight of its own expert.

    grouped_linear_gated:    h[i] = f(x[t] gate[e]^T + bias) * (x[t] up[e]^T + bias)    pair order[i] = t * k + j
    grouped_linear_combine:  y[t] = sum over j of weights[t, j] * (h of pair (t, j) down[e]^T + bias[e])

Shapes: x [T, M], gate-up weight [E, 2F, M] with gate rows above up rows, h [P, F] in the dispatch's order, down weight
[E, M, F], y [T, M]; P = T * k pairs. See moe_routing.py for the dispatch. An expert without a token costs nothing.

The sum over j is taken in fp32, in the order of j, and rounded once. On the CPU each active expert is one product of
linear.py. On a GPU few pairs have a kernel that reads each active expert's weight once (grouped_small.py), many have
one of large tiles (grouped_gemm_triton.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from hookline_kernels.activation import GATED_ACTIVATIONS, activation_reference, gated_activation
from hookline_kernels.grouped_gemm_triton import combine_tiles, gated_tiles
from hookline_kernels.grouped_library import combine_library, gated_library, why_no_library
from hookline_kernels.grouped_small import combine_small, gated_small
from hookline_kernels.grouped_tuning import GroupedShape, small_config, tiles_config
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.linear import linear, linear_gated, pack_linear_weight
from hookline_kernels.linear_small import GATED_CODES
from hookline_kernels.moe_routing import Dispatch
from hookline_kernels.native import has_native_16bit_products
from hookline_kernels.packed import is_packed, pack, unpack, unpacked_shape, why_unpacked
from hookline_kernels.quantized import QuantizedTensor


def pack_expert_weight(
    weight: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The experts' weights [E, N, K] on a device, for activations of a type, in the layout that is fastest there.

    On the CPU each expert's matrix lies as `pack_linear_weight` likes it; a `QuantizedTensor` becomes packed blocks,
    [E, N / 32, K / 32, bytes], where the native kernels run. On a GPU the weight is contiguous.

    Args:
        device, dtype: by default the weight's own.

    Raises:
        ValueError: the weight has not three dimensions, or no expert.
    """
    if weight.dim() != 3 or weight.shape[0] < 1:
        raise ValueError(f"pack_expert_weight: weight [E, N, K] expected, got {list(weight.shape)}")
    device, dtype = device or weight.device, dtype or weight.dtype
    if isinstance(weight, QuantizedTensor) and why_unpacked(weight.shape[1:], device, dtype) is None:
        return torch.stack([pack(expert) for expert in weight.unbind(0) if isinstance(expert, QuantizedTensor)])
    if device.type != "cpu":
        values = weight.values() if isinstance(weight, QuantizedTensor) else weight
        return values.to(device=device, dtype=dtype).contiguous()
    first = pack_linear_weight(weight[0], device, dtype)
    experts, rows, inner = weight.shape
    if first.is_contiguous():
        values = weight.values() if isinstance(weight, QuantizedTensor) else weight
        return values.to(dtype=dtype).contiguous()
    packed = torch.empty((experts, inner, rows), dtype=dtype).transpose(1, 2)
    for expert in range(experts):
        packed[expert].copy_(weight[expert])
    return packed


def _active(dispatch: Dispatch) -> Iterator[tuple[int, slice]]:
    """Each expert that has pairs, and where they are in the dispatch's order. The host waits for the device."""
    starts = dispatch.starts.tolist()
    for expert, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            yield expert, slice(begin, end)


def _in_order_of_choice(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum over j of weights [T, k] times parts [T * k, M], one j after the other."""
    parts = parts.view(*weights.shape, parts.shape[1])
    y = parts[:, 0] * weights[:, :1]
    for j in range(1, weights.shape[1]):
        y.addcmul_(parts[:, j], weights[:, j : j + 1])
    return y


def gated_by_expert(
    x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, activation: str, bias: torch.Tensor | None
) -> torch.Tensor:
    """For the CPU: a product an active expert."""
    tokens = dispatch.order // dispatch.top_k
    columns = _sizes(weight)[1] // 2
    h = x.new_empty((len(tokens), columns))
    for expert, rows in _active(dispatch):
        own = None if bias is None else bias[expert]
        h[rows] = linear_gated(x[tokens[rows]], weight[expert], own, activation)
    return h


def combine_by_expert(
    h: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """For the CPU: a product an active expert, in fp32 but where the CPU itself multiplies 16-bit types.

    There the products are rounded to h's type, as fp32 ones would not use these instructions.
    """
    wide = not has_native_16bit_products(h.dtype)
    parts = h.new_empty((len(h), _sizes(weight)[1]), dtype=torch.float32)
    for expert, rows in _active(dispatch):
        own = None if bias is None else bias[expert]
        parts[dispatch.order[rows]] = linear(h[rows], weight[expert], own, wide=wide).float()
    return _in_order_of_choice(parts, weights).to(h.dtype)


def _product_reference(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    values = unpack(weight) if is_packed(weight) else weight
    return F.linear(rows.float(), values.float(), None if bias is None else bias.float())


def gated_reference(
    x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, activation: str, bias: torch.Tensor | None
) -> torch.Tensor:
    """The formula in fp32."""
    tokens = dispatch.order // dispatch.top_k
    h = x.new_empty((len(tokens), _sizes(weight)[1] // 2))
    for expert, rows in _active(dispatch):
        sums = _product_reference(x[tokens[rows]], weight[expert], None if bias is None else bias[expert])
        h[rows] = activation_reference(sums, GATED_ACTIVATIONS[activation], True).to(x.dtype)
    return h


def combine_reference(
    h: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The formula in fp32."""
    parts = h.new_empty((len(h), _sizes(weight)[1]), dtype=torch.float32)
    for expert, rows in _active(dispatch):
        own = None if bias is None else bias[expert]
        parts[dispatch.order[rows]] = _product_reference(h[rows], weight[expert], own)
    return _in_order_of_choice(parts, weights).to(h.dtype)


GatedQuery = tuple[torch.Tensor, torch.Tensor, Dispatch, str]
Gated = Callable[[torch.Tensor, torch.Tensor, Dispatch, str, torch.Tensor | None], torch.Tensor]
CombineQuery = tuple[torch.Tensor, torch.Tensor, Dispatch]
Combine = Callable[[torch.Tensor, torch.Tensor, Dispatch, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _shape(x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, has_gate: bool) -> GroupedShape:
    (experts, n, k), pairs = weight.shape, dispatch.order.shape[0]
    return GroupedShape(
        tokens=pairs // dispatch.top_k, pairs=pairs, experts=experts, n=n, k=k, has_gate=has_gate, width=x.itemsize
    )


def _code(activation: str) -> int | None:
    """The activation's code where the kernels have it, else None: a launch of its own follows the plain product."""
    code = GATED_ACTIVATIONS[activation]
    return code if code in GATED_CODES else None


def gated_by_small(
    x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, activation: str, bias: torch.Tensor | None
) -> torch.Tensor:
    """For few pairs on a GPU."""
    code = _code(activation)
    config = small_config(_shape(x, weight, dispatch, code is not None), x.device)
    if config is None:
        raise ValueError("gated_by_small: there are too many pairs for the kernel of few")
    h = gated_small(x, weight, dispatch, code, bias, config)
    return gated_activation(h, activation) if code is None else h


def gated_by_tiles(
    x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, activation: str, bias: torch.Tensor | None
) -> torch.Tensor:
    """For many pairs on a GPU."""
    code = _code(activation)
    config = tiles_config(x, weight, _shape(x, weight, dispatch, code is not None))
    h = gated_tiles(x, weight, dispatch, code, bias, config)
    return gated_activation(h, activation) if code is None else h


def combine_by_small(
    h: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """For few pairs on a GPU."""
    config = small_config(_shape(h, weight, dispatch, False), h.device)
    if config is None:
        raise ValueError("combine_by_small: there are too many pairs for the kernel of few")
    return combine_small(h, weight, dispatch, weights, bias, config)


def combine_by_tiles(
    h: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """For many pairs on a GPU."""
    config = tiles_config(h, weight, _shape(h, weight, dispatch, False))
    return combine_tiles(h, weight, dispatch, weights, bias, config)


def _tiles_take(query: tuple[Any, ...]) -> str | None:
    weight = query[1]
    if is_packed(weight) or not weight.is_contiguous():
        return "it is for weights that lie together, not packed"
    return by_triton(query)


def _small_takes(query: tuple[Any, ...]) -> str | None:
    x, weight, dispatch = query[:3]
    reason = _tiles_take(query)
    if reason is None and small_config(_shape(x, weight, dispatch, len(query) == 4), x.device) is None:
        return "there are too many pairs"
    return reason


def _library_takes(query: tuple[Any, ...]) -> str | None:
    return why_no_library(query[0], query[1])


GATED_IMPLEMENTATIONS: tuple[Implementation[GatedQuery, Gated], ...] = (
    Implementation("by_expert", on_cpu, gated_by_expert),
    Implementation("small", _small_takes, gated_by_small),
    Implementation("tiles", _tiles_take, gated_by_tiles),
    Implementation("library", _library_takes, gated_library),
    Implementation("reference", anywhere, gated_reference),
)

COMBINE_IMPLEMENTATIONS: tuple[Implementation[CombineQuery, Combine], ...] = (
    Implementation("by_expert", on_cpu, combine_by_expert),
    Implementation("small", _small_takes, combine_by_small),
    Implementation("tiles", _tiles_take, combine_by_tiles),
    Implementation("library", _library_takes, combine_library),
    Implementation("reference", anywhere, combine_reference),
)


def grouped_linear_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    activation: str = "silu",
    bias: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """f(gate) * up of each pair of token and expert, [P, F] in the order of the dispatch.

    Args:
        x: [T, M], rows contiguous.
        weight: [E, 2F, M], of x's type, in any layout that `pack_expert_weight` gives; packed goes with every type.
        bias: [E, 2F], of x's type, contiguous.
        activation: a name of `activation.GATED_ACTIVATIONS`.
        implementation: a name of `GATED_IMPLEMENTATIONS`; by default the first that supports the call.

    Raises:
        TypeError, ValueError: a type or shape that does not fit, or a name that is not known.
    """
    columns = _check("grouped_linear_gated", x, weight, dispatch, bias)
    if columns % 2:
        raise ValueError(f"grouped_linear_gated: weight must have gate and up rows, got {columns} rows")
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known are {', '.join(sorted(GATED_ACTIVATIONS))}")
    if dispatch.order.shape[0] != x.shape[0] * dispatch.top_k:
        raise ValueError(
            f"grouped_linear_gated: {x.shape[0]} tokens with {dispatch.top_k} experts each need as many pairs, "
            f"the dispatch has {dispatch.order.shape[0]}"
        )
    run = choose(GATED_IMPLEMENTATIONS, (x, weight, dispatch, activation), implementation)
    return run(x, weight, dispatch, activation, bias)


def grouped_linear_combine(
    h: torch.Tensor,
    weight: torch.Tensor,
    dispatch: Dispatch,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """The weighted sum over each token's experts, [T, M] in h's type.

    Args:
        h: [P, F] in the order of the dispatch, rows contiguous.
        weight: [E, M, F], of h's type, in any layout that `pack_expert_weight` gives; packed goes with every type.
        weights: [T, k] fp32, contiguous, as `choose_experts` gives them.
        bias: [E, M], of h's type, contiguous; added before the weighting.
        implementation: a name of `COMBINE_IMPLEMENTATIONS`; by default the first that supports the call.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    _check("grouped_linear_combine", h, weight, dispatch, bias)
    if weights.dtype != torch.float32 or weights.device != h.device:
        raise TypeError(
            f"grouped_linear_combine: weights must be fp32 on {h.device}, got {weights.dtype} on {weights.device}"
        )
    pairs, k = h.shape[0], dispatch.top_k
    if weights.dim() != 2 or weights.shape[1] != k or weights.numel() != pairs or not weights.is_contiguous():
        raise ValueError(
            f"grouped_linear_combine: contiguous weights [T, {k}] for {pairs} pairs expected, got {list(weights.shape)}"
        )
    if dispatch.order.shape[0] != pairs:
        raise ValueError(f"grouped_linear_combine: h has {pairs} rows and the dispatch {dispatch.order.shape[0]} pairs")
    run = choose(COMBINE_IMPLEMENTATIONS, (h, weight, dispatch), implementation)
    return run(h, weight, dispatch, weights, bias)


def _sizes(weight: torch.Tensor) -> tuple[int, int, int]:
    """E, N and K of the experts' weights, packed or not."""
    if is_packed(weight):
        rows, inner = unpacked_shape(weight.shape[1:])
        return weight.shape[0], rows, inner
    return weight.shape[0], weight.shape[1], weight.shape[2]


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, dispatch: Dispatch, bias: torch.Tensor | None) -> int:
    """The weight's N."""
    if isinstance(weight, QuantizedTensor):
        raise TypeError(f"{name}: the weight is a QuantizedTensor; give what pack_expert_weight makes of it")
    packed = is_packed(weight)
    if x.dim() != 2 or weight.dim() != (4 if packed else 3) or x.shape[1] != _sizes(weight)[2]:
        raise ValueError(
            f"{name}: rows [*, K] and weight [E, N, K] expected, got {list(x.shape)} and {list(weight.shape)}"
            + (" packed" if packed else "")
        )
    experts, columns, _ = _sizes(weight)
    if (x.dtype != weight.dtype and not packed) or (bias is not None and bias.dtype != x.dtype):
        raise TypeError(
            f"{name}: rows, weight and bias must be of one type, got {x.dtype}, {weight.dtype}"
            + ("" if bias is None else f", {bias.dtype}")
        )
    if x.stride(1) != 1:
        raise ValueError(f"{name}: the values of a row must lie together, got strides {x.stride()}")
    if bias is not None and (bias.shape != (experts, columns) or not bias.is_contiguous()):
        raise ValueError(f"{name}: contiguous bias [{experts}, {columns}] expected, got {list(bias.shape)}")
    if dispatch.starts.shape != (experts + 1,):
        raise ValueError(f"{name}: the weight has {experts} experts and the dispatch {dispatch.starts.shape[0] - 1}")
    devices = {str(t.device) for t in (x, weight, dispatch.order, dispatch.starts, *([] if bias is None else [bias]))}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors of one device expected, got some on {' and some on '.join(sorted(devices))}")
    return columns
