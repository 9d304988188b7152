"""Seeded random weights for a config: what a model costs and whether it runs, without downloading it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import torch

from hookline.checkpoint.reader import JsonObject, TokenizerSource
from hookline.weight_adapter import LazyTensor

_STD = 0.02


@dataclass(frozen=True, slots=True)
class RandomReader:
    """Random weights of given names and shapes.

    Attributes:
        hf_config: the fields of `config.json`.
        shapes: name and shape of every tensor, as the containers name them: no weight adapter is needed.
        dtype: of the tensors.
        seed: with a tensor's name it fixes the tensor's values, whatever the order of loading.
        device: where they are drawn and stay. A CPU draws in fp32 and rounds; other devices draw in `dtype`, so their
            values are others, and a model of 8 billion weights takes seconds and no memory of the host.
        tokenizer: answered as `tokenizer_source`.
    """

    hf_config: JsonObject
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"
    generation_config: JsonObject = field(default_factory=dict)
    tokenizer: TokenizerSource = field(default_factory=TokenizerSource)

    @property
    def weights_format(self) -> str:
        return "random"

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) for _, shape in self.shapes) * self.dtype.itemsize

    @property
    def tokenizer_source(self) -> TokenizerSource:
        return self.tokenizer

    def with_shapes(
        self, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype, seed: int, device: str = "cpu"
    ) -> RandomReader:
        """The same checkpoint with tensors of these shapes, drawn on `device`."""
        return dataclasses.replace(self, shapes=tuple(shapes), dtype=dtype, seed=seed, device=device)

    def tensors(self) -> Iterator[LazyTensor]:
        """In the order of `shapes`."""
        encoding = str(self.dtype).removeprefix("torch.")
        for name, shape in self.shapes:
            load = partial(_draw, name, shape, self.dtype, self.seed, torch.device(self.device))
            yield LazyTensor(name, shape, encoding, prod(shape) * self.dtype.itemsize, load)


def _draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Normal with deviation 0.02; around 1 for the weight of a norm, which is told by its single dimension."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # Rounding comes last on a CPU, so that a seed means the same model in every type there.
    drawn = torch.float32 if device.type == "cpu" else dtype
    values = torch.empty(shape, dtype=drawn, device=device).normal_(0.0, _STD, generator=generator)
    if len(shape) == 1 and name.endswith("weight"):
        values += 1.0
    return values.to(dtype)
