"""Which kernel and configuration of the grouped products serves which shape on a GPU, from the shape alone.

The host does not know how the pairs are spread over the experts: it goes by the mean number of rows of an expert that
has some, with room for those that have more. benchmarks/tune_moe.py measures what is chosen here beside all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch
import triton

from hookline_kernels.grouped_gemm_triton import TilesConfig, why_no_tma
from hookline_kernels.grouped_small import GroupedSmallConfig
from hookline_kernels.tuning import device_facts

# Mean rows of an active expert up to which the kernel for few pairs is taken, and its block_m for each.
_SMALL = {8: 16, 20: 32, 48: 64}

# Mean rows from which tiles of 128 rows are mostly full.
_FULL_TILES = 64

# Mean rows from which the second product is faster with a program for each tile.
_MANY_ROWS = 128

_LEAST_SHARED = 99 * 1024

Config = TypeVar("Config", GroupedSmallConfig, TilesConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedShape:
    """What the choice depends on: P pairs of T tokens over E experts; a weight [n, k] each, with gate and up or not."""

    tokens: int
    pairs: int
    experts: int
    n: int
    k: int
    has_gate: bool
    width: int

    @property
    def rows(self) -> float:
        """The mean of an expert that has some, were all of them used."""
        return self.pairs / max(1, min(self.pairs, self.experts))


@cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return _LEAST_SHARED
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", _LEAST_SHARED))


def _fitting(config: Config, shape: GroupedShape, device: torch.device) -> Config:
    """With as many stages as a program's shared memory holds, and a smaller block of K if even two are too many."""
    while config.shared_bytes(shape.width, shape.has_gate) > _shared(device) - 4096:
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_k > 32:
            config = replace(config, block_k=config.block_k // 2)
        else:
            break
    return config


def small_config(shape: GroupedShape, device: torch.device) -> GroupedSmallConfig | None:
    """For few pairs; None where there are too many."""
    block_m = next((block for most, block in _SMALL.items() if shape.rows <= most), None)
    if block_m is None and shape.tokens <= 64:
        block_m = 64  # then one tile holds all rows of any expert
    if block_m is None:
        return None
    if shape.tokens == 1:
        block_n, block_k = (4, 512) if shape.has_gate else (16, 256)
        config = GroupedSmallConfig(form="vector", block_m=1, block_n=block_n, block_k=block_k, stages=6)
    elif shape.has_gate and block_m == 64:
        config = GroupedSmallConfig(form="rows", block_m=64, block_n=128, block_k=64, stages=4, pdl=True)
    elif shape.has_gate:
        config = GroupedSmallConfig(block_m=block_m, block_n=128, stages=3, pdl=True)
    elif block_m == 16:
        config = GroupedSmallConfig(block_m=16, block_n=64, stages=6, pdl=True)
    else:
        config = GroupedSmallConfig(block_m=block_m, block_n=128, stages=4, pdl=True)
    return _fitting(replace(config, splits=_splits(config, shape, device)), shape, device)


def _splits(config: GroupedSmallConfig, shape: GroupedShape, device: torch.device) -> int:
    """Parts of K that give every multiprocessor about two programs, each with a good part of K."""
    processors = device_facts(device).multiprocessors if device.type == "cuda" else 1
    rows = shape.n // 2 if shape.has_gate else shape.n
    programs = min(shape.pairs, shape.experts) * triton.cdiv(rows, config.block_n)
    if config.form == "vector":
        processors *= 4
    wanted = triton.cdiv(3 * processors // 2, max(1, programs))
    return int(max(1, min(wanted, 8, shape.k // 1024)))


def tiles_config(x: torch.Tensor, weight: torch.Tensor, shape: GroupedShape) -> TilesConfig:
    """For many pairs; TMA where the device and the alignment of rows allow it."""
    if why_no_tma(x, weight) is not None:
        config = TilesConfig(block_n=64 if shape.has_gate else 128, stages=3, tma="none", persistent=False)
    elif shape.has_gate:
        config = TilesConfig(block_n=128)
    else:
        few = shape.rows < _MANY_ROWS
        config = TilesConfig(block_n=256, persistent=few, overlap=few)
    if shape.rows < _FULL_TILES:
        config = replace(config, block_m=64, warps=4, block_n=min(128, config.block_n))
    return _fitting(config, shape, x.device)
