"""Activations of an MLP, alone and gated.

    activation(x, name):        y = f(x)                       x, y [T, F]
    gated_activation(x, name):  y = f(x[:, :F]) * x[:, F:]     x [T, 2F], gate half first; y [T, F]

Names are those of `hidden_act` in checkpoints' configs. On the CPU f's value is rounded to x's type before the product,
as plain torch modules do; the Triton kernel computes in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import LANES, native, why_not

# One code a function.
SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID, TANH, IDENTITY = range(9)

# What configs call them. Each serves gated and alone.
GATED_ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_python": GELU,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_python_tanh": GELU_TANH,
    "quick_gelu": QUICK_GELU,
    "relu": RELU,
    "relu2": RELU2,
    "relu_squared": RELU2,
    "sigmoid": SIGMOID,
    "tanh": TANH,
    "linear": IDENTITY,
}


def _apply(x: torch.Tensor, code: int) -> torch.Tensor:
    if code == SILU:
        return F.silu(x)
    if code == GELU:
        return F.gelu(x)
    if code == GELU_TANH:
        return F.gelu(x, approximate="tanh")
    if code == QUICK_GELU:
        return torch.sigmoid(1.702 * x).mul_(x)
    if code == RELU:
        return F.relu(x)
    if code == RELU2:
        return F.relu(x).square_()
    if code == SIGMOID:
        return torch.sigmoid(x)
    if code == TANH:
        return torch.tanh(x)
    return x.clone()


def activation_reference(x: torch.Tensor, code: int, gated: bool) -> torch.Tensor:
    """The formula in fp32."""
    if not gated:
        return _apply(x.float(), code).to(x.dtype)
    gate, up = x.float().chunk(2, dim=-1)
    return (_apply(gate, code) * up).to(x.dtype)


def activation_torch(x: torch.Tensor, code: int, gated: bool) -> torch.Tensor:
    """For the CPU: in x's own type."""
    if not gated:
        return _apply(x, code)
    gate, up = x.chunk(2, dim=-1)
    return _apply(gate, code).mul_(up)


@triton.jit
def activation_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and BLOCK columns; y is contiguous. The codes are those at the top of the file."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if CODE == 0:
        y = x * tl.sigmoid(x)
    elif CODE == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CODE == 2:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif CODE == 3:
        y = x * tl.sigmoid(1.702 * x)
    elif CODE == 4:
        y = tl.where(x < 0.0, 0.0, x)
    elif CODE == 5:
        y = tl.where(x < 0.0, 0.0, x * x)
    elif CODE == 6:
        y = tl.sigmoid(x)
    elif CODE == 7:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        y = x
    if GATED:
        y = y * tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def activation_triton(x: torch.Tensor, code: int, gated: bool) -> torch.Tensor:
    """One launch."""
    size = x.shape[1] // 2 if gated else x.shape[1]
    y = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block = min(1024, triton.next_power_of_2(size))
    activation_kernel[(x.shape[0], triton.cdiv(size, block))](
        x, y, x.stride(0), size, CODE=code, GATED=gated, BLOCK=block
    )
    return y


def silu_and_mul_native(x: torch.Tensor, code: int, gated: bool) -> torch.Tensor:
    """For the CPU: SiLU and the product in one pass."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, size), dtype=x.dtype)
    native(x.dtype).silu_and_mul(x.data_ptr(), y.data_ptr(), rows, size, x.stride(0), torch.get_num_threads())
    return y


ActivationQuery = tuple[torch.Tensor, int, bool]


def _native_takes(query: ActivationQuery) -> str | None:
    x, code, gated = query
    if code != SILU or not gated or x.shape[1] % (2 * LANES):
        return f"it takes gated SiLU alone, in halves of a multiple of {LANES}"
    return why_not(x)


Activation = Callable[[torch.Tensor, int, bool], torch.Tensor]

IMPLEMENTATIONS: tuple[Implementation[ActivationQuery, Activation], ...] = (
    Implementation("native", _native_takes, silu_and_mul_native),
    Implementation("torch", on_cpu, activation_torch),
    Implementation("triton", by_triton, activation_triton),
    Implementation("reference", anywhere, activation_reference),
)


def activation(x: torch.Tensor, name: str, *, implementation: str | None = None) -> torch.Tensor:
    """f(x) for x [T, F]; a new tensor.

    Raises:
        TypeError, ValueError: a type or shape that does not fit, or a name that is not known.
    """
    code = _checked_code(x, name)
    return choose(IMPLEMENTATIONS, (x, code, False), implementation)(x, code, False)


def gated_activation(x: torch.Tensor, name: str, *, implementation: str | None = None) -> torch.Tensor:
    """f(gate) * up for x [T, 2F], whose first half is the gate; a new tensor [T, F].

    Raises:
        TypeError, ValueError: a type or shape that does not fit, or a name that is not known.
    """
    code = _checked_code(x, name)
    if x.shape[1] % 2:
        raise ValueError(f"gated_activation: x must have two halves, got {list(x.shape)}")
    return choose(IMPLEMENTATIONS, (x, code, True), implementation)(x, code, True)


def silu_and_mul(x: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """silu(gate) * up for x [T, 2F]; see `gated_activation`."""
    return gated_activation(x, "silu", implementation=implementation)


def gelu_and_mul(x: torch.Tensor, *, approximate: str = "none", implementation: str | None = None) -> torch.Tensor:
    """gelu(gate) * up for x [T, 2F]; `approximate` is "none" or "tanh". See `gated_activation`."""
    names = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}
    if approximate not in names:
        raise ValueError(f"gelu_and_mul: approximate must be 'none' or 'tanh', got {approximate!r}")
    return gated_activation(x, names[approximate], implementation=implementation)


def _checked_code(x: torch.Tensor, name: str) -> int:
    code = GATED_ACTIVATIONS.get(name)
    if code is None:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(sorted(GATED_ACTIVATIONS))}")
    if not x.is_floating_point():
        raise TypeError(f"activation: x must hold floating point numbers, got {x.dtype}")
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"activation: x must be [T, F] with contiguous rows, got {list(x.shape)} strides {x.stride()}")
    return code
