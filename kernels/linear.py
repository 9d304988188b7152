"""Linear layer, and the gated one that begins an MLP.

    linear:        y = x weight^T + bias
    linear_gated:  y = f(g) * u   with g and u the halves of x weight^T + bias, gate first

Shapes: x [T, in], weight [out, in], bias [out], y [T, out], gated [T, out / 2].

On the CPU most weights are best stored column-major (`pack_linear_weight` knows which): the matrix product then streams
them in their own order whatever T is. 16-bit types on a CPU without matrix instructions for them are multiplied in
fp32, a panel of the weight at a time; for a few tokens torch's own dot products are faster. Quantised weights stay so
(`packed.py`) where the native kernels run. On a GPU products of few tokens have a kernel of their own
(`linear_small.py`) where the table of `tuning.py` says that it is faster; the others are the vendor library's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hookline_kernels.activation import GATED_ACTIVATIONS, SILU, gated_activation
from hookline_kernels.implementations import Implementation, anywhere, choose
from hookline_kernels.linear_small import GATED_CODES, MAX_TOKENS, linear_gated_small, linear_small
from hookline_kernels.native import LANES, has_native_16bit_products, native, why_not, why_not_on
from hookline_kernels.packed import (
    PANEL,
    bits_of,
    is_packed,
    linear_packed_native,
    linear_packed_panels,
    linear_packed_silu,
    pack,
    packed_bits,
    unpack,
    unpacked_shape,
    why_unpacked,
)
from hookline_kernels.quantized import QuantizedTensor
from hookline_kernels.tuning import configuration

# Up to so many tokens torch's 16-bit dot products beat the conversion of the weight.
DIRECT_TOKENS = 3

# Up to so many tokens the native kernel beats the library's product: in fp32, in bf16, and in bf16 where the CPU has
# instructions of its own for it; with packed weights the library has to have them multiplied out.
NATIVE_TOKENS, NATIVE_TOKENS_BF16, NATIVE_TOKENS_OWN_BF16, NATIVE_TOKENS_PACKED = 16, 32, 8, 128

# Columns of the weight that a thread of the native kernel takes at a time, and sums that it keeps for them.
MIN_TILE, MAX_TILE, TILE_SUMS = 96, 1536, 6144

# x, weight, and whether the answer is wide: not where it is left out.
LinearInput = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, bool]


def pack_linear_weight(
    weight: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The weight [out, in] on a device, for activations of a type, in the layout that `linear` likes best there.

    That is the weight itself on a GPU, and on the CPU for types that torch multiplies best by rows. Else it is a tensor
    of the same shape and values with the strides of a contiguous [in, out], and a `QuantizedTensor` becomes packed.

    Args:
        device, dtype: by default the weight's own.

    Raises:
        ValueError: the weight has not two dimensions.
    """
    if weight.dim() != 2:
        raise ValueError(f"pack_linear_weight: weight [out, in] expected, got {list(weight.shape)}")
    device, dtype = device or weight.device, dtype or weight.dtype
    if isinstance(weight, QuantizedTensor):
        if why_unpacked(weight.shape, device, dtype) is None:
            return pack(weight)
        weight = weight.values()
    weight = weight.to(device=device, dtype=dtype)
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return weight.contiguous()
    by_rows = has_native_16bit_products(dtype) and why_not(weight) is not None
    return weight.contiguous() if by_rows else weight.t().contiguous().t()


def unpack_linear_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A packed weight as `linear` likes it best where it lies now; any other tensor as it is.

    What was packed on one machine may come to another that has no native kernels, where each product would multiply all
    of it out: there it becomes the values [out, in] in `dtype`.
    """
    if not is_packed(weight) or bits_of(weight.shape) is None or why_not_on(weight.device, dtype) is None:
        return weight
    return pack_linear_weight(unpack(weight), weight.device, dtype)


def linear_direct(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """torch's own product."""
    if not wide or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if not x.is_cuda:  # the sums are not to be had there but by multiplying in fp32
        return linear_upcast(x, weight, bias, wide)
    y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return y if bias is None else y.add_(bias)


def linear_upcast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """The product in fp32 for 16-bit types on the CPU, rounded once at the end."""
    rows = x.float()
    columns = weight.t()
    size = weight.shape[0]
    dtype = torch.float32 if wide else x.dtype
    if size <= PANEL:
        y = torch.mm(rows, columns.float())
        return (y if bias is None else y.add_(bias)).to(dtype)
    result = torch.empty((x.shape[0], size), dtype=dtype)
    for start in range(0, size, PANEL):
        panel = slice(start, start + PANEL)
        y = torch.mm(rows, columns[:, panel].float())
        result[:, panel] = y if bias is None else y.add_(bias[panel])
    return result


def linear_native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """For few tokens on the CPU: the weight is read once, all tokens pass by each part of it."""
    (tokens, inner), columns = x.shape, weight.shape[0]
    threads = torch.get_num_threads()
    # A thread's columns: an even share, and few enough that the sums of all tokens stay in the first level cache.
    share = min(max(MIN_TILE, min(MAX_TILE, TILE_SUMS // tokens)), -(-columns // threads))
    tile = -(-share // (2 * LANES)) * 2 * LANES
    y = x.new_empty((tokens, columns), dtype=torch.float32 if wide else x.dtype)
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
    if native(x.dtype).linear(*pointers, tokens, inner, columns, tile, wide, threads):
        raise MemoryError(f"linear: no memory for the sums of {tokens} tokens and {columns} columns")
    return y


def linear_tuned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """For few tokens on a GPU, as the table says."""
    config = configuration(x, weight, "wide" if wide else "plain")
    if config is None:
        raise ValueError("linear_tuned: the library is this shape's choice")
    return linear_small(x, weight, bias, wide, config)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """The formula in fp32."""
    weight = unpack(weight) if is_packed(weight) else weight
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(torch.float32 if wide else x.dtype)


def _native_takes(query: LinearInput) -> str | None:
    x, weight = query[:2]
    most = NATIVE_TOKENS
    if x.dtype == torch.bfloat16:
        most = NATIVE_TOKENS_OWN_BF16 if has_native_16bit_products(x.dtype) else NATIVE_TOKENS_BF16
    if not 0 < x.shape[0] <= most:
        return f"it is for 1 to {most} tokens"
    if is_packed(weight) or weight.stride() != (1, weight.shape[0]) or not x.is_contiguous():
        return "the weight is not column-major, or x is a strided view"
    return why_not(x)


def _packed_native_takes(query: LinearInput) -> str | None:
    x, weight = query[:2]
    if not is_packed(weight):
        return "it is for packed weights"
    if not 0 < x.shape[0] <= NATIVE_TOKENS_PACKED or not x.is_contiguous():
        return f"it is for 1 to {NATIVE_TOKENS_PACKED} tokens that lie together"
    return why_not(x)


def _packed_panels_takes(query: LinearInput) -> str | None:
    weight = query[1]
    return why_not_on(weight.device, torch.float32) if is_packed(weight) else "it is for packed weights"


def _upcast_pays(query: LinearInput) -> str | None:
    x, weight = query[:2]
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16) or is_packed(weight):
        return "it is for 16-bit types on the CPU"
    if has_native_16bit_products(x.dtype):
        return f"this CPU has matrix instructions for {x.dtype}"
    scattered = x.dtype == torch.float16 and weight.stride(1) != 1  # fp16 dot products over columns are very slow
    if x.shape[0] <= DIRECT_TOKENS and not scattered:
        return f"with {x.shape[0]} tokens converting the weight costs more than it saves"
    return None


def _small_takes(query: LinearInput) -> str | None:
    return _few_tokens(query[0], query[1], "wide" if len(query) == 3 and query[2] else "plain")


def _few_tokens(x: torch.Tensor, weight: torch.Tensor, kind: str) -> str | None:
    """Why the kernel for few tokens on a GPU is not for this product."""
    if not x.is_cuda or not 0 < x.shape[0] <= MAX_TOKENS:
        return f"it is for 1 to {MAX_TOKENS} tokens on a GPU"
    if is_packed(weight) or weight.stride(1) != 1 or x.stride(1) != 1:
        return "the rows of x or of the weight do not lie together"
    return "the library was faster, or nobody measured" if configuration(x, weight, kind) is None else None


def _direct_takes(query: LinearInput) -> str | None:
    return "the weight is packed" if is_packed(query[1]) else None


def _always(query: LinearInput) -> str | None:
    return None


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]

IMPLEMENTATIONS: tuple[Implementation[LinearInput, Linear], ...] = (
    Implementation("packed_native", _packed_native_takes, linear_packed_native),
    Implementation("native", _native_takes, linear_native),
    Implementation("packed_panels", _packed_panels_takes, linear_packed_panels),
    Implementation("upcast", _upcast_pays, linear_upcast),
    Implementation("small", _small_takes, linear_tuned),
    Implementation("direct", _direct_takes, linear_direct),
    Implementation("reference", _always, linear_reference),
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    wide: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out].

    Args:
        x, weight, bias: of one type. The weight may have any layout that `pack_linear_weight` gives; a packed one goes
            with every type.
        wide: answer in fp32 whatever x is, without the rounding to its type: for logits, where a rounding makes ties.
        implementation: a name of `IMPLEMENTATIONS`; by default the first that supports x and weight.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    _checked_columns(x, weight, bias)
    return choose(IMPLEMENTATIONS, (x, weight, wide), implementation)(x, weight, bias, wide)


GatedInput = tuple[torch.Tensor, torch.Tensor, str]


def _fused_takes(query: GatedInput) -> str | None:
    x, weight, activation = query
    if GATED_ACTIVATIONS[activation] not in GATED_CODES:
        return f"it has no {activation}"
    return _few_tokens(x, weight, "gated")


def linear_gated_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """For few tokens on a GPU, as the table says: the activation is in the product's kernel."""
    config = configuration(x, weight, "gated")
    if config is None:
        raise ValueError("linear_gated_fused: the library is this shape's choice")
    return linear_gated_small(x, weight, bias, GATED_ACTIVATIONS[activation], config)


def _packed_silu_takes(query: GatedInput) -> str | None:
    x, weight, activation = query
    if GATED_ACTIVATIONS[activation] != SILU or weight.shape[0] % 2:
        return f"it has no {activation}, or the weight's tiles cannot be halved"
    return _packed_native_takes((x, weight))


def linear_gated_packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """For few tokens and a packed weight on the CPU."""
    return linear_packed_silu(x, weight, bias)


def linear_then_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Two steps, with the sums rounded to x's type between them."""
    return gated_activation(linear(x, weight, bias), activation)


LinearGated = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, str], torch.Tensor]

GATED_IMPLEMENTATIONS: tuple[Implementation[GatedInput, LinearGated], ...] = (
    Implementation("packed_silu", _packed_silu_takes, linear_gated_packed),
    Implementation("fused", _fused_takes, linear_gated_fused),
    Implementation("two_steps", anywhere, linear_then_gated),
)


def linear_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """f(gate) * up, whose sums are x [T, in] times weight [2F, in] transposed, plus bias [2F]: [T, F].

    Args:
        x, weight, bias: as for `linear`; the weight's gate rows stand above its up rows.
        activation: a name of `activation.GATED_ACTIVATIONS`.
        implementation: a name of `GATED_IMPLEMENTATIONS`; by default the first that supports the call.

    Raises:
        TypeError, ValueError: a type or shape that does not fit, or a name that is not known.
    """
    columns = _checked_columns(x, weight, bias)
    if columns % 2:
        raise ValueError(f"linear_gated: weight must have gate and up rows, got {columns} rows")
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known are {', '.join(sorted(GATED_ACTIVATIONS))}")
    return choose(GATED_IMPLEMENTATIONS, (x, weight, activation), implementation)(x, weight, bias, activation)


def _checked_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """The weight's `out`, packed or not."""
    if isinstance(weight, QuantizedTensor):
        raise TypeError("linear: the weight is a QuantizedTensor; give what pack_linear_weight makes of it")
    packed = is_packed(weight)
    if packed:
        packed_bits(weight)
        columns, inner = unpacked_shape(weight.shape)
    elif weight.dim() == 2:
        columns, inner = weight.shape
    if x.dim() != 2 or (weight.dim() != 2 and not packed) or x.shape[1] != inner:
        raise ValueError(
            f"linear: x [T, in] and weight [out, in] expected, got {list(x.shape)} and {list(weight.shape)}"
            + (f" packed of [{columns}, {inner}]" if packed else "")
        )
    if (x.dtype != weight.dtype and not packed) or (bias is not None and bias.dtype != x.dtype):
        raise TypeError(
            f"linear: x, weight and bias must be of one type, got {x.dtype}, {weight.dtype}"
            + ("" if bias is None else f", {bias.dtype}")
        )
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        raise ValueError(
            f"linear: bias {list(bias.shape)} with strides {list(bias.stride())} does not fit weight "
            f"[{columns}, {inner}]: contiguous [{columns}] is expected"
        )
    if x.device != weight.device or (bias is not None and bias.device != x.device):
        raise ValueError(
            f"linear: x is on {x.device} and weight on {weight.device}"
            + ("" if bias is None else f", bias on {bias.device}")
        )
    return int(columns)
