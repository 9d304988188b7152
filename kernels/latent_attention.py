"""Paged latent attention in its absorbed form: all heads of a row read one latent entry a position.

    s[t, h, j] = scale * q[t, h] . e[j]               e[j] = [c[j] (L values), rotated key (R values)] of position j
    out[t, h] = sum_j softmax(s[t, h])[j] c[j]

The sum is over the positions j <= p(t) of row t's request; or with lists over exactly the positions in the row's list,
wherever the row itself stands. An entry of -1 stands for none. A row that sees nothing gives zeros.

Shapes: q [T, H, L + R]; cache [blocks, S, L + R]; out [T, H, L]; positions [T, K] int32, positions in the row's
request. Rows, requests and block tables are as in `paged_rows`. Softmax is fp32. Cache entries outside of a request's
context never matter, whatever they hold; with lists, none outside of a row's list do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.latent_attention_triton import LatentAttention, latent_attention_triton
from hookline_kernels.paged_rows import (
    PagedRows,
    check_row_values,
    check_rows,
    padded_rows,
    padded_slots,
    row_positions,
    slots_of,
)

# Rows a request up to which the CPU attends for all requests at once.
FEW_ROWS = 8
# Elements of gathered entries, or of scores, that the CPU makes at a time.
CPU_ELEMENTS = 2**23


def latent_attention_reference(call: LatentAttention) -> None:
    """The formula in plain torch, a row at a time, in fp32."""
    if call.q.is_cpu:
        _check_values(call)
    flat = call.cache.flatten(0, 1)
    call.out.zero_()
    if not call.rows.context_lens.numel():
        return
    requests, own = row_positions(call.rows, call.q.shape[0])
    for row, position in enumerate(own.tolist()):
        if position < 0:
            continue
        if call.positions is None:
            seen = torch.arange(position + 1, device=call.q.device)
        else:
            seen = call.positions[row].long()
            seen = seen[seen >= 0]
        entries = flat[slots_of(call.rows, requests[row], seen, call.cache.shape[1])].float()
        weights = (call.scale * (call.q[row].float() @ entries.T)).softmax(-1)
        call.out[row] = weights @ entries[:, : call.out.shape[2]]


def latent_attention_torch(call: LatentAttention) -> None:
    """For the CPU. Lists and short runs of rows are attended to in batches, long runs a request at a time."""
    _check_values(call)
    contexts: list[int] = call.rows.context_lens.tolist()
    if not contexts or max(contexts) == 0:
        call.out.zero_()
    elif call.positions is not None:
        _attend_to_lists(call, call.positions)
    elif len(contexts) > 1 and call.rows.max_query_len <= FEW_ROWS:
        _attend_together(call, max(contexts))
    else:
        _attend_one_by_one(call, contexts)


def _attend_to_lists(call: LatentAttention, positions: torch.Tensor) -> None:
    """Some rows at a time, each with the entries of its list."""
    tokens, heads, width = call.q.shape
    flat = call.cache.flatten(0, 1)
    requests, own = row_positions(call.rows, tokens)
    step = max(1, CPU_ELEMENTS // max(1, positions.shape[1] * max(width, heads)))
    for begin in range(0, tokens, step):
        rows = slice(begin, begin + step)
        listed = positions[rows].long().masked_fill_(own[rows, None] < 0, -1)
        visible = listed >= 0
        # What is not visible stands for something that is, and so is finite.
        listed = torch.where(visible, listed, listed.amax(1, keepdim=True).clamp_(min=0))
        blind = ~visible.any(1, keepdim=True)
        slots = slots_of(call.rows, requests[rows, None], listed, call.cache.shape[1]).masked_fill_(blind, 0)
        entries = flat.index_select(0, slots.reshape(-1)).view(*slots.shape, width)
        call.out[rows] = _attend(call, call.q[rows], entries, visible.unsqueeze(1), blind)


def _attend_together(call: LatentAttention, longest: int) -> None:
    """All requests at once, their rows and contexts side by side."""
    tokens, heads, width = call.q.shape
    index, real = padded_rows(call.rows)
    _, own = row_positions(call.rows, tokens)
    slots, _ = padded_slots(call.rows, longest, call.cache.shape[1])
    entries = call.cache.flatten(0, 1).index_select(0, slots.reshape(-1)).view(*slots.shape, width)
    causal = (torch.arange(longest) <= own[index].unsqueeze(2)) & real.unsqueeze(2)  # [B, rows, longest]
    queries = call.q[index.reshape(-1)].view(index.shape[0], -1, width)
    blind = ~causal.any(2)  # rows of padding
    result = _attend(call, queries, entries, causal.repeat_interleave(heads, 1), blind.repeat_interleave(heads, 1))
    call.out[int(call.rows.query_starts[-1]) :] = 0.0
    call.out[index[real]] = result.view(*index.shape, heads, -1)[real]


def _attend_one_by_one(call: LatentAttention, contexts: list[int]) -> None:
    """A request at a time, and some of its rows at a time."""
    rows, (_, heads, width) = call.rows, call.q.shape
    starts: list[int] = rows.query_starts.tolist()
    flat = call.cache.flatten(0, 1)
    call.out[starts[-1] :] = 0.0
    for request, context in enumerate(contexts):
        first, end = starts[request], starts[request + 1]
        if context == 0:
            call.out[first:end] = 0.0
            continue
        slots = slots_of(rows, torch.tensor(request), torch.arange(context), call.cache.shape[1])
        entries = flat[slots].unsqueeze(0)
        step = max(1, CPU_ELEMENTS // (heads * context))
        for begin in range(first, end, step):
            count = min(end, begin + step) - begin
            last = context - end + begin + torch.arange(count)
            seen = int(last[-1]) + 1
            causal = (torch.arange(seen) <= last.unsqueeze(1)).repeat_interleave(heads, 0).unsqueeze(0)
            queries = call.q[begin : begin + count].reshape(1, -1, width)
            result = _attend(call, queries, entries[:, :seen], causal, None)
            call.out[begin : begin + count] = result.view(count, heads, -1)


def _attend(
    call: LatentAttention,
    queries: torch.Tensor,
    entries: torch.Tensor,
    visible: torch.Tensor,
    blind: torch.Tensor | None,
) -> torch.Tensor:
    """queries [G, M, L + R] against entries [G, J, L + R]: [G, M, L]; visible [G, M or 1, J]; zeros where `blind`, a
    tensor [G, M or 1].

    Whole entries are the values too, the part past L being dropped: torch's fused kernel wants one width.
    """
    if entries.dtype != queries.dtype:
        entries = entries.to(queries.dtype)
    keys = entries.unsqueeze(1)
    mask = visible.unsqueeze(1)
    if blind is not None:
        # A row without any visible position would be 0 / 0.
        mask = mask | blind[:, None, :, None]
    result = F.scaled_dot_product_attention(queries.unsqueeze(1), keys, keys, attn_mask=mask, scale=call.scale)
    result = result.squeeze(1)[..., : call.out.shape[2]]
    return result if blind is None else result.masked_fill(blind.unsqueeze(2), 0.0)


def _check_values(call: LatentAttention) -> None:
    check_row_values("latent_attention", call.rows, call.q.shape[0], call.cache)
    room = call.rows.block_tables.shape[1] * call.cache.shape[1]
    if call.positions is not None and call.positions.numel():
        largest, least = int(call.positions.max()), int(call.positions.min())
        if largest >= room or least < -1:
            raise ValueError(
                f"latent_attention: positions must be from -1 to {room - 1}, the last that block_tables has, "
                f"got {largest if largest >= room else least}"
            )


IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Callable[[LatentAttention], None]], ...] = (
    Implementation("torch", on_cpu, latent_attention_torch),
    Implementation("triton", by_triton, latent_attention_triton),
    Implementation("reference", anywhere, latent_attention_reference),
)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    value_size: int,
    *,
    positions: torch.Tensor | None = None,
    max_query_len: int,
    max_context_len: int,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention of all rows of all requests over a latent cache: causal, or by list.

    Args:
        q: [T, H, L + R], each head's latent part first, its entries contiguous; may be a strided view.
        cache: contiguous [blocks, S, L + R], this step's entries included.
        block_tables: [B, N] int32; entries past a request's blocks may name any block of the cache.
        query_starts: contiguous [B + 1] int32, first row of each request; rows from the last entry on are padding.
        context_lens: contiguous [B] int32, at least each request's number of rows, or 0: its rows are padding.
        scale: of the scores, positive.
        value_size: L, how many values of an entry are summed.
        positions: [T, K] int32, its rows contiguous: what each row sees, in any order, no position twice; -1 for none.
        max_query_len, max_context_len: at least the largest number of rows and the longest context.
        out: contiguous [T, H, L] of q's type to write into; made when absent.
        implementation: `torch`, `triton` or `reference`; by default the first that supports q.

    Returns:
        [T, H, L]; zeros for rows of padding and rows whose list is empty.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit; on the CPU also numbers that cannot be
            followed: rows, contexts, positions or blocks out of bounds.
    """
    rows = PagedRows(block_tables, query_starts, context_lens, max_query_len, max_context_len)
    check_rows("latent_attention", rows, q, cache)
    tokens, heads, width = q.shape
    if not 0 < value_size <= width:
        raise ValueError(f"latent_attention: value_size must be from 1 to L + R = {width}, got {value_size}")
    if not scale > 0.0:
        raise ValueError(f"latent_attention: scale must be positive, got {scale}")
    if positions is not None:
        if positions.dtype != torch.int32:
            raise TypeError(f"latent_attention: positions must be int32, got {positions.dtype}")
        if positions.dim() != 2 or positions.shape[0] != tokens or positions.shape[1] == 0 or positions.stride(1) != 1:
            raise ValueError(
                f"latent_attention: positions [T, K] with contiguous rows, T = {tokens} and K >= 1 expected, "
                f"got {list(positions.shape)}, strides {list(positions.stride())}"
            )
        if positions.device != q.device:
            raise ValueError(f"latent_attention: positions must be on {q.device}, got {positions.device}")
    shape = (tokens, heads, value_size)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif out.shape != shape or out.dtype != q.dtype or not out.is_contiguous() or out.device != q.device:
        raise ValueError(
            f"latent_attention: out must be contiguous {q.dtype} {list(shape)} on {q.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    call = LatentAttention(q, cache, rows, scale, positions, out)
    choose(IMPLEMENTATIONS, (q,), implementation)(call)
    return out
