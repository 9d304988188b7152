"""The choice of tokens on a GPU, without a sort: `sample` of sampling.py as six launches, or two where all are greedy.

Chunks of the vocabulary are programs of their own, so that one row keeps a whole GPU busy. What the launches do:

1.  peak: largest logit of each chunk, its lowest id, the smallest logit, and exp sums for logprobs. Greedy rows are
    done with that; the programs of the next launches leave at once where a row is greedy.
2.  narrow, three times, for rows with top-k or top-p: where in the row's values does the cut lie? Eight pivots split an
    interval of values; float sums over the tokens above each say in which ninth the cut is. An estimate, and no more.
3.  gather: exact sums of whole-number weights, over the tokens above that interval, and a list of the tokens within it.
4.  settle, one program a row: proves by the exact sums that the cut is in the interval, bisects the list (by bits of
    the value, then by id among equals), and walks the running sum of the weights kept, in order of ids, to the draw.

Where the estimate was wrong, or more tokens lie in the interval than a list holds, settle takes the whole row for the
list: slower, the same answer. Weights are whole numbers, so no answer depends on how a row was split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hookline_kernels.decode_inputs import SamplingOptions
from hookline_kernels.sampling_rules import ABOVE, ABOVE_COUNT, ABOVE_KEPT, SCALE, largest_of, options_of, ratio
from hookline_kernels.sampling_settle import settle_kernel

_PIVOTS, _STAGES = 8, 3
_CAPACITY = 8192  # tokens of a list
_CHUNKS = (4096, 2048, 1024)
_REACH = tl.constexpr(32.0)  # exp(-32) is less than 1 / SCALE, with room for rounding
_SUMS = 4
# Chunks of a row are read in blocks of at least this many, so that small vocabularies share their kernels.
_LEAST_BLOCK_C = 32


@triton.jit
def peak_kernel(
    logits_ptr: tl.tensor,
    unedited_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    best_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    stride: tl.tensor,
    unedited_stride: tl.tensor,
    vocab: tl.tensor,
    LOGPROBS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """peaks [4, R, C]: of each chunk the largest logit (NaN where one is), the smallest above -inf, and for logprobs
    the largest unedited one and the sum of exponentials under it; best [R, C] the largest one's id; empties the list.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    scores = tl.load(logits_ptr + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    is_nan = scores != scores
    bad = tl.sum(is_nan.to(tl.int32)) > 0
    scores = tl.where(is_nan, -float("inf"), scores)
    largest = tl.max(scores)
    best = tl.min(tl.where((scores == largest) & inside, ids, vocab))
    place = peaks_ptr + row * chunks + chunk
    plane = tl.num_programs(1).to(tl.int64) * chunks
    tl.store(place, tl.where(bad, float("nan"), largest))
    tl.store(place + plane, tl.min(tl.where(scores > -float("inf"), scores, float("inf"))))
    tl.store(best_ptr + row * chunks + chunk, best)
    if chunk == 0:
        tl.store(listed_ptr + row, 0)
    if LOGPROBS:
        plain = tl.load(unedited_ptr + row * unedited_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(plain)
        shift = tl.where(top > -float("inf"), top, 0.0)
        tl.store(place + 2 * plane, top)
        tl.store(place + 3 * plane, tl.sum(tl.exp(plain - shift)))


@triton.jit
def _narrowed(
    interval_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    measures_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    chunks: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    STAGE: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The interval of values that is left after STAGE stages: its low and high end, both of it."""
    chunk = tl.arange(0, BLOCK_C)
    pivot = tl.arange(0, PIVOTS)
    before = (STAGE - 1) * rows + row
    low = tl.load(interval_ptr + 2 * before)
    high = tl.load(interval_ptr + 2 * before + 1)
    pivots = tl.load(pivots_ptr + before * PIVOTS + pivot)
    places = (before * chunks + chunk[:, None]) * PIVOTS + pivot[None, :]
    measures = tl.sum(tl.load(measures_ptr + places, mask=chunk[:, None] < chunks, other=0.0), axis=0)
    totals = tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    wanted = top_p * tl.sum(totals).to(tl.float64) / SCALE
    wanted = tl.where(top_k > 0, top_k.to(tl.float64), wanted).to(tl.float32)
    # A margin for the rounding of float sums.
    low = tl.maximum(low, tl.max(tl.where(measures >= wanted * 1.00001, pivots, -float("inf"))))
    high = tl.minimum(high, tl.min(tl.where(measures < wanted * 0.99999, pivots, float("inf"))))
    return low, high


@triton.jit
def narrow_kernel(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    interval_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    measures_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    STAGE: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """interval [stages + 1, R, 2], pivots [stages, R, P] and measures [stages, R, C, P]: how many tokens of a chunk lie
    above each pivot (top-k), or how likely they are (top-p); the first stage also sums all weights.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    temperature, top_k, top_p = options_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    all_chunks = tl.arange(0, BLOCK_C)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0)):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        place = peaks_ptr + row * chunks + all_chunks
        largest = largest_of(tl.load(place, mask=all_chunks < chunks, other=-float("inf")))
        if STAGE == 0:
            least = tl.load(place + rows * chunks, mask=all_chunks < chunks, other=float("inf"))
            low, high = tl.maximum(largest - _REACH * temperature, tl.min(least)), largest
        else:
            low, high = _narrowed(
                interval_ptr,
                pivots_ptr,
                measures_ptr,
                sums_ptr,
                row,
                rows,
                chunks,
                top_k,
                top_p,
                STAGE,
                PIVOTS,
                BLOCK_C,
            )
        ratios = ratio(scores, largest, temperature)
        if STAGE == 0:
            tl.store(sums_ptr + row * chunks + chunk, tl.sum((ratios * SCALE).to(tl.int64)))
        ratios = tl.where(top_k > 0, 1.0, ratios)
        here = STAGE * rows + row
        if chunk == 0:
            tl.store(interval_ptr + 2 * here, low)
            tl.store(interval_ptr + 2 * here + 1, high)
        for index in tl.static_range(PIVOTS):
            pivot = low + (high - low) * ((index + 1) / (PIVOTS + 1))
            if chunk == 0:
                tl.store(pivots_ptr + here * PIVOTS + index, pivot)
            above = tl.sum(tl.where(scores > pivot, ratios, 0.0))
            tl.store(measures_ptr + (here * chunks + chunk) * PIVOTS + index, above)


@triton.jit
def gather_kernel(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    interval_ptr: tl.tensor,
    pivots_ptr: tl.tensor,
    measures_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    capacity: tl.tensor,
    STAGES: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """sums [4, R, C]: how many of a chunk's tokens lie above the interval, their weight, and what of it passes min-p;
    values and ids [R, capacity] of those within the interval. In rows without a cut every token is above.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    temperature, top_k, top_p = options_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    all_chunks = tl.arange(0, BLOCK_C)
    if temperature > 0.0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab
        scores = tl.load(logits_ptr + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
        place = peaks_ptr + row * chunks + all_chunks
        largest = largest_of(tl.load(place, mask=all_chunks < chunks, other=-float("inf")))
        ratios = ratio(scores, largest, temperature)
        weights = (ratios * SCALE).to(tl.int64)
        kept = ratios >= tl.load(min_p_ptr + row)
        place = sums_ptr + row * chunks + chunk
        plane = rows * chunks
        if (top_k > 0) | (top_p < 1.0):
            low, high = _narrowed(
                interval_ptr,
                pivots_ptr,
                measures_ptr,
                sums_ptr,
                row,
                rows,
                chunks,
                top_k,
                top_p,
                STAGES,
                PIVOTS,
                BLOCK_C,
            )
            # A list that holds all of top-k serves for the top-p among them too.
            high = tl.where((top_k > 0) & (2 * top_k <= capacity), largest, high)
            if chunk == 0:
                tl.store(interval_ptr + 2 * (STAGES * rows + row), low)
                tl.store(interval_ptr + 2 * (STAGES * rows + row) + 1, high)
            count = tl.sum((inside & (scores >= low) & (scores <= high)).to(tl.int32))
            weights = tl.where(scores > high, weights, 0)
            tl.store(place + ABOVE_COUNT * plane, tl.sum((scores > high).to(tl.int32)).to(tl.int64))
            tl.store(place + ABOVE * plane, tl.sum(weights))
            if count > 0:
                # Read again in small blocks, from the cache: holding on to all of it would cost half of the threads.
                first = tl.atomic_add(listed_ptr + row, count)
                for start in range(0, CHUNK, BLOCK):
                    some = chunk * CHUNK + start + tl.arange(0, BLOCK)
                    found = tl.load(logits_ptr + row * stride + some, mask=some < vocab, other=-float("inf"))
                    found = found.to(tl.float32)
                    within = (some < vocab) & (found >= low) & (found <= high)
                    order = first + tl.cumsum(within.to(tl.int32), 0) - 1
                    fits = within & (order < capacity)
                    tl.store(values_ptr + row * capacity + order, found, mask=fits)
                    tl.store(ids_ptr + row * capacity + order, some, mask=fits)
                    first += tl.sum(within.to(tl.int32))
        tl.store(place + ABOVE_KEPT * plane, tl.sum(tl.where(kept, weights, 0)))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the launches leave for each other; shapes in the kernels."""

    peaks: torch.Tensor
    best: torch.Tensor
    listed: torch.Tensor
    interval: torch.Tensor
    pivots: torch.Tensor
    measures: torch.Tensor
    sums: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor


def _scratch(rows: int, drawn: int, chunks: int, capacity: int, device: torch.device) -> _Scratch:
    """Memory for `rows`, of which `drawn` have launches beside peak and settle."""
    return _Scratch(
        peaks=torch.empty((4, rows, chunks), dtype=torch.float32, device=device),
        best=torch.empty((rows, chunks), dtype=torch.int32, device=device),
        listed=torch.empty(rows, dtype=torch.int32, device=device),
        interval=torch.empty((_STAGES + 1, drawn, 2), dtype=torch.float32, device=device),
        pivots=torch.empty((_STAGES, drawn, _PIVOTS), dtype=torch.float32, device=device),
        measures=torch.empty((_STAGES, drawn, chunks, _PIVOTS), dtype=torch.float32, device=device),
        sums=torch.empty((_SUMS, drawn, chunks), dtype=torch.int64, device=device),
        values=torch.empty((drawn, capacity), dtype=torch.float32, device=device),
        ids=torch.empty((drawn, capacity), dtype=torch.int32, device=device),
    )


def sample_triton(
    logits: torch.Tensor,
    options: SamplingOptions,
    unedited: torch.Tensor,
    token_ids: torch.Tensor,
    bad: torch.Tensor,
    logprobs: torch.Tensor | None,
    greedy: bool,
    *,
    capacity: int = _CAPACITY,
    chunk: int | None = None,
) -> None:
    """Six launches, two where `greedy` says that no row draws. `capacity` and `chunk` are for tests and tuning."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    chunk = chunk or _chunk(rows, vocab, logits.device)
    chunks = triton.cdiv(vocab, chunk)
    scratch = _scratch(rows, 0 if greedy else rows, chunks, capacity, logits.device)
    peak_kernel[(chunks, rows)](
        logits,
        unedited,
        scratch.peaks,
        scratch.best,
        scratch.listed,
        logits.stride(0),
        unedited.stride(0),
        vocab,
        LOGPROBS=logprobs is not None,
        CHUNK=chunk,
        num_warps=max(4, chunk // 512),
    )
    if not greedy:
        _find_cuts(logits, options, scratch, chunk)
    settle_kernel[(rows,)](
        logits,
        unedited,
        scratch.peaks,
        scratch.best,
        scratch.interval,
        scratch.sums,
        scratch.listed,
        scratch.values,
        scratch.ids,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.keys,
        options.num_outputs,
        token_ids,
        bad,
        bad if logprobs is None else logprobs,
        logits.stride(0),
        unedited.stride(0),
        vocab,
        chunks,
        capacity,
        DRAWS=not greedy,
        LOGPROBS=logprobs is not None,
        STAGES=_STAGES,
        CHUNK=chunk,
        BLOCK=min(chunk, 2048),
        BLOCK_C=_block_c(chunks),
        num_warps=1 if greedy else 8,
    )


def _find_cuts(logits: torch.Tensor, options: SamplingOptions, scratch: _Scratch, chunk: int) -> None:
    """The launches between peak and settle: an interval of values in which the cut should lie, and a list of it."""
    rows, vocab = logits.shape
    chunks = scratch.best.shape[1]
    estimate = (scratch.interval, scratch.pivots, scratch.measures, scratch.sums)
    cuts = (options.temperature, options.top_k, options.top_p)
    for stage in range(_STAGES):
        narrow_kernel[(chunks, rows)](
            logits,
            scratch.peaks,
            *estimate,
            *cuts,
            logits.stride(0),
            vocab,
            STAGE=stage,
            PIVOTS=_PIVOTS,
            CHUNK=chunk,
            BLOCK_C=_block_c(chunks),
            num_warps=max(4, chunk // 512),
        )
    gather_kernel[(chunks, rows)](
        logits,
        scratch.peaks,
        *estimate,
        scratch.listed,
        scratch.values,
        scratch.ids,
        *cuts,
        options.min_p,
        logits.stride(0),
        vocab,
        scratch.values.shape[1],
        STAGES=_STAGES,
        PIVOTS=_PIVOTS,
        CHUNK=chunk,
        BLOCK=min(chunk, 1024),
        BLOCK_C=_block_c(chunks),
        num_warps=max(4, chunk // 256),
        maxnreg=64 if chunk == _CHUNKS[0] else None,  # so that two programs share a processor
    )


def _block_c(chunks: int) -> int:
    return max(_LEAST_BLOCK_C, 1 << (chunks - 1).bit_length())


def _chunk(rows: int, vocab: int, device: torch.device) -> int:
    """Tokens of a program: as many as leave each processor three programs, or the fewest."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    for chunk in _CHUNKS:
        if rows * triton.cdiv(vocab, chunk) >= 3 * processors:
            return chunk
    return _CHUNKS[-1]
