"""Rotary position embedding and the writing of the cache as one operation on a fused projection.

    qkv[t]             = query heads, key heads, value heads of token t
    query heads        = turned, in place
    k_cache[slots[t]]  = turned key heads
    v_cache[slots[t]]  = value heads            for each token t; the two writes only where its slot is not negative

The same as `apply_rotary` on queries and keys and then `cache_write` on keys and values, each element rounded as there:
first to the type of qkv, then to that of the cache. What turned means, and which dimensions are left, `rotary` says.

Shapes: qkv [T, H + 2K, D], cos and sin [T, R/2] fp32, k_cache and v_cache [blocks, S, K, D], slots [T] int64.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from hookline_kernels.cache_write import cache_write
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.launch import dependent_launch, wait_for_inputs
from hookline_kernels.native import native, why_not
from hookline_kernels.rotary import apply_rotary


def rotary_cache_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    interleaved: bool,
) -> None:
    """The two operations, one after the other."""
    q, k, v = _parts(qkv, num_heads)
    apply_rotary(q, k, cos, sin, interleaved, implementation="reference")
    cache_write((k, v), (k_cache, v_cache), slots, implementation="reference")


def rotary_cache_write_torch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    interleaved: bool,
) -> None:
    """For the CPU: the two operations, each as the machine has it best."""
    q, k, v = _parts(qkv, num_heads)
    apply_rotary(q, k, cos, sin, interleaved)
    cache_write((k, v), (k_cache, v_cache), slots)


def _parts(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.tensor_split((num_heads, (num_heads + qkv.shape[1]) // 2), dim=1)
    return q, k, v


@triton.jit
def rotary_cache_write_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_token: tl.tensor,
    query_heads: tl.tensor,
    kv_heads: tl.tensor,
    half: tl.tensor,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a token and BLOCK_HEADS of its H + 2K heads; BLOCK_REST is 0 where the whole head is turned."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    key = head - query_heads
    value = key - kv_heads
    is_query = (key < 0)[:, None]
    is_key = ((key >= 0) & (value < 0) & (slot >= 0))[:, None]
    is_value = ((value >= 0) & (value < kv_heads) & (slot >= 0))[:, None]
    turns = (value < 0)[:, None]
    row = qkv_ptr + token * stride_token + head[:, None] * SIZE
    k_row = k_cache_ptr + (slot * kv_heads + key)[:, None] * SIZE
    v_row = v_cache_ptr + (slot * kv_heads + value)[:, None] * SIZE

    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < half
    cos = tl.load(cos_ptr + token * half + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * half + pair, mask=inside, other=0.0)[None, :]
    any_head = is_query | is_key | is_value
    if INTERLEAVED:  # neighbours are loaded together, which takes wide loads
        place = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside = place < 2 * half
        both = tl.load(row + place, mask=any_head & inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (BLOCK_HEADS, BLOCK_HALF, 2)))
        turned = tl.join(tl.where(turns, a * cos - b * sin, a), tl.where(turns, b * cos + a * sin, b))
        turned = tl.reshape(turned, (BLOCK_HEADS, 2 * BLOCK_HALF)).to(qkv_ptr.dtype.element_ty)
        tl.store(row + place, turned, mask=is_query & inside)
        tl.store(k_row + place, turned.to(k_cache_ptr.dtype.element_ty), mask=is_key & inside)
        tl.store(v_row + place, turned.to(v_cache_ptr.dtype.element_ty), mask=is_value & inside)
    else:
        place = pair[None, :]
        inside = inside[None, :]
        a = tl.load(row + place, mask=any_head & inside, other=0.0).to(tl.float32)
        b = tl.load(row + place + half, mask=any_head & inside, other=0.0).to(tl.float32)
        new_a = tl.where(turns, a * cos - b * sin, a).to(qkv_ptr.dtype.element_ty)
        new_b = tl.where(turns, b * cos + a * sin, b).to(qkv_ptr.dtype.element_ty)
        tl.store(row + place, new_a, mask=is_query & inside)
        tl.store(row + place + half, new_b, mask=is_query & inside)
        tl.store(k_row + place, new_a.to(k_cache_ptr.dtype.element_ty), mask=is_key & inside)
        tl.store(k_row + place + half, new_b.to(k_cache_ptr.dtype.element_ty), mask=is_key & inside)
        tl.store(v_row + place, new_a.to(v_cache_ptr.dtype.element_ty), mask=is_value & inside)
        tl.store(v_row + place + half, new_b.to(v_cache_ptr.dtype.element_ty), mask=is_value & inside)
    if BLOCK_REST:
        place = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(row + place, mask=(is_key | is_value) & (place < SIZE), other=0.0)
        tl.store(k_row + place, rest.to(k_cache_ptr.dtype.element_ty), mask=is_key & (place < SIZE))
        tl.store(v_row + place, rest.to(v_cache_ptr.dtype.element_ty), mask=is_value & (place < SIZE))


def rotary_cache_write_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    interleaved: bool,
) -> None:
    """One launch."""
    tokens, heads, size = qkv.shape
    half = cos.shape[1]
    if tokens == 0:
        return
    # Few tokens: small programs, since all of them run at once anyway. Many: fewer programs to start.
    few = tokens * heads < 4096
    block_heads = min(4 if few else 16, triton.next_power_of_2(heads))
    rest = size - 2 * half
    rotary_cache_write_kernel[(tokens, triton.cdiv(heads, block_heads))](
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        qkv.stride(0),
        num_heads,
        k_cache.shape[2],
        half,
        SIZE=size,
        INTERLEAVED=interleaved,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=2 if few else 4,
        **dependent_launch(qkv.device),
    )


def rotary_cache_write_native(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    interleaved: bool,
) -> None:
    """For the CPU: one call; a slot past the cache is found before anything is written."""
    tokens, _, size = qkv.shape
    kv_heads, capacity = k_cache.shape[2], k_cache.shape[0] * k_cache.shape[1]
    pointers = (tensor.data_ptr() for tensor in (qkv, cos, sin, k_cache, v_cache, slots))
    sizes = (tokens, num_heads, kv_heads, size, cos.shape[1], qkv.stride(0), capacity)
    past = native(qkv.dtype).rotary_cache_write(*pointers, *sizes, interleaved)
    if past >= 0:
        raise ValueError(f"rotary_cache_write: slot {int(slots[past])} does not exist, the cache has {capacity}")


RotaryCacheQuery = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _native_takes(query: RotaryCacheQuery) -> str | None:
    qkv, k_cache, v_cache = query
    if k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        return "projection and caches differ in type"
    return why_not(qkv)


class RotaryCacheWrite(Protocol):
    """What each implementation is: `rotary_cache_write` after its checks."""

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        num_heads: int,
        interleaved: bool,
    ) -> None: ...


IMPLEMENTATIONS: tuple[Implementation[RotaryCacheQuery, RotaryCacheWrite], ...] = (
    Implementation("native", _native_takes, rotary_cache_write_native),
    Implementation("torch", on_cpu, rotary_cache_write_torch),
    Implementation("triton", by_triton, rotary_cache_write_triton),
    Implementation("reference", anywhere, rotary_cache_write_reference),
)


def rotary_cache_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    interleaved: bool = False,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Turns the query heads of `qkv` IN PLACE, writes its turned keys and its values to the caches.

    Returns the queries [T, H, D], a view of `qkv`. Its key heads may be turned or not afterwards: nobody should read
    them there.

    Args:
        qkv: [T, H + 2K, D], a token's heads one after the other; tokens may lie apart.
        cos, sin: [T, R/2] fp32, contiguous, of `rotary_cos_sin`; R at most D.
        k_cache, v_cache: contiguous [blocks, S, K, D]; entries are converted to their types.
        slots: [T] int64, no slot twice; negative ones are padding. On the CPU a slot past the cache raises, on a GPU it
            is not looked for.
        num_heads: H.
        interleaved: whether a pair is two neighbours instead of one element of each half.
        implementation: `native`, `torch`, `triton` or `reference`; by default the first that supports the tensors.

    Raises:
        TypeError, ValueError: a type, shape or slot that does not fit.
    """
    _check(qkv, cos, sin, k_cache, v_cache, slots, num_heads)
    run = choose(IMPLEMENTATIONS, (qkv, k_cache, v_cache), implementation)
    run(qkv, cos, sin, k_cache, v_cache, slots, num_heads, interleaved)
    return qkv[:, :num_heads]


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"rotary_cache_write: two caches [blocks, S, K, D] expected, "
            f"got {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    kv_heads, size = k_cache.shape[2:]
    if qkv.dim() != 3 or num_heads < 1 or tuple(qkv.shape[1:]) != (num_heads + 2 * kv_heads, size):
        raise ValueError(
            f"rotary_cache_write: qkv [T, H + 2K, D] = [T, {num_heads} + 2 * {kv_heads}, {size}] expected, "
            f"got {list(qkv.shape)}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"rotary_cache_write: cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != qkv.shape[0] or 2 * cos.shape[1] > size:
        raise ValueError(
            f"rotary_cache_write: cos and sin [T, R/2] with R at most D expected for qkv {list(qkv.shape)}, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != qkv.shape[:1]:
        raise TypeError(
            f"rotary_cache_write: slots must be int64 [T] = [{qkv.shape[0]}], got {slots.dtype} {list(slots.shape)}"
        )
    if qkv.stride()[1:] != (size, 1):
        raise ValueError("rotary_cache_write: the heads of a token must lie one after the other")
    if not all(tensor.is_contiguous() for tensor in (cos, sin, k_cache, v_cache, slots)):
        raise ValueError("rotary_cache_write: cos, sin, caches and slots must be contiguous")
