"""What the two attention kernels share: the record of a call and its checks, one request's context on the CPU, and the
parts of their Triton kernels that are the same.

The online softmax of those kernels works with base-2 logarithms. A score is s = scale * q . k, or with a soft cap c
s = c tanh(scale * q . k / c), and a weight is 2^(s log2(e) - top) with the largest s log2(e) so far as the top.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class PagedAttention(NamedTuple):
    """A checked call of `attention_decode` or `attention_prefill`, as each implementation gets it.

    Attributes:
        q: [T, H, D], D contiguous; may be a strided view. In decode T = B.
        k_cache, v_cache: contiguous [blocks, S, K, D] of one type, where H is a multiple of K.
        block_tables: [B, N] int32, its rows contiguous; entries past a request's blocks may name any block.
        context_lens: contiguous [B] int32, how many tokens of each request are in the cache, its rows of q included.
        scale: positive factor on the scores.
        window: how many of the last positions a row sees, its own included; None for all.
        soft_cap: bound of the scores; None for none.
        max_context_len: at least the longest context. A bound only: a captured graph keeps it for all its replays.
        out: contiguous [T, H, D] of q's type to write into.
        counters: zeros, at least [B * K] int32, left zero: decode's Triton kernel counts arrivals there. None where
            the caller has none.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    max_context_len: int
    out: torch.Tensor
    counters: torch.Tensor | None = None


def check_attention(name: str, call: PagedAttention) -> None:
    """Raises ValueError or TypeError, in the name of launch function `name`, where arguments do not fit each other.

    What is in `block_tables` and `context_lens` is not looked at: `check_values` does that, on the CPU alone.
    """
    q, k_cache, v_cache, tables, context_lens, scale, window, soft_cap, max_context_len, out, _ = call
    shape, cache_shape, table_shape, device = q.shape, k_cache.shape, tables.shape, q.device
    if len(shape) != 3 or len(cache_shape) != 4 or cache_shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"{name}: q [T, H, D] and two caches [blocks, S, K, D] of one type expected, got {list(shape)}, "
            f"{k_cache.dtype} {list(cache_shape)} and {v_cache.dtype} {list(v_cache.shape)}"
        )
    _, heads, size = shape
    _, block_size, kv_heads, cache_size = cache_shape
    if cache_size != size or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: H must be a multiple of K and D the same, got H {heads}, K {kv_heads}, "
            f"D {size} in q and {cache_size} in the cache"
        )
    if tables.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise TypeError(
            f"{name}: block_tables and context_lens must be int32, got {tables.dtype}, {context_lens.dtype}"
        )
    if len(table_shape) != 2 or context_lens.shape != table_shape[:1]:
        raise ValueError(
            f"{name}: block_tables [B, N] and context_lens [B] expected, "
            f"got {list(table_shape)} and {list(context_lens.shape)}"
        )
    if max_context_len > table_shape[1] * block_size:
        raise ValueError(
            f"{name}: block tables of {table_shape[1]} blocks of {block_size} tokens "
            f"cannot hold a context of {max_context_len}"
        )
    if q.stride(2) != 1 or not k_cache.is_contiguous() or not v_cache.is_contiguous() or tables.stride(1) != 1:
        raise ValueError(f"{name}: heads of q, rows of block_tables, and the caches must be contiguous")
    if not context_lens.is_contiguous():
        raise ValueError(f"{name}: context_lens must be contiguous, got strides {list(context_lens.stride())}")
    caches_here = k_cache.device == device and v_cache.device == device
    if not caches_here or tables.device != device or context_lens.device != device or out.device != device:
        raise ValueError(f"{name}: q, caches, block_tables, context_lens and out must be on one device, {device}")
    if not scale > 0.0:
        raise ValueError(f"{name}: scale must be positive, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window must be at least 1, got {window}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"{name}: soft_cap must be positive, got {soft_cap}")
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"{name}: out must be contiguous {q.dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")


def check_values(name: str, call: PagedAttention, query_starts: torch.Tensor | None = None) -> None:
    """Raises ValueError, in the name of launch function `name`, where a call's numbers cannot be followed.

    It reads them, so it is for the CPU. The native kernels check the same themselves, and come here for the words.

    Args:
        query_starts: [B + 1] int32 of a prefill; None for a decode.
    """
    contexts: list[int] = call.context_lens.tolist()
    new = [0] * len(contexts)
    if query_starts is not None:
        starts: list[int] = query_starts.tolist()
        new = [end - begin for begin, end in pairwise(starts)]
        if starts[0] != 0 or starts[-1] != call.q.shape[0] or min(new, default=0) < 0:
            raise ValueError(f"{name}: query_starts must rise from 0 to T = {call.q.shape[0]}, got {starts[:9]}")
    for request, (rows, context) in enumerate(zip(new, contexts, strict=True)):
        if not rows <= context <= call.max_context_len:
            raise ValueError(
                f"{name}: request {request} has a context of {context}, which must be from its {rows} new rows to "
                f"max_context_len = {call.max_context_len}"
            )
    blocks, block_size = call.k_cache.shape[:2]
    tables = call.block_tables
    if not tables.numel() or (int(tables.min()) >= 0 and int(tables.max()) < blocks):
        return
    for request, (rows, context) in enumerate(zip(new, contexts, strict=True)):
        oldest = max(0, context - max(rows, 1) + 1 - (call.window or context))
        used: list[int] = tables[request, oldest // block_size : -(-context // block_size)].tolist()
        wrong = [block for block in used if not 0 <= block < blocks]
        if wrong:
            raise ValueError(f"{name}: request {request} has block {wrong[0]} in a cache of {blocks} blocks")


def read_context(
    caches: tuple[torch.Tensor, torch.Tensor], block_table: list[int], begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions begin to end of one request: [1, K, end - begin, D] of each cache.

    They are views where the request's blocks lie in a row, as they do when it grew alone, and copies where not.
    """
    _, block_size, kv_heads, size = caches[0].shape
    first = begin // block_size
    blocks = block_table[first : -(-end // block_size)]
    keys, values = caches
    start = begin - first * block_size
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        start += blocks[0] * block_size
    else:
        index = torch.tensor(blocks)
        keys, values = keys.index_select(0, index), values.index_select(0, index)
    # One operation each instead of a flatten, a slice and a transposition: this runs in each layer of each step.
    width = kv_heads * size
    shape, strides = (1, kv_heads, end - begin, size), (width, size, width, 1)
    return (
        keys.as_strided(shape, strides, keys.storage_offset() + start * width),
        values.as_strided(shape, strides, values.storage_offset() + start * width),
    )


class Limits(NamedTuple):
    """What a launch is cut for: the device's processors, and the bytes of shared memory that one program can have."""

    processors: int
    shared_memory: int


@cache
def limits(device: torch.device) -> Limits:
    """A device's limits; under the interpreter those of a small one, so that little work is cut too."""
    if device.type != "cuda":
        return Limits(8, 2**17)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Limits(properties["multiprocessor_count"], properties["max_shared_mem"])


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(inner, outer) of `attend_tile`."""
    log2_e = math.log2(math.e)
    return (0.0, scale * log2_e) if soft_cap is None else (2.0 * scale / soft_cap, soft_cap * log2_e)


@triton.jit
def find_request(counts: tl.tensor, item: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The request that has `item`, and its first item, where all requests' counts [BLOCK_B] of items lie end to end."""
    ends = tl.cumsum(counts, 0)
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def attend_tile(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    visible: tl.tensor | None,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    SEES_SOME: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds one tile of keys and values [BLOCK_N, D] to the running softmax of the rows of q [ROWS, D].

    A score in base 2 is outer * q . k, or outer * tanh(inner / 2 * q . k). With MASKED only `visible` ones count.
    SEES_SOME says that each row has seen a position by the end of the tile.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_CAP:
        scores = 2.0 * tl.sigmoid(inner * scores) - 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * outer)  # the factor is positive
    base = new_top if SEES_SOME else tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf less -inf would be NaN
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores * outer - base[:, None])  # one fused multiply-add a score
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc
