"""Writing of this step's cache entries into the paged cache.

    flat cache[slots[t]] = values[t]        for each token t whose slot is not negative

A slot is block id * S + place in the block; a negative one means that the row is padding and is written nowhere.

Shapes: slots [T] int64; each pair of values [T, *entry] and cache [blocks, S, *entry], where an entry is (K, D) for
keys and values or (L,) for a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.native import native, why_not


def cache_write_reference(values: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """The formula in plain torch."""
    kept = slots >= 0
    for value, cache in zip(values, caches, strict=True):
        cache.flatten(0, 1)[slots[kept]] = value[kept].to(cache.dtype)


def cache_write_torch(values: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """For the CPU: one copy an entry.

    `index_copy_` refuses a negative index, so looking for padding costs nothing where there is none; what it wrote
    before refusing is written again with the same values.
    """
    try:
        for value, cache in zip(values, caches, strict=True):
            entries = value if value.dtype == cache.dtype else value.to(cache.dtype)
            cache.flatten(0, 1).index_copy_(0, slots, entries)
    except IndexError:
        count = caches[0].shape[0] * caches[0].shape[1]
        if int(slots.max()) >= count:
            raise ValueError(f"cache_write: slot {int(slots.max())} does not exist, the cache has {count}") from None
        cache_write_reference(values, caches, slots)


@triton.jit
def cache_write_kernel(
    value_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    value_stride: tl.tensor,
    slot_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program a token and BLOCK elements of its entry."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < size
        entry = tl.load(value_ptr + token * value_stride + columns, mask=inside, other=0.0)
        tl.store(cache_ptr + slot * slot_stride + columns, entry.to(cache_ptr.dtype.element_ty), mask=inside)


def cache_write_triton(values: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """One launch an entry."""
    tokens = slots.shape[0]
    if tokens == 0:
        return
    for value, cache in zip(values, caches, strict=True):
        flat = value.flatten(1)  # a view where an entry is contiguous, a copy where it is not
        size = flat.shape[1]
        block = min(1024, triton.next_power_of_2(size))
        cache_write_kernel[(tokens, triton.cdiv(size, block))](
            flat, cache, slots, flat.stride(0), cache.stride(1), size, BLOCK=block
        )


def cache_write_native(values: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """For the CPU: one pass an entry."""
    for value, cache in zip(values, caches, strict=True):
        capacity = cache.shape[0] * cache.shape[1]
        sizes = (len(slots), cache.stride(1), value.stride(0), capacity)
        past = native(cache.dtype).cache_write(value.data_ptr(), cache.data_ptr(), slots.data_ptr(), *sizes)
        if past >= 0:
            raise ValueError(f"cache_write: slot {int(slots[past])} does not exist, the cache has {capacity}")


CacheWriteQuery = tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]]


def _native_takes(query: CacheWriteQuery) -> str | None:
    _, values, caches = query
    if any(value.dtype != cache.dtype for value, cache in zip(values, caches, strict=True)):
        return "values and caches differ in type"
    if any(value.stride()[1:] != cache.stride()[2:] for value, cache in zip(values, caches, strict=True)):
        return "an entry's elements do not lie together"
    return why_not(caches[0])


CacheWrite = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor], None]

IMPLEMENTATIONS: tuple[Implementation[CacheWriteQuery, CacheWrite], ...] = (
    Implementation("native", _native_takes, cache_write_native),
    Implementation("torch", on_cpu, cache_write_torch),
    Implementation("triton", by_triton, cache_write_triton),
    Implementation("reference", anywhere, cache_write_reference),
)


def cache_write(
    values: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Writes each of `values` into its cache, in place.

    Args:
        values: tensors [T, *entry]; may be strided views, such as the k and v parts of a fused projection.
        caches: as many contiguous tensors [blocks, S, *entry]; values are converted to their type.
        slots: [T] int64, no slot twice; negative ones are skipped. On the CPU a slot past the cache raises, on a GPU
            it is not looked for.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports the tensors.

    Raises:
        TypeError, ValueError: a type, shape or slot that does not fit.
    """
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise TypeError(f"cache_write: slots must be contiguous int64 [T], got {slots.dtype} {list(slots.shape)}")
    if len(values) != len(caches) or not values:
        raise ValueError(f"cache_write: {len(values)} values for {len(caches)} caches")
    for value, cache in zip(values, caches, strict=True):
        if cache.dim() < 3 or value.shape[1:] != cache.shape[2:] or value.shape[0] != slots.shape[0]:
            raise ValueError(
                f"cache_write: values {list(value.shape)} and {slots.shape[0]} slots "
                f"do not fit a cache of [blocks, S, *entry] = {list(cache.shape)}"
            )
        if not cache.is_contiguous():
            raise ValueError("cache_write: a cache must be contiguous")
    choose(IMPLEMENTATIONS, (slots, values, caches), implementation)(values, caches, slots)
