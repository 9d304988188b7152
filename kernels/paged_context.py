"""What the two attention kernels share: the checks of their arguments, and reading one request's context on the CPU."""

from __future__ import annotations

import torch


def check_attention(
    name: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    window: int | None,
    soft_cap: float | None,
    out: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError, in the name of launch function `name`, where arguments do not fit each other."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"{name}: q [T, H, D] and two caches [blocks, S, K, D] of one type expected, got {list(q.shape)}, "
            f"{k_cache.dtype} {list(k_cache.shape)} and {v_cache.dtype} {list(v_cache.shape)}"
        )
    heads, size = q.shape[1:]
    kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != size or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: H must be a multiple of K and D the same, got H {heads}, K {kv_heads}, "
            f"D {size} in q and {k_cache.shape[3]} in the cache"
        )
    if block_tables.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise TypeError(
            f"{name}: block_tables and context_lens must be int32, got {block_tables.dtype} and {context_lens.dtype}"
        )
    if block_tables.dim() != 2 or context_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"{name}: block_tables [B, N] and context_lens [B] expected, "
            f"got {list(block_tables.shape)} and {list(context_lens.shape)}"
        )
    if max_context_len > block_tables.shape[1] * k_cache.shape[1]:
        raise ValueError(
            f"{name}: block tables of {block_tables.shape[1]} blocks of {k_cache.shape[1]} tokens "
            f"cannot hold a context of {max_context_len}"
        )
    if q.stride(2) != 1 or not k_cache.is_contiguous() or not v_cache.is_contiguous() or block_tables.stride(1) != 1:
        raise ValueError(f"{name}: heads of q, rows of block_tables, and the caches must be contiguous")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window must be at least 1, got {window}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"{name}: soft_cap must be positive, got {soft_cap}")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(f"{name}: out must be contiguous {q.dtype} {list(q.shape)}, got {out.dtype} {list(out.shape)}")


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
