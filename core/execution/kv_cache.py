"""The paged cache's memory: for each group and layer, entries [blocks, S, ...] that one block table addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hookline.model import CacheSpec, CacheTensors


def allocate_cache(
    specs: Sequence[CacheSpec], num_blocks: int, block_size: int, device: torch.device
) -> Mapping[str, Sequence[CacheTensors]]:
    """Zeroed cache of all groups. On a CPU its memory is taken from the system as blocks are first written."""
    return {
        spec.name: tuple(
            {
                name: torch.zeros((num_blocks, block_size, *shape), dtype=spec.dtype, device=device)
                for name, shape in spec.entries
            }
            for _ in range(spec.num_layers)
        )
        for spec in specs
    }
