"""Tensors that keep 4 or 8 bits a value.

A row of a weight is cut into groups of 32 values, and value = scale * code + offset with one scale and one offset of
fp16 for a group. The product of scale and code needs at most 19 bits, so fp32 holds it exactly: multiplying a value out
early, late or inside a fused multiply-add gives the same bits. `packed.py` computes with such weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

GROUP = 32


class QuantizedTensor(torch.Tensor):
    """A float32 tensor that holds codes, scales and offsets in place of its values.

    Viewing, reshaping, transposing, cutting and joining that leave the last dimension whole work on the codes. Every
    other operation is given the values, so that code which knows nothing of quantised weights stays right; writing to
    one is refused, and what is not kept as codes is a copy, not a view.

    Args:
        codes: [*, K]: uint8 of 0 to 15 with `offsets`, or int8 without.
        scales, offsets: [*, K / 32] fp16, all finite.

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
        if codes.shape[-1] % GROUP or codes.dtype != kind or any(part.shape != groups for part in parts):
            raise ValueError(
                f"codes {codes.dtype} {list(codes.shape)} with {[list(part.shape) for part in parts]} do not fit: "
                f"{kind} in groups of {GROUP} is expected"
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
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance's method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        by_rows = _BY_ROWS.get(func.overloadpacket)
        kwargs = dict(kwargs or {})
        result = by_rows(*args, **kwargs) if by_rows is not None else None
        if result is not None:
            return result
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(given.get(argument.name), cls):
                raise TypeError(f"{func} writes to a quantised tensor, whose values do not lie in memory; use values()")
        args, kwargs = tree_map(lambda x: x.values() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


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
    last = x.dim() - 1
    if last in (first % x.dim(), second % x.dim()):
        return None
    return x.mapped(lambda part: part.transpose(first, second))


def _slice(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor | None:
    if dim % x.dim() == x.dim() - 1:
        return None
    cut = (slice(None),) * (dim % x.dim()) + (slice(start, end, step),)
    return x.mapped(lambda part: part[cut])


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> QuantizedTensor | None:
    tensors = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(tensors) < len(parts) or len({part.bits for part in tensors}) > 1:
        return None
    if dim % tensors[0].dim() == tensors[0].dim() - 1:
        return None
    offsets = [part.offsets for part in tensors if part.offsets is not None]
    return QuantizedTensor(
        torch.cat([part.codes for part in tensors], dim),
        torch.cat([part.scales for part in tensors], dim),
        torch.cat(offsets, dim) if offsets else None,
    )


_BY_ROWS: Mapping[Any, Callable[..., QuantizedTensor | None]] = {
    torch.ops.aten.clone: _same,
    torch.ops.aten.detach: _same,
    torch.ops.aten.view: _view,
    torch.ops.aten._unsafe_view: _view,
    torch.ops.aten.transpose: _transpose,
    torch.ops.aten.slice: _slice,
    torch.ops.aten.cat: _cat,
}
