"""The choice of each row's top_k positions by their scores, without a sort: the second step of `indexer_triton`.

Scores are kept as whole numbers in the same order. One program a row bisects them for the least one that is chosen: by
halves of the interval from the lowest to the highest number, and no further than to a bound that leaves exactly top_k.
Then it writes the positions of those above, and of the first ones equal to it, in rising order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline_kernels.launch import wait_for_inputs
from hookline_kernels.paged_rows import locate_tile

# Lower than the key of any score.
_NONE = tl.constexpr(-(2**31))


@triton.jit
def order_key(scores: tl.tensor) -> tl.tensor:
    """Integers in the order of scores: NaN as infinity, both zeros equal."""
    scores = tl.where(scores != scores, float("inf"), tl.where(scores == 0.0, 0.0, scores))
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _keys(keys_ptr: tl.tensor, start: tl.tensor, count: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The CHUNK keys from `start` on, `_NONE` past the first `count`: read all the same, as masked loads are narrow."""
    place = start + tl.arange(0, CHUNK)
    return tl.where(place < count, tl.load(keys_ptr + place), _NONE)


@triton.jit
def _count(keys_ptr: tl.tensor, count: tl.tensor, bound: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """How many of the first `count` keys are at least `bound`, which is above the lowest key."""
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, count, CHUNK):
        found += (_keys(keys_ptr, start, count, CHUNK) >= bound).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _least_chosen(
    keys_ptr: tl.tensor, count: tl.tensor, wanted: tl.tensor, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The least key among the `wanted` largest of more than that many, and how many equal to it are among them."""
    index = tl.arange(0, CHUNK)
    lowest = tl.full([CHUNK], 2**31 - 1, tl.int32)
    highest = tl.full([CHUNK], _NONE, tl.int32)
    for start in range(0, count, CHUNK):
        keys = _keys(keys_ptr, start, count, CHUNK)
        lowest = tl.where(start + index < count, tl.minimum(lowest, keys), lowest)
        highest = tl.maximum(highest, keys)
    low = tl.min(lowest, axis=0)
    high = tl.max(highest, axis=0)
    above = tl.sum(tl.zeros([CHUNK], tl.int32), axis=0)  # keys above `high`; at least `wanted` are from `low` on
    room = wanted - above
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + 1  # without overflow, rounded up
        found = _count(keys_ptr, count, middle, CHUNK)
        low = tl.where(found >= wanted, middle, low)
        above = tl.where(found < wanted, found, above)
        room = tl.where(found == wanted, wanted, wanted - above)
        high = tl.where(found == wanted, middle, tl.where(found < wanted, middle - 1, high))
    return low, room


@triton.jit
def _write(
    keys_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_keys_ptr: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    least: tl.tensor,
    room: tl.tensor,
    TOP_K: tl.constexpr,
    LISTED: tl.constexpr,
    KEEP: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes the positions of the keys above `least` and of the first `room` equal to it; with KEEP the keys too."""
    index = tl.arange(0, CHUNK)
    before = tl.sum(tl.zeros([CHUNK], tl.int32), axis=0)
    equal_before = before
    for start in range(0, count, CHUNK):
        inside = start + index < count
        keys = _keys(keys_ptr, start, count, CHUNK)
        above = inside & (keys > least)
        equal = inside & (keys == least)
        # Both running sums in one: a chunk has less than 2^16 keys.
        sums = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        above_sum = before + (sums & 0xFFFF)
        equal_sum = equal_before + (sums >> 16)
        kept = above | (equal & (equal_sum <= room))
        place = above_sum + tl.minimum(equal_sum, room) - 1
        kept = kept & (place < TOP_K)
        position = first + start + index
        if LISTED:
            position = tl.load(positions_ptr + start + index, mask=kept, other=-1)
        tl.store(out_ptr + place, position, mask=kept)
        if KEEP:
            tl.store(out_keys_ptr + place, keys, mask=kept)
        before += tl.sum(above.to(tl.int32), axis=0)
        equal_before += tl.sum(equal.to(tl.int32), axis=0)


@triton.jit(
    do_not_specialize=("row_units", "tokens", "requests", "begin_row", "segments"),
    do_not_specialize_on_alignment=("starts_ptr", "contexts_ptr"),
)
def select_kernel(
    keys_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    kept_keys_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_units: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    begin_row: tl.tensor,
    segments: tl.tensor,
    STAGE: tl.constexpr,
    TOP_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a row and segment of its positions, or at the second stage a row.

    The first stage of several segments keeps its choices as kept_keys and kept [rows, segments, top_k] int32, from
    which the second one chooses; where a row's context lies in one segment the first stage is enough.
    STAGE is 0 where there is but one segment, then 1 and 2. A row of keys has 16 * row_units places. Up to
    CHUNK places past the last keys are read.
    """
    wait_for_inputs(PDL)
    row = begin_row + tl.program_id(1)
    segment = tl.program_id(0)
    _, _, end_row, context = locate_tile(starts_ptr, contexts_ptr, requests, tokens, row, 1, BLOCK_B)
    seen = tl.minimum(tl.maximum(context - end_row + row + 1, 0), context)
    index = tl.arange(0, CHUNK)
    row_long = tl.program_id(1).to(tl.int64)
    out_ptr += row.to(tl.int64) * TOP_K
    if (seen <= TOP_K) & (segment == 0) & (STAGE != 2):
        for start in range(0, TOP_K, CHUNK):
            place = start + index
            tl.store(out_ptr + place, tl.where(place < seen, place, -1), mask=place < TOP_K)
    if STAGE == 2:
        if (seen > TOP_K) & (seen > SEGMENT):
            place = row_long * segments * TOP_K
            count = tl.cdiv(seen, SEGMENT) * TOP_K
            least, room = _least_chosen(kept_keys_ptr + place, count, TOP_K, CHUNK)
            _write(
                kept_keys_ptr + place, kept_ptr + place, out_ptr, out_ptr,
                count, 0, least, room, TOP_K, True, False, CHUNK,
            )  # fmt: skip
    elif seen > TOP_K:
        first = segment * SEGMENT
        count = tl.minimum(seen - first, SEGMENT)
        place = row_long * row_units * 16 + first  # aligned, and known to be
        kept_place = (row_long * segments + segment) * TOP_K
        if count > TOP_K:
            least, room = _least_chosen(keys_ptr + place, count, TOP_K, CHUNK)
            chosen_ptr = out_ptr
            if STAGE == 1 and seen > SEGMENT:
                chosen_ptr = kept_ptr + kept_place
            _write(
                keys_ptr + place, kept_ptr, chosen_ptr, kept_keys_ptr + kept_place,
                count, first, least, room, TOP_K, False, STAGE == 1, CHUNK,
            )  # fmt: skip
        elif count > 0:
            for start in range(0, TOP_K, CHUNK):
                slot = start + index
                keys = tl.load(keys_ptr + place + slot, mask=slot < count, other=_NONE)
                tl.store(kept_keys_ptr + kept_place + slot, keys, mask=slot < TOP_K)
                tl.store(kept_ptr + kept_place + slot, tl.where(slot < count, first + slot, -1), mask=slot < TOP_K)
