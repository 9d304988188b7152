"""The paged cache's memory: for each group and layer, entries [blocks, S, ...] that one block table addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hookline.errors import NotEnoughMemoryError
from hookline.memory_planner import format_bytes
from hookline.model import CacheSpec, CacheTensors


def allocate_cache(
    specs: Sequence[CacheSpec], num_blocks: int, block_size: int, device: torch.device
) -> Mapping[str, Sequence[CacheTensors]]:
    """Zeroed cache of all groups. On a CPU its memory is resident only once blocks are written.

    Raises:
        NotEnoughMemoryError: if there is no room for it, though it was planned: others may have taken that since.
    """
    try:
        return {
            spec.name: tuple(
                {name: _zeros((num_blocks, block_size, *shape), spec.dtype, device) for name, shape in spec.entries}
                for _ in range(spec.num_layers)
            )
            for spec in specs
        }
    except (MemoryError, torch.OutOfMemoryError) as error:
        size = num_blocks * block_size * sum(spec.bytes_per_token() for spec in specs)
        raise NotEnoughMemoryError(
            f"There is no room on {device} for the planned cache of {format_bytes(size)}",
            hint="Give it less (--kv-cache-memory), or end what else takes memory there.",
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte; numpy asks the system for pages that are zero until they are used.
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)
