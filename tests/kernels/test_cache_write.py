"""cache_write: bits land in their slots and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline_kernels.cache_write import cache_write

# Slots of a cache of 5 blocks of 4 tokens.
SLOTS: list[list[int]] = [[], [0], [19], [3, 4, 17, 8], [-1], [-1, 6, -1, 2], [5, -7]]


@pytest.mark.parametrize("implementation", ["torch", "triton", "reference"])
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_writes_its_slots_only(
    slots: list[int], implementation: str, triton_device: torch.device, triton_dtype: torch.dtype
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    fused = torch.randn(len(slots), 9, 20, device=device).to(triton_dtype)
    latent = torch.randn(len(slots), 1100, device=device).to(triton_dtype)
    values = (fused[:, 2:5], fused[:, 5:8], latent)
    caches = tuple(
        torch.full((5, 4, *value.shape[1:]), float("nan"), device=device).to(triton_dtype) for value in values
    )
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots):
        if slot >= 0:
            for value, cache in zip(values, expected, strict=True):
                cache[slot // 4, slot % 4] = value[token]
    cache_write(values, caches, torch.tensor(slots, dtype=torch.int64, device=device), implementation=implementation)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("implementation", ["torch", "triton", "reference"])
def test_converts_to_the_type_of_the_cache(implementation: str, triton_device: torch.device) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    value, cache = torch.randn(2, 3, 8, device=device), torch.zeros(2, 4, 3, 8, dtype=torch.float16, device=device)
    cache_write([value], [cache], torch.tensor([6, 1], device=device), implementation=implementation)
    assert torch.equal(cache[1, 2], value[0].half()) and torch.equal(cache[0, 1], value[1].half())


def test_a_slot_past_the_cache_is_named() -> None:
    with pytest.raises(ValueError, match="slot 8 does not exist, the cache has 8"):
        cache_write([torch.zeros(2, 3, 8)], [torch.zeros(2, 4, 3, 8)], torch.tensor([-1, 8]))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slots": torch.zeros(2, dtype=torch.int32)}, TypeError, "int64"),
    ({"slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "3 slots"),
    ({"values": [torch.zeros(2, 3, 9)]}, ValueError, "do not fit"),
    ({"values": []}, ValueError, "0 values for 1 caches"),
    ({"caches": [torch.zeros(2, 4, 8, 3).transpose(2, 3)]}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "values": [torch.zeros(2, 3, 8)],
        "caches": [torch.zeros(2, 4, 3, 8)],
        "slots": torch.tensor([1, 5]),
    }
    cache_write(**arguments)
    with pytest.raises(error, match=message):
        cache_write(**{**arguments, **change})
