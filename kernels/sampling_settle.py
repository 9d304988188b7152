"""The last launch of `sample` on a GPU: one program a row proves where the cut lies, and walks to the draw.

Everything here counts and weighs tokens over a cut: those of a value above it, and those of that value with an id below
a limit. They are taken from the list that gather made, whose values lie around the cut, while sums stand for the tokens
above the list; or, where the list does not do, from the whole row, and then no sums are added.

Shapes: R rows of V logits in C chunks of CHUNK; the scratch is described in sampling_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline_kernels.sampling_rules import (
    ABOVE,
    ABOVE_COUNT,
    ABOVE_KEPT,
    SCALE,
    TOTAL,
    largest_of,
    options_of,
    order_key,
    ratio,
    uniform,
)

_LEAST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _tally(
    row: tl.tuple,
    whole: tl.tensor,
    cut: tl.tensor,
    limit: tl.tensor,
    end: tl.tensor,
    min_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Number and weight, both int64, of the tokens in the list, or in the `whole` row, that are over the cut: of a key
    above `cut`, or of that key with an id below `limit`; and whose id is below `end` and that pass min-p.
    """
    logits_ptr, values_ptr, ids_ptr, listed, vocab, largest, temperature = row
    counts = tl.zeros((BLOCK,), tl.int32)
    weights = tl.zeros((BLOCK,), tl.int64)
    size = tl.where(whole, vocab, listed)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < size
        if whole:
            scores = tl.load(logits_ptr + place, mask=inside, other=-float("inf")).to(tl.float32)
            ids = place
        else:
            scores = tl.load(values_ptr + place, mask=inside, other=-float("inf"))
            ids = tl.load(ids_ptr + place, mask=inside, other=0)
        key = order_key(scores)
        ratios = ratio(scores, largest, temperature)
        over = ((key > cut) | ((key == cut) & (ids < limit))) & (ids < end) & (ratios >= min_p) & inside
        counts += over.to(tl.int32)
        weights += tl.where(over, (ratios * SCALE).to(tl.int64), 0)
    return tl.sum(counts).to(tl.int64), tl.sum(weights)


@triton.jit
def _lowest_cut(
    row: tl.tuple,
    whole: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    by_count: tl.tensor,
    base: tl.tensor,
    wanted: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The least key from `low` to `high` above which the tokens' number, or weight, and `base` are below `wanted`."""
    while low < high:
        middle = low + (high - low) // 2
        count, weight = _tally(row, whole, middle.to(tl.int32), 0, row[4], 0.0, BLOCK)
        below = (base + tl.where(by_count, count, weight)).to(tl.float64) < wanted
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle + 1)
    return low


@triton.jit
def _id_limit(
    row: tl.tuple, whole: tl.tensor, cut: tl.tensor, base: tl.tensor, wanted: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Tokens of the key `cut` are kept as long as what comes before them weighs less than `wanted`: the id of the first
    that is not.
    """
    vocab = row[4]
    with_all, _ = _tally(row, whole, cut, vocab, vocab, 0.0, BLOCK)
    with_none, _ = _tally(row, whole, cut, 0, vocab, 0.0, BLOCK)
    high = vocab + tl.zeros((), tl.int32)
    low = tl.where(with_all - with_none > 1, 0, high)
    while low < high:
        middle = low + (high - low) // 2
        _, weight = _tally(row, whole, cut, middle, vocab, 0.0, BLOCK)
        reached = (base + weight).to(tl.float64) >= wanted
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return low


@triton.jit
def _cut(
    row: tl.tuple,
    whole: tl.tensor,
    interval: tl.tuple,
    above_count: tl.tensor,
    above: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Key of the last value that top-k and top-p keep, the id below which they keep its tokens, and whether the whole
    row stands for the list from here on.

    `interval` is the lowest value that weighs anything, and the ends of the list's values; `above` and `above_count`
    are what lies above them, `total` is the weight of the row.
    """
    lowest, low, high = interval
    vocab = row[4]
    by_count = top_k > 0
    wanted = tl.where(by_count, top_k.to(tl.float64), top_p * total.to(tl.float64))
    base = tl.where(whole, 0, tl.where(by_count, above_count, above))
    count, weight = _tally(row, whole, order_key(low), vocab, vocab, 0.0, BLOCK)
    reach = base + tl.where(by_count, count, weight)
    proven = tl.where(by_count, above_count, above).to(tl.float64) < wanted
    proven = proven & ((reach.to(tl.float64) >= wanted) | (low == lowest))
    whole = whole | (proven == 0)
    base = tl.where(whole, 0, base)
    top_key = order_key(row[5]).to(tl.int64)
    low_key = tl.where(proven, order_key(low).to(tl.int64), _LEAST_KEY)
    high_key = tl.where(proven, order_key(high).to(tl.int64), top_key)
    low_key = _lowest_cut(row, whole, low_key, high_key, by_count, base, wanted, BLOCK)
    limit = vocab + tl.zeros((), tl.int32)
    if top_p < 1.0:
        base = tl.where(whole, 0, above)
        if by_count:
            _, weight = _tally(row, whole, low_key.to(tl.int32), vocab, vocab, 0.0, BLOCK)
            wanted = top_p * (base + weight).to(tl.float64)
            proven = base.to(tl.float64) < wanted
            whole = whole | (proven == 0)
            base = tl.where(whole, 0, base)
            high_key = tl.where(proven, high_key, top_key)
            low_key = _lowest_cut(row, whole, low_key, high_key, by_count == 0, base, wanted, BLOCK)
        limit = _id_limit(row, whole, low_key.to(tl.int32), base, wanted, BLOCK)
    return low_key.to(tl.int32), limit, whole


@triton.jit
def _walk(
    row: tl.tuple,
    whole: tl.tensor,
    cut: tl.tensor,
    limit: tl.tensor,
    min_p: tl.tensor,
    kept: tl.tensor,
    chunks: tl.tensor,
    draw: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """The first token where the running sum of the weights kept passes the draw's share of them, in order of ids.

    `kept` [BLOCK_C] is what the tokens above the list bring to it, by chunks.
    """
    logits_ptr, vocab, largest, temperature = row[0], row[4], row[5], row[6]
    _, weight = _tally(row, whole, cut, limit, vocab, min_p, BLOCK)
    total = tl.sum(kept) + weight
    share = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    low = tl.zeros((), tl.int32)
    high = chunks - 1 + low
    before = tl.zeros((), tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        _, weight = _tally(row, whole, cut, limit, (middle + 1) * CHUNK, min_p, BLOCK)
        running = weight + tl.sum(tl.where(tl.arange(0, BLOCK_C) <= middle, kept, 0))
        passed = running > share
        high = tl.where(passed, middle, high)
        low = tl.where(passed, low, middle + 1)
        before = tl.where(passed, before, running)
    steps = tl.zeros((), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        ids = low * CHUNK + start + tl.arange(0, BLOCK)
        inside = ids < vocab
        scores = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
        key = order_key(scores)
        ratios = ratio(scores, largest, temperature)
        over = ((key > cut) | ((key == cut) & (ids < limit))) & (ratios >= min_p) & inside
        weights = tl.where(over, (ratios * SCALE).to(tl.int64), 0)
        steps += tl.sum((before + tl.cumsum(weights, 0) <= share).to(tl.int32))
        before += tl.sum(weights)
    return tl.minimum(low * CHUNK + steps, vocab - 1).to(tl.int64)


# Triton 3.6 fails to compile this with the constant 1 in place of `chunks`.
@triton.jit(do_not_specialize=["chunks"])
def settle_kernel(
    logits_ptr: tl.tensor,
    unedited_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    best_ptr: tl.tensor,
    interval_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    num_outputs_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    bad_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    stride: tl.tensor,
    unedited_stride: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.tensor,
    DRAWS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program a row: its token, or -1 and a flag."""
    r, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    has = chunk < chunks
    place = r * chunks + chunk
    plane = rows * chunks
    peaks = tl.load(peaks_ptr + place, mask=has, other=-float("inf"))
    largest = largest_of(peaks)
    finite = (largest > -float("inf")) & (largest < float("inf"))
    best = tl.load(best_ptr + place, mask=has, other=vocab)
    token = tl.min(tl.where(peaks == largest, best, vocab)).to(tl.int64)
    if DRAWS:
        temperature, top_k, top_p = options_of(temperature_ptr, top_k_ptr, top_p_ptr, r, vocab)
        if finite & (temperature > 0.0):
            listed = tl.load(listed_ptr + r)
            whole = listed > capacity
            row = (
                logits_ptr + r * stride,
                values_ptr + r * capacity,
                ids_ptr + r * capacity,
                listed,
                vocab,
                largest,
                temperature,
            )
            cut = tl.full((), _LEAST_KEY, tl.int32)
            limit = vocab + tl.zeros((), tl.int32)
            own_ptr = sums_ptr + place
            if (top_k > 0) | (top_p < 1.0):
                ends_ptr = interval_ptr + 2 * (STAGES * rows + r)
                cut, limit, whole = _cut(
                    row,
                    whole,
                    (tl.load(interval_ptr + 2 * r), tl.load(ends_ptr), tl.load(ends_ptr + 1)),
                    tl.sum(tl.load(own_ptr + ABOVE_COUNT * plane, mask=has, other=0)),
                    tl.sum(tl.load(own_ptr + ABOVE * plane, mask=has, other=0)),
                    tl.sum(tl.load(own_ptr + TOTAL * plane, mask=has, other=0)),
                    top_k,
                    top_p,
                    BLOCK,
                )
            kept = tl.where(whole, 0, tl.load(own_ptr + ABOVE_KEPT * plane, mask=has, other=0))
            draw = uniform(tl.load(keys_ptr + r), tl.load(num_outputs_ptr + r))
            min_p = tl.load(min_p_ptr + r)
            token = _walk(row, whole, cut, limit, min_p, kept, chunks, draw, CHUNK, BLOCK, BLOCK_C)
    tl.store(token_ids_ptr + r, tl.where(finite, token, -1))
    tl.store(bad_ptr + r, tl.where(finite, 0, 1))
    if LOGPROBS:
        tops = tl.load(peaks_ptr + place + 2 * plane, mask=has, other=-float("inf"))
        parts = tl.load(peaks_ptr + place + 3 * plane, mask=has, other=0.0)
        top = tl.max(tops)
        norm = top + tl.log(tl.sum(parts * tl.exp(tops - top)))
        own = tl.load(unedited_ptr + r * unedited_stride + token, mask=finite, other=0.0).to(tl.float32)
        tl.store(logprobs_ptr + r, tl.where(finite, own - norm, float("nan")))
