"""Weight adapters: checkpoint names and values become the names and values that the containers declare.

A checkpoint is a stream of `LazyTensor`s. An adapter takes each and answers none (dropped on purpose), one (renamed,
reshaped, dequantised) or several (split). It never reads values while it decides, so the same adapter serves both
loading and the audit of a checkpoint's header.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A checkpoint's tensor that is read when `load` is called, not before.

    Attributes:
        name: as the checkpoint, or an adapter, calls it.
        shape: of the tensor that `load` returns.
        encoding: number format in the file, such as `bfloat16` or `Q4_1`.
        nbytes: bytes in the file.
        load: reads the values; the caller owns the result and may keep it, and change it unless it is a
            `QuantizedTensor`, which acts as the float32 tensor that it stands for but cannot be written to.
        code_bits: bits of a value where `load` gives a `QuantizedTensor`, unless a scale is not finite; else None.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int
    load: Callable[[], torch.Tensor]
    code_bits: int | None = None

    def renamed(self, name: str) -> LazyTensor:
        """The same tensor under another name."""
        return dataclasses.replace(self, name=name)

    def mapped(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        shape: tuple[int, ...] | None = None,
        *,
        keeps_codes: bool = True,
    ) -> LazyTensor:
        """The tensor with `function` applied when it is read.

        Args:
            shape: where `function` changes it.
            keeps_codes: whether `function` only reorders or cuts rows, so that what is quantised stays so. Memory is
                reckoned by it.
        """
        load, code_bits = self.load, self.code_bits if keeps_codes else None
        shape = self.shape if shape is None else shape
        return dataclasses.replace(self, shape=shape, code_bits=code_bits, load=lambda: function(load()))


class WeightAdapter:
    """The default adapter: names and values stay as they are."""

    def adapt(self, tensor: LazyTensor) -> Iterable[LazyTensor]:
        """What the containers get for `tensor`; nothing where it is dropped on purpose."""
        return (tensor,)
