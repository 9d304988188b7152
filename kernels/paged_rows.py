"""Rows of several requests over a paged cache with one entry a token: what latent attention and the indexer share.

The rows of request b are query_starts[b] to query_starts[b + 1]. With n rows and a context of c tokens, row i of them
stands at position c - n + i: the rows are the end of the context, whose entries are already in the cache. Position p
lies in block block_tables[b, p // S] at place p % S. Rows of padding stand at negative positions: those of a request
with an empty context, and those past the last entry of query_starts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hookline_kernels.paged_context import find_request


class PagedRows(NamedTuple):
    """Which rows belong to which request, and where each request's tokens lie.

    Attributes:
        block_tables: [B, N] int32, its rows contiguous; entries past a request's blocks may name any block.
        query_starts: contiguous [B + 1] int32, first row of each request; rows from the last entry on are padding.
        context_lens: contiguous [B] int32, how many tokens of each request are in the cache, its rows included.
        max_query_len, max_context_len: at least the largest number of rows and the longest context. Bounds only: a
            captured graph keeps them for all its replays.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int


def check_rows(name: str, rows: PagedRows, q: torch.Tensor, cache: torch.Tensor) -> None:
    """Raises ValueError or TypeError, in the name of launch function `name`, where arguments do not fit each other.

    What is in the lists is not looked at: `check_row_values` does that, on the CPU alone.

    Args:
        q: [T, heads, width].
        cache: [blocks, S, width].
    """
    tables, starts, lens, max_query_len, max_context_len = rows
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2]:
        raise ValueError(
            f"{name}: q [T, heads, width] and a cache [blocks, S, width] expected, "
            f"got {list(q.shape)} and {list(cache.shape)}"
        )
    if not (q.is_floating_point() and cache.is_floating_point()):
        raise TypeError(f"{name}: q and cache must be floating point, got {q.dtype} and {cache.dtype}")
    if any(x.dtype != torch.int32 for x in rows[:3]):
        raise TypeError(
            f"{name}: block_tables, query_starts and context_lens must be int32, "
            f"got {tables.dtype}, {starts.dtype} and {lens.dtype}"
        )
    if tables.dim() != 2 or lens.shape != tables.shape[:1] or starts.shape != (lens.shape[0] + 1,):
        raise ValueError(
            f"{name}: block_tables [B, N], query_starts [B + 1] and context_lens [B] expected, "
            f"got {list(tables.shape)}, {list(starts.shape)} and {list(lens.shape)}"
        )
    if max_context_len > tables.shape[1] * cache.shape[1]:
        raise ValueError(
            f"{name}: block tables of {tables.shape[1]} blocks of {cache.shape[1]} tokens "
            f"cannot hold a context of {max_context_len}"
        )
    if max_query_len < 0 or max_context_len < 0:
        raise ValueError(f"{name}: negative bounds: max_query_len {max_query_len}, max_context_len {max_context_len}")
    if q.stride(2) != 1 or not cache.is_contiguous() or tables.stride(1) != 1:
        raise ValueError(f"{name}: heads of q, rows of block_tables, and the cache must be contiguous")
    if not starts.is_contiguous() or not lens.is_contiguous():
        raise ValueError(f"{name}: query_starts and context_lens must be contiguous")
    if any(x.device != q.device for x in (cache, tables, starts, lens)):
        raise ValueError(f"{name}: q, cache, block_tables, query_starts and context_lens must be on {q.device}")


def check_row_values(name: str, rows: PagedRows, tokens: int, cache: torch.Tensor) -> None:
    """Raises ValueError, in the name of launch function `name`, where the numbers cannot be followed.

    It reads them, so it is for the CPU.
    """
    starts: list[int] = rows.query_starts.tolist()
    contexts: list[int] = rows.context_lens.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] > tokens or min(counts, default=0) < 0:
        raise ValueError(f"{name}: query_starts must rise from 0 to at most T = {tokens}, got {starts[:9]}")
    if max(counts, default=0) > rows.max_query_len:
        raise ValueError(
            f"{name}: a request has {max(counts)} rows, which must be at most max_query_len = {rows.max_query_len}"
        )
    for request, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        if context != 0 and not count <= context <= rows.max_context_len:
            raise ValueError(
                f"{name}: request {request} has a context of {context}, which must be from its {count} new rows to "
                f"max_context_len = {rows.max_context_len}, or 0 for padding"
            )
    blocks, block_size = cache.shape[:2]
    tables = rows.block_tables
    if not tables.numel() or (int(tables.min()) >= 0 and int(tables.max()) < blocks):
        return
    for request, context in enumerate(contexts):
        used: list[int] = tables[request, : -(-context // block_size)].tolist()
        wrong = [block for block in used if not 0 <= block < blocks]
        if wrong:
            raise ValueError(f"{name}: request {request} has block {wrong[0]} in a cache of {blocks} blocks")


def row_positions(rows: PagedRows, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's request and position, both [T] int64 on the lists' device; negative positions mark padding.

    Rows past the last request count as the last one's; so there must be a request.
    """
    starts = rows.query_starts
    row = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts, row, right=True) - 1
    last = rows.context_lens.shape[0] - 1
    own = request.clamp(max=last)
    position = rows.context_lens[own] - starts[own + 1] + row
    real = (request <= last) & (rows.context_lens[own] > 0)
    return own, torch.where(real, position, -1).long()


def slots_of(rows: PagedRows, requests: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where positions of requests (two int64 tensors that broadcast) lie: block id * S + place, int64."""
    blocks = rows.block_tables[requests, positions // block_size].long()
    return blocks * block_size + positions % block_size


def padded_rows(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """All requests' rows side by side, [B, most rows] int64, and which are real; the others are row 0. For the CPU."""
    counts = rows.query_starts.diff().unsqueeze(1)
    row = torch.arange(int(counts.max()))
    real = row < counts
    return torch.where(real, rows.query_starts[:-1, None] + row, 0).long(), real


def padded_slots(rows: PagedRows, longest: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [B, longest] of all requests' contexts, and which of them are real, [B, longest].

    A place past a context stands for its first token: its weight is 0, and 0 times a finite value is 0, while an
    unused cache entry may hold anything. All places of an empty context stand for slot 0, which may be unused.
    """
    place = torch.arange(longest, device=rows.context_lens.device)
    real = place < rows.context_lens.unsqueeze(1)
    requests = torch.arange(rows.context_lens.shape[0], device=place.device).unsqueeze(1)
    slots = slots_of(rows, requests, torch.where(real, place, 0), block_size)
    return torch.where(rows.context_lens.unsqueeze(1) > 0, slots, 0), real


def most_tiles(tokens: int, requests: int, rows_each: int) -> int:
    """At least how many tiles `locate_tile` finds: sum of ceil(n / rows_each) over the requests and the padding."""
    return tokens // rows_each + min(requests, tokens) + 1 if rows_each > 1 else tokens


@triton.jit
def locate_tile(
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    tile: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A tile of at most ROWS rows of one request: its request, its first row, the request's end and context.

    Padding past the last request is a request of its own, number `requests`, with an empty context. A tile past all of
    them has a larger number. Row r of the request stands at position context - end + r. BLOCK_B exceeds `requests`.
    """
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + index, mask=index <= requests, other=0)
    ends = tl.load(starts_ptr + index + 1, mask=index < requests, other=0)
    ends = tl.where(index == requests, tokens, ends)
    request, first_tile = find_request(tl.cdiv(ends - starts, ROWS), tile)
    first = tl.load(starts_ptr + request, mask=request <= requests, other=0) + (tile - first_tile) * ROWS
    end = tl.load(starts_ptr + request + 1, mask=request < requests, other=0)
    end = tl.where(request < requests, end, tokens)
    context = tl.load(contexts_ptr + request, mask=request < requests, other=0)
    return request, first, end, context


@triton.jit
def find_entries(
    list_ptr: tl.tensor,
    table_ptr: tl.tensor,
    place: tl.tensor,
    end: tl.tensor,
    stand_in: tl.tensor,
    LIST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Where the entries at some places begin, int64: `stand_in`'s for places past the end and, with a list, for -1."""
    if LIST:
        position = tl.load(list_ptr + place, mask=place < end, other=-1)
        position = tl.where(position >= 0, position, stand_in)
    else:
        position = tl.minimum(place, stand_in)
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=position >= 0, other=0)
    return block.to(tl.int64) * (BLOCK_SIZE * WIDTH) + position % BLOCK_SIZE * WIDTH
