"""The lightning indexer's choice: which positions of its request a row attends to.

    score[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s])          over I indexer heads, in fp32
    index_topk[t] = the top_k positions s <= p(t) of the largest scores; of equal ones the lower positions

NaN counts as the largest score. A row that sees no more than top_k positions gets all of them, and -1 for the rest; a
row of padding gets -1 only. The positions of a row are in rising order, whatever their scores.

Shapes: q [T, I, D]; weights [T, I]; cache [blocks, S, D], index keys; result [T, top_k] int32. Rows, requests and block
tables are as in `paged_rows`. Cache entries outside of a request's context never matter, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.indexer_triton import IndexTopk, index_topk_triton
from hookline_kernels.paged_rows import (
    PagedRows,
    check_row_values,
    check_rows,
    padded_rows,
    padded_slots,
    row_positions,
    slots_of,
)

# Rows a request up to which the CPU scores all requests at once.
FEW_ROWS = 8
# Products of a head and a key that the CPU makes at a time.
CPU_ELEMENTS = 2**23


def index_topk_reference(call: IndexTopk) -> None:
    """The formula in plain torch, a row at a time, with a stable sort."""
    if call.q.is_cpu:
        check_row_values("index_topk", call.rows, call.q.shape[0], call.cache)
    call.out.fill_(-1)
    if not call.rows.context_lens.numel():
        return
    requests, own = row_positions(call.rows, call.q.shape[0])
    flat = call.cache.flatten(0, 1)
    for row, position in enumerate(own.tolist()):
        seen = torch.arange(position + 1, device=call.q.device)
        keys = flat[slots_of(call.rows, requests[row], seen, call.cache.shape[1])].float()
        scores = call.weights[row] @ (call.q[row].float() @ keys.T).relu()
        best = _without_nan(scores).sort(descending=True, stable=True).indices[: call.out.shape[1]]
        call.out[row, : len(best)] = best.sort().values


def index_topk_torch(call: IndexTopk) -> None:
    """For the CPU. Scores nothing where all that a row sees is chosen; short runs of rows are scored in a batch."""
    check_row_values("index_topk", call.rows, call.q.shape[0], call.cache)
    rows, out = call.rows, call.out
    if not out.numel() or not rows.context_lens.numel():
        out.fill_(-1)
        return
    _, own = row_positions(rows, out.shape[0])
    place = torch.arange(out.shape[1], dtype=torch.int32)
    # Right for rows that see no more than top_k.
    out.copy_(torch.where(place <= own.unsqueeze(1), place, -1))
    contexts: list[int] = rows.context_lens.tolist()
    if max(contexts) <= out.shape[1]:
        return
    if len(contexts) > 1 and rows.max_query_len <= FEW_ROWS:
        _choose_together(call, max(contexts), own)
        return
    starts: list[int] = rows.query_starts.tolist()
    flat = call.cache.flatten(0, 1)
    for request, context in enumerate(contexts):
        first = max(starts[request], starts[request + 1] - max(0, context - out.shape[1]))
        if first == starts[request + 1]:
            continue
        keys = flat[slots_of(rows, torch.tensor(request), torch.arange(context), call.cache.shape[1])].float()
        step = max(1, CPU_ELEMENTS // (call.q.shape[1] * context))
        for begin in range(first, starts[request + 1], step):
            some = slice(begin, min(starts[request + 1], begin + step))
            seen = int(own[some][-1]) + 1
            products = torch.matmul(call.q[some].float().flatten(0, 1), keys[:seen].T).relu_()
            products = products.view(-1, call.q.shape[1], seen)
            scores = torch.matmul(call.weights[some].unsqueeze(1), products).squeeze(1)
            out[some] = _choose(scores, own[some], out.shape[1])


def _choose_together(call: IndexTopk, longest: int, own: torch.Tensor) -> None:
    """All requests at once, their rows and contexts side by side."""
    _, heads, size = call.q.shape
    index, real = padded_rows(call.rows)
    slots, _ = padded_slots(call.rows, longest, call.cache.shape[1])
    keys = call.cache.flatten(0, 1).index_select(0, slots.reshape(-1)).view(*slots.shape, size).float()
    queries = call.q[index.reshape(-1)].float().view(index.shape[0], -1, size)
    products = torch.matmul(queries, keys.transpose(1, 2)).relu_().view(-1, heads, longest)
    weights = call.weights[index.reshape(-1)].unsqueeze(1)
    scores = torch.matmul(weights, products).view(*index.shape, longest)[real]
    chosen = index[real]
    long = own[chosen] >= call.out.shape[1]
    call.out[chosen[long]] = _choose(scores[long], own[chosen[long]], call.out.shape[1])


def _choose(scores: torch.Tensor, own: torch.Tensor, top_k: int) -> torch.Tensor:
    """The positions of the top_k largest of scores [rows, J] up to each row's own position: [rows, top_k] int32.

    Each row must see at least top_k positions.
    """
    hidden = torch.arange(scores.shape[1]) > own.unsqueeze(1)
    scores = _without_nan(scores).masked_fill_(hidden, -torch.inf)
    least = scores.topk(top_k, sorted=True).values[:, -1:]
    above, equal = scores > least, (scores == least) & ~hidden
    room = top_k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    return kept.nonzero()[:, 1].view(-1, top_k).int()


def _without_nan(scores: torch.Tensor) -> torch.Tensor:
    """NaN counts as the largest score, so that each row has top_k different positions whatever its scores are."""
    return scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Callable[[IndexTopk], None]], ...] = (
    Implementation("torch", on_cpu, index_topk_torch),
    Implementation("triton", by_triton, index_topk_triton),
    Implementation("reference", anywhere, index_topk_reference),
)


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    top_k: int,
    *,
    max_query_len: int,
    max_context_len: int,
    implementation: str | None = None,
) -> torch.Tensor:
    """The positions that each row of each request attends to.

    Args:
        q: [T, I, D], rotated, each head's entries contiguous; may be a strided view.
        weights: contiguous [T, I] fp32, all scales applied.
        cache: contiguous [blocks, S, D], this step's keys included.
        block_tables: [B, N] int32; entries past a request's blocks may name any block of the cache.
        query_starts: contiguous [B + 1] int32, first row of each request; rows from the last entry on are padding.
        context_lens: contiguous [B] int32, at least each request's number of rows, or 0: its rows are padding.
        top_k: how many positions a row gets at most.
        max_query_len, max_context_len: at least the largest number of rows and the longest context.
        implementation: `torch`, `triton` or `reference`; by default the first that supports q.

    Returns:
        [T, top_k] int32, positions in the row's request in rising order, then -1.

    Raises:
        TypeError, ValueError: a type, shape or option that does not fit; on the CPU also numbers that cannot be
            followed: rows, contexts or blocks out of bounds.
    """
    rows = PagedRows(block_tables, query_starts, context_lens, max_query_len, max_context_len)
    check_rows("index_topk", rows, q, cache)
    if weights.dtype != torch.float32:
        raise TypeError(f"index_topk: weights must be float32, got {weights.dtype}")
    if weights.shape != q.shape[:2] or not weights.is_contiguous() or weights.device != q.device:
        raise ValueError(
            f"index_topk: weights must be contiguous [T, I] = {list(q.shape[:2])} on {q.device}, "
            f"got {list(weights.shape)} on {weights.device}"
        )
    if top_k < 1:
        raise ValueError(f"index_topk: top_k must be at least 1, got {top_k}")
    out = torch.empty((q.shape[0], top_k), dtype=torch.int32, device=q.device)
    choose(IMPLEMENTATIONS, (q,), implementation)(IndexTopk(q, weights, cache, rows, out))
    return out
