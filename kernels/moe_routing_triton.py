"""Triton kernels of moe_routing.py: the experts of each token, and the pairs in the order of the experts.

choose_experts is one launch. sort_by_expert is one launch for few pairs: each pair's place is the number of pairs that
come before it, counted by comparing with all; and three for many: how many pairs of each expert a chunk has, sums of
these, and the places. No count depends on the order in which programs run. Nothing is read by the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hookline_kernels.launch import dependent_launch, wait_for_inputs

if TYPE_CHECKING:
    from hookline_kernels.moe_routing import RoutingRule

# Pairs up to which each is compared with all.
COMPARED = 8192

# Pairs of a program for many, and how many of these are compared at a time.
CHUNK, _COMPARED_AT_ONCE = 1024, 32

# Experts that the kernel of choose_experts keeps in the registers of a program.
MAX_EXPERTS = 1024

# What DeepSeek-V3 adds to the sum of sigmoid scores before it divides by it.
SIGMOID_EPS = 1e-20

# Scores of a program: tokens are taken together up to so many.
_SCORES = 256


@triton.jit
def _best(keys: tl.tensor, ids: tl.tensor, LIMIT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The largest key of each row and, of those that have it, the lowest id."""
    largest = tl.max(keys, axis=1)
    first = tl.min(tl.where(keys == largest[:, None], ids, LIMIT), axis=1)
    return largest, first


@triton.jit
def _within_best_groups(
    keys: tl.tensor,
    ids: tl.tensor,
    experts: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tensor:
    """Keys, with -inf outside the best groups."""
    size = experts // GROUPS
    group_of = tl.where(ids < experts, ids // size, GROUPS)
    scores = tl.where(group_of < GROUPS, 0.0, -float("inf")) + tl.zeros_like(keys)
    for group in tl.static_range(GROUPS):
        own = tl.where(group_of == group, keys, -float("inf"))
        first, best = _best(own, ids, BLOCK_E)
        second = tl.max(tl.where(ids == best[:, None], -float("inf"), own), axis=1)
        score = first + tl.where(size > 1, second, 0.0)
        scores = tl.where(group_of == group, score[:, None], scores)
    kept = scores != scores
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(kept, -float("inf"), scores)
        largest = tl.max(left, axis=1)
        chosen = tl.min(tl.where((left == largest[:, None]) & (kept == 0), group_of, GROUPS), axis=1)
        kept = kept | (group_of == chosen[:, None])
    return tl.where(kept, keys, -float("inf"))


@triton.jit(do_not_specialize=["tokens"])
def choose_experts_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_T tokens a program; ids and weights are contiguous [T, TOP_K]."""
    wait_for_inputs(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.arange(0, BLOCK_E)[None, :]
    inside = (token < tokens)[:, None] & (ids < experts)
    places = logits_ptr + token.to(tl.int64)[:, None] * stride + ids
    logits = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where(ids < experts, logits, -float("inf"))
    if SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    biased = scores
    if HAS_BIAS:
        biased += tl.load(bias_ptr + ids, mask=ids < experts, other=0.0)
    # Eligible keys are above -inf, so that there are always as many as the choice takes.
    keys = tl.where(biased != biased, float("inf"), tl.maximum(biased, -3.0e38))
    keys = tl.where(ids < experts, keys, -float("inf"))
    if GROUPS > 1:
        keys = _within_best_groups(keys, ids, experts, GROUPS, TOP_GROUPS, BLOCK_E)
    column = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for j in tl.static_range(TOP_K):
        _, best = _best(keys, ids, BLOCK_E)
        own = ids == best[:, None]
        weight = tl.sum(tl.where(own, scores, 0.0), axis=1)
        keys = tl.where(own, -float("inf"), keys)
        chosen = tl.where(column == j, best[:, None], chosen)
        weights = tl.where(column == j, weight[:, None], weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1) + EPS)[:, None]
    place = token.to(tl.int64)[:, None] * TOP_K + column
    kept = (token < tokens)[:, None] & (column < TOP_K)
    tl.store(ids_ptr + place, chosen, mask=kept)
    tl.store(weights_ptr + place, weights * scale, mask=kept)


def choose_experts_triton(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    tokens, experts = logits.shape
    ids = torch.empty((tokens, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    block_e = triton.next_power_of_2(experts)
    block_t = max(1, _SCORES // block_e)
    choose_experts_kernel[(triton.cdiv(tokens, block_t),)](
        logits,
        weights if bias is None else bias,
        ids,
        weights,
        tokens,
        experts,
        logits.stride(0),
        float(rule.scale),
        HAS_BIAS=bias is not None,
        SOFTMAX=rule.scoring == "softmax",
        RENORMALIZE=rule.renormalize,
        EPS=SIGMOID_EPS if rule.scoring == "sigmoid" else 0.0,
        TOP_K=rule.top_k,
        GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=1 if block_e <= 256 else 4,
        **dependent_launch(logits.device),
    )
    return ids, weights


@triton.jit(do_not_specialize=["pairs", "bounds"])
def place_kernel(
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    pairs: tl.tensor,
    bounds: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_Q questions a program: how many pairs come before this one, or before an expert's first?"""
    wait_for_inputs(PDL)
    question = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_pair = question < pairs
    expert = tl.load(experts_ptr + question, mask=is_pair, other=0)
    expert = tl.where(is_pair, expert, question - pairs)
    number = tl.where(is_pair, question, -1)
    before = tl.zeros((BLOCK_Q,), tl.int32)
    for start in range(0, pairs, BLOCK_P):
        other = start + tl.arange(0, BLOCK_P)
        theirs = tl.load(experts_ptr + other, mask=other < pairs, other=2147483647)
        earlier = (theirs[None, :] == expert[:, None]) & (other[None, :] < number[:, None])
        before += tl.sum(((theirs[None, :] < expert[:, None]) | earlier).to(tl.int32), axis=1)
    tl.store(order_ptr + before, question, mask=is_pair)
    tl.store(starts_ptr + question - pairs, before, mask=(question >= pairs) & (question < pairs + bounds))


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    experts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """counts [C, E]: the pairs of each expert in each chunk."""
    chunk = tl.program_id(0)
    ids = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, CHUNK, AT_ONCE):
        pair = chunk * CHUNK + start + tl.arange(0, AT_ONCE)
        theirs = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
        counts += tl.sum((theirs[:, None] == ids[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + chunk.to(tl.int64) * experts + ids, counts, mask=ids < experts)


@triton.jit(do_not_specialize=["chunks"])
def sum_kernel(
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks: tl.tensor,
    experts: tl.tensor,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """starts [E + 1]; counts [C, E] becomes where each chunk's pairs of each expert begin. One program."""
    ids = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, chunks, BLOCK_C):
        chunk = start + tl.arange(0, BLOCK_C)
        inside = (chunk < chunks)[:, None] & (ids < experts)[None, :]
        counts = tl.load(counts_ptr + chunk.to(tl.int64)[:, None] * experts + ids[None, :], mask=inside, other=0)
        total += tl.sum(counts, axis=0)
    ends = tl.cumsum(total, axis=0)
    begin = ends - total
    tl.store(starts_ptr + ids, begin, mask=ids < experts)
    tl.store(starts_ptr + experts + ids, tl.sum(total) + ids, mask=ids == 0)
    for start in range(0, chunks, BLOCK_C):
        chunk = start + tl.arange(0, BLOCK_C)
        inside = (chunk < chunks)[:, None] & (ids < experts)[None, :]
        places = counts_ptr + chunk.to(tl.int64)[:, None] * experts + ids[None, :]
        counts = tl.load(places, mask=inside, other=0)
        tl.store(places, begin[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        begin += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["pairs"])
def scatter_kernel(
    experts_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    order_ptr: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Each pair of a chunk after those of its expert that come before it in the chunk."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
    before = tl.load(begins_ptr + chunk.to(tl.int64) * experts + expert, mask=pair < pairs, other=0)
    for start in range(0, CHUNK, AT_ONCE):
        other = chunk * CHUNK + start + tl.arange(0, AT_ONCE)
        theirs = tl.load(experts_ptr + other, mask=other < pairs, other=-2)
        earlier = (theirs[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
        before += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + before, pair, mask=pair < pairs)


def sort_by_expert_triton(
    expert_ids: torch.Tensor, num_experts: int, *, compared: int = COMPARED, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """order and starts; one launch up to `compared` pairs, three for more. `compared` and `chunk` are for tests."""
    pairs, device = expert_ids.numel(), expert_ids.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    if pairs <= compared:
        block_q = 16
        place_kernel[(triton.cdiv(pairs + num_experts + 1, block_q),)](
            expert_ids,
            order,
            starts,
            pairs,
            num_experts + 1,
            BLOCK_Q=block_q,
            BLOCK_P=256,
            **dependent_launch(device),
        )
        return order, starts
    chunks = triton.cdiv(pairs, chunk)
    block_e = triton.next_power_of_2(num_experts)
    counts = torch.empty((chunks, num_experts), dtype=torch.int32, device=device)
    count_kernel[(chunks,)](
        expert_ids,
        counts,
        pairs,
        num_experts,
        CHUNK=chunk,
        BLOCK_E=block_e,
        AT_ONCE=max(1, min(chunk, 8192 // block_e)),
    )
    sum_kernel[(1,)](
        counts, starts, chunks, num_experts, BLOCK_C=max(1, min(64, 16384 // block_e)), BLOCK_E=block_e, num_warps=8
    )
    at_once = min(chunk, _COMPARED_AT_ONCE)
    scatter_kernel[(chunks,)](expert_ids, counts, order, pairs, num_experts, CHUNK=chunk, AT_ONCE=at_once, num_warps=8)
    return order, starts
