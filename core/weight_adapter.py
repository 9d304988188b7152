"""Weight adapters: checkpoint names and values become the names and values that the containers declare.

A checkpoint is a stream of `LazyTensor`s. An adapter takes each and answers none (dropped on purpose), one (renamed,
reshaped, dequantised) or several (split). It never reads values while it decides, so the same adapter serves both
loading and the audit of a checkpoint's header. Where tensors belong together, such as a weight and its scales, it takes
them all at once (`adapt_all`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
        sources: the checkpoint's names of all that it is made of, where `name` alone does not say it.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int
    load: Callable[[], torch.Tensor]
    code_bits: int | None = None
    sources: tuple[str, ...] = ()

    @property
    def origins(self) -> tuple[str, ...]:
        """The checkpoint's names of all that it is made of."""
        return self.sources or (self.name,)

    def renamed(self, name: str) -> LazyTensor:
        """The same tensor under another name."""
        return dataclasses.replace(self, name=name, sources=self.origins)

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

    def split(self, parts: Mapping[str, Sequence[int | slice]]) -> tuple[LazyTensor, ...]:
        """Parts of the tensor that do not overlap, by name, each at an index of its own.

        The tensor is read once for all, when the first part is, and each part is a view of it.
        """
        count, shapes = len(parts), torch.empty(self.shape, device="meta")
        whole = _Whole(self.load, count)
        ends = [self.nbytes * place // count for place in range(count + 1)]
        return tuple(
            LazyTensor(
                name=name,
                shape=tuple(shapes[tuple(index)].shape),
                encoding=self.encoding,
                nbytes=end - begin,
                load=partial(whole.take, tuple(index)),
                sources=self.origins,
            )
            for (name, index), begin, end in zip(parts.items(), ends, ends[1:], strict=False)
        )


class _Whole:
    """A tensor that is read when its first part is taken, and let go of when all have been."""

    def __init__(self, load: Callable[[], torch.Tensor], parts: int) -> None:
        self._load, self._parts = load, parts
        self._left = parts
        self._tensor: torch.Tensor | None = None

    def take(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        tensor = self._load() if self._tensor is None else self._tensor
        self._left -= 1
        self._tensor = tensor if self._left else None
        self._left = self._left or self._parts
        return tensor[index]


class WeightAdapter:
    """The default adapter: names and values stay as they are."""

    def adapt(self, tensor: LazyTensor) -> Iterable[LazyTensor]:
        """What the containers get for `tensor`; nothing where it is dropped on purpose."""
        return (tensor,)

    def adapt_all(self, tensors: Iterable[LazyTensor]) -> Iterator[LazyTensor]:
        """What the containers get for a whole checkpoint; by default for one tensor after another."""
        for tensor in tensors:
            yield from self.adapt(tensor)


class FusedExpertsAdapter(WeightAdapter):
    """For containers that declare lists of experts: takes checkpoints that hold all experts of a layer as one tensor.

    `*.experts.gate_up_proj` [E, 2F, M], gate rows first, and `*.experts.down_proj` [E, M, F] are split into matrices;
    `transformers` holds models so in memory, and other tools save them so. All else passes as it is.

    Args:
        block: where the containers have the experts and the router, such as `mlp`.
        gate, up, down: what they call an expert's matrices, such as `gate_proj`.
        fused_block: where the fused tensors are; what else is there is renamed to be in `block`.
    """

    def __init__(self, block: str, gate: str, up: str, down: str, fused_block: str = "mlp") -> None:
        self.block, self.gate, self.up, self.down = block, gate, up, down
        self._fused = re.compile(rf"(.+\.\d+)\.{re.escape(fused_block)}\.(.+)")

    def adapt(self, tensor: LazyTensor) -> Iterable[LazyTensor]:
        match = self._fused.fullmatch(tensor.name)
        if match is None:
            return (tensor,)
        block, rest = f"{match[1]}.{self.block}", match[2]
        if rest not in ("experts.gate_up_proj", "experts.down_proj") or len(tensor.shape) != 3:
            name = f"{block}.{rest}"
            return (tensor if name == tensor.name else tensor.renamed(name),)
        experts, rows, _ = tensor.shape
        parts: dict[str, Sequence[int | slice]] = {}
        for expert in range(experts):
            name = f"{block}.experts.{expert}"
            if rest == "experts.down_proj":
                parts[f"{name}.{self.down}.weight"] = (expert,)
            else:
                parts[f"{name}.{self.gate}.weight"] = (expert, slice(rows // 2))
                parts[f"{name}.{self.up}.weight"] = (expert, slice(rows // 2, rows))
        return tensor.split(parts)
