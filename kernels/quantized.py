"""Tensors that hold the codes of quantised weights, a byte each, until `packed.py` packs them into 4 or 8 bits.

A row of a weight is cut into groups of 32 values, and value = scale * code + offset with one scale and one offset of
fp16 for a group. The product of scale and code needs at most 19 bits, so fp32 holds it exactly: multiplying a value out
early, late or inside a fused multiply-add gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

GROUP = 32


class QuantizedTensor(torch.Tensor):
    """A float32 tensor that holds codes, scales and offsets in place of its values.

    Viewing, reshaping, permuting, cutting, indexing with a number, joining and stacking that leave the last dimension
    whole work on the codes. Every other operation is given the values, so that code which knows nothing of quantised
    weights stays right; conversions (`to`, `float`, `cpu`) answer with values too, also where nothing is to convert.

    Writing is refused, to the tensor, to what keeps its codes, and by an index (`w[:, 3] = 1`). What does not keep the
    codes is a copy where torch would give a view, and a plain tensor: writing to that (`w.t().zero_()`,
    `w[:, 3].fill_(1)`) changes the copy alone. It has no memory of values, so `data_ptr` is refused.

    Args:
        codes: [*, K]: uint8 of 0 to 15 with `offsets`, or int8 without.
        scales, offsets: [*, K / 32] fp16; that they are finite, as the native kernels need them, is the maker's to see.

    Raises:
        ValueError: shapes or types that are not those.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None) -> QuantizedTensor:
        groups = (*codes.shape[:-1], codes.shape[-1] // GROUP)
        parts = [scales] if offsets is None else [scales, offsets]
        kind = torch.int8 if offsets is None else torch.uint8
        sound = all(part.shape == groups and part.dtype == torch.float16 for part in parts)
        if codes.shape[-1] % GROUP or codes.dtype != kind or not sound:
            found = [(str(part.dtype), list(part.shape)) for part in parts]
            raise ValueError(
                f"codes {codes.dtype} {list(codes.shape)} with {found} do not fit: {kind} with numbers in fp16, "
                f"one a group of {GROUP}, is expected"
            )
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        self.codes, self.scales, self.offsets = codes, scales, offsets
        return self

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.offsets is None else 4

    def values(self) -> torch.Tensor:
        """The float32 tensor that this one stands for."""
        values = self.codes.float()
        groups = values.view(*self.scales.shape, GROUP)
        groups *= self.scales.unsqueeze(-1).float()
        if self.offsets is not None:
            groups += self.offsets.unsqueeze(-1).float()
        return values

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        """With `function`, which must not depend on the last dimension's length, done to codes, scales and offsets."""
        offsets = None if self.offsets is None else function(self.offsets)
        return QuantizedTensor(function(self.codes), function(self.scales), offsets)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no type there
        return f"QuantizedTensor({list(self.shape)}, bits={self.bits})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch would answer without asking `__torch_dispatch__`."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.__setitem__ and isinstance(args[0], cls):
            raise TypeError(_REFUSAL.format("assigning by an index"))
        if func is torch.Tensor.data_ptr:
            raise TypeError("a quantised tensor has no values in memory for a kernel; use values()")
        if func in _CONVERSIONS:
            args, kwargs = tree_map(lambda x: x.values() if isinstance(x, cls) else x, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance's method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        by_rows = _BY_ROWS.get(func)
        kwargs = dict(kwargs or {})
        result = by_rows(*args, **kwargs) if by_rows is not None else None
        if result is not None:
            return result
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(given.get(argument.name), cls):
                raise TypeError(_REFUSAL.format(func))
        args, kwargs = tree_map(lambda x: x.values() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


_REFUSAL = "{} writes to a quantised tensor, whose values do not lie in memory; use values()"

_CONVERSIONS = frozenset(
    (torch.Tensor.to, torch.Tensor.float, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.type_as)
)


def _same(x: QuantizedTensor, **options: Any) -> QuantizedTensor | None:
    """clone and detach: the codes are never written to, so nothing needs a copy."""
    return x.mapped(lambda part: part)


def _view(x: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor | None:
    known = -math.prod(shape)
    full = [x.numel() // known if size == -1 and known else size for size in shape]
    if not full or full[-1] != x.shape[-1]:
        return None
    return x.mapped(lambda part: part.reshape(*full[:-1], part.shape[-1]))


def _transpose(x: QuantizedTensor, first: int, second: int) -> QuantizedTensor | None:
    if _is_last(x, first) or _is_last(x, second):
        return None
    return x.mapped(lambda part: part.transpose(first, second))


def _permute(x: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor | None:
    return x.mapped(lambda part: part.permute(*dims)) if dims[-1] % x.dim() == x.dim() - 1 else None


def _unsqueeze(x: QuantizedTensor, dim: int) -> QuantizedTensor | None:
    front = dim % (x.dim() + 1)
    return None if front == x.dim() else x.mapped(lambda part: part.unsqueeze(front))


def _select(x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor | None:
    return None if _is_last(x, dim) else x.mapped(lambda part: part.select(dim, index))


def _unbind(x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor] | None:
    return (
        None if _is_last(x, dim) else [x.mapped(partial(torch.select, dim=dim, index=i)) for i in range(x.shape[dim])]
    )


def _slice(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor | None:
    if _is_last(x, dim):
        return None
    cut = (slice(None),) * (dim % x.dim()) + (slice(start, end, step),)
    return x.mapped(lambda part: part[cut])


def _split(x: QuantizedTensor, size: int | list[int], dim: int = 0) -> list[QuantizedTensor] | None:
    if _is_last(x, dim):
        return None
    parts = [torch.split(part, size, dim) for part in (x.codes, x.scales, x.offsets) if part is not None]
    return [QuantizedTensor(*part) for part in zip(*parts, strict=True)]


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> QuantizedTensor | None:
    return _joined(torch.cat, parts, dim, parts[0].dim())


def _stack(parts: Sequence[torch.Tensor], dim: int = 0) -> QuantizedTensor | None:
    return _joined(torch.stack, parts, dim, parts[0].dim() + 1)


def _joined(
    join: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], dim: int, dims: int
) -> QuantizedTensor | None:
    """The parts joined along `dim` of a result with `dims` dimensions."""
    tensors = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(tensors) < len(parts) or len({part.bits for part in tensors}) > 1 or dim % dims == dims - 1:
        return None
    offsets = [part.offsets for part in tensors if part.offsets is not None]
    return QuantizedTensor(
        join([part.codes for part in tensors], dim),
        join([part.scales for part in tensors], dim),
        join(offsets, dim) if offsets else None,
    )


def _is_last(x: QuantizedTensor, dim: int) -> bool:
    return dim % x.dim() == x.dim() - 1


# By overload: others of the same name (a view as another type, `cat` into a tensor) are other operations.
_BY_ROWS: Mapping[Any, Callable[..., QuantizedTensor | list[QuantizedTensor] | None]] = {
    torch.ops.aten.clone.default: _same,
    torch.ops.aten.detach.default: _same,
    torch.ops.aten.view.default: _view,
    torch.ops.aten._unsafe_view.default: _view,
    torch.ops.aten.transpose.int: _transpose,
    torch.ops.aten.permute.default: _permute,
    torch.ops.aten.unsqueeze.default: _unsqueeze,
    torch.ops.aten.select.int: _select,
    torch.ops.aten.unbind.int: _unbind,
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.stack.default: _stack,
}
