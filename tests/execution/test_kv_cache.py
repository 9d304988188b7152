"""The cache's memory: shapes, zeros, and nothing resident before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hookline.errors import NotEnoughMemoryError
from hookline.execution.kv_cache import allocate_cache
from hookline.model import CacheSpec


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_shapes_and_types_of_all_groups() -> None:
    specs = [
        CacheSpec("kv", 2, (("k", (3, 8)), ("v", (3, 4))), torch.bfloat16),
        CacheSpec("latent", 1, (("latent", (6,)),), torch.float32),
    ]
    cache = allocate_cache(specs, 5, 16, torch.device("cpu"))
    assert [len(cache[name]) for name in ("kv", "latent")] == [2, 1]
    assert cache["kv"][1]["k"].shape == (5, 16, 3, 8)
    assert cache["kv"][1]["v"].shape == (5, 16, 3, 4)
    assert cache["kv"][0]["k"].dtype == torch.bfloat16
    assert cache["latent"][0]["latent"].shape == (5, 16, 6)
    assert all(not tensor.any() for layers in cache.values() for entries in layers for tensor in entries.values())


def test_a_large_cache_is_not_resident_until_written() -> None:
    before = resident()
    cache = allocate_cache([CacheSpec("kv", 4, (("k", (8, 64)),), torch.float32)], 2048, 16, torch.device("cpu"))
    assert resident() - before < 16 * 2**20
    cache["kv"][0]["k"][7].fill_(1.0)
    assert float(cache["kv"][0]["k"].sum()) == 16 * 8 * 64


def test_a_cache_that_there_is_no_room_for_is_said() -> None:
    specs = [CacheSpec("kv", 4, (("k", (8, 64)),), torch.float32)]
    with pytest.raises(NotEnoughMemoryError, match=r"no room on cpu for the planned cache of"):
        allocate_cache(specs, 2**36, 16, torch.device("cpu"))
