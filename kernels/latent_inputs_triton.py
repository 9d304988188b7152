"""The Triton kernels of latent_inputs.py: one launch for a step's entries, one for its queries.

Both are short: what they cost in a decode step is being launched. So each part of a token is a program of its own, and
nothing that one program makes is read by another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hookline_kernels.launch import dependent_launch, wait_for_inputs


class IndexKeys(NamedTuple):
    """How an indexer's keys are made, and where they are written.

    Attributes:
        weight, bias: contiguous [D] fp32, of the layer norm.
        cache: contiguous [blocks, S, D].
        interleaved: whether a pair is two neighbours instead of one element of each half.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    cache: torch.Tensor
    interleaved: bool


class WriteEntries(NamedTuple):
    """A checked call of `write_entries`, as each implementation gets it; `q_latent` [T, Q] is what it fills."""

    latents: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    interleaved: bool
    index_keys: IndexKeys | None
    q_latent: torch.Tensor


class TurnQueries(NamedTuple):
    """A checked call of `turn_queries`, as each implementation gets it."""

    q: torch.Tensor
    out: torch.Tensor
    index_q: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    index_interleaved: bool


@triton.jit
def _rms_normed(
    row_ptr: tl.tensor, weight_ptr: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The SIZE numbers of a row, normed, in fp32."""
    column = tl.arange(0, BLOCK)
    values = tl.load(row_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return values * scale * tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _load_pairs(
    row: tl.tensor,
    real: tl.tensor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The first HALF pairs behind the addresses `row` [ROWS, 1] that are real: their parts, [ROWS, BLOCK_HALF] fp32."""
    if INTERLEAVED:  # neighbours are loaded together, which takes wide loads
        place = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.load(row + place, mask=real & (place < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, BLOCK_HALF, 2)))
    else:
        place = tl.arange(0, BLOCK_HALF)[None, :]
        inside = real & (place < HALF)
        a = tl.load(row + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + place + HALF, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_turned(
    row: tl.tensor,
    real: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Turns pairs by a token's cos and sin, and stores them where `_load_pairs` looks, rounded to type ROUND first."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)
    new_a = (a * cos - b * sin).to(ROUND).to(row.dtype.element_ty)
    new_b = (b * cos + a * sin).to(ROUND).to(row.dtype.element_ty)
    if INTERLEAVED:
        place = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.reshape(tl.join(new_a, new_b), (ROWS, 2 * BLOCK_HALF))
        tl.store(row + place, both, mask=real & (place < 2 * HALF))
    else:
        tl.store(row + pair, new_a, mask=real & (pair < HALF))
        tl.store(row + pair + HALF, new_b, mask=real & (pair < HALF))


@triton.jit
def _write_index_key(
    key_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Layer norm of one key in fp32, rounded to the key's type; its first pairs are turned from there."""
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    key = tl.load(key_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(key, axis=0) / SIZE
    centred = tl.where(inside, key - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    rest = (centred * scale * weight + bias).to(key_ptr.dtype.element_ty).to(entry_ptr.dtype.element_ty)
    tl.store(entry_ptr + column, rest, mask=inside & (column >= 2 * HALF))

    here = tl.zeros((1, 1), tl.int32)  # one row of pairs
    real = here == 0
    a, b = _load_pairs(key_ptr + here, real, 1, HALF, BLOCK_HALF, INTERLEAVED)
    weight_a, weight_b = _load_pairs(weight_ptr + here, real, 1, HALF, BLOCK_HALF, INTERLEAVED)
    bias_a, bias_b = _load_pairs(bias_ptr + here, real, 1, HALF, BLOCK_HALF, INTERLEAVED)
    a = ((a - mean) * scale * weight_a + bias_a).to(key_ptr.dtype.element_ty).to(tl.float32)
    b = ((b - mean) * scale * weight_b + bias_b).to(key_ptr.dtype.element_ty).to(tl.float32)
    round_to: tl.constexpr = key_ptr.dtype.element_ty
    _store_turned(entry_ptr + here, real, a, b, cos_ptr, sin_ptr, round_to, 1, HALF, BLOCK_HALF, INTERLEAVED)


@triton.jit(do_not_specialize_on_alignment=("slots_ptr",))
def write_entries_kernel(
    latents_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    kv_norm_ptr: tl.tensor,
    q_latent_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    index_weight_ptr: tl.tensor,
    index_bias_ptr: tl.tensor,
    index_cache_ptr: tl.tensor,
    stride_token: tl.tensor,
    eps: tl.tensor,
    Q_SIZE: tl.constexpr,
    L_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INDEX_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Three programs a token, for its q latent, its entry and its index key; two where INDEX_SIZE is 0."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = latents_ptr + token * stride_token
    if part == 0:
        normed = _rms_normed(row, q_norm_ptr, eps, Q_SIZE, BLOCK_Q)
        column = tl.arange(0, BLOCK_Q)
        q_latent = q_latent_ptr + token * Q_SIZE + column
        tl.store(q_latent, normed.to(q_latent_ptr.dtype.element_ty), mask=column < Q_SIZE)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        cos = cos_ptr + token * HALF
        sin = sin_ptr + token * HALF
        round_to: tl.constexpr = latents_ptr.dtype.element_ty
        if slot >= 0:
            if part == 1:
                entry = cache_ptr + slot * (L_SIZE + 2 * HALF)
                latent = _rms_normed(row + Q_SIZE, kv_norm_ptr, eps, L_SIZE, BLOCK_L).to(round_to)
                column = tl.arange(0, BLOCK_L)
                tl.store(entry + column, latent.to(cache_ptr.dtype.element_ty), mask=column < L_SIZE)
                here = L_SIZE + tl.zeros((1, 1), tl.int32)  # one row of pairs
                real = here == L_SIZE
                a, b = _load_pairs(row + Q_SIZE + here, real, 1, HALF, BLOCK_HALF, INTERLEAVED)
                _store_turned(entry + here, real, a, b, cos, sin, round_to, 1, HALF, BLOCK_HALF, INTERLEAVED)
            elif INDEX_SIZE > 0:
                _write_index_key(
                    row + Q_SIZE + L_SIZE + 2 * HALF,
                    index_weight_ptr,
                    index_bias_ptr,
                    index_cache_ptr + slot * INDEX_SIZE,
                    cos,
                    sin,
                    eps,
                    INDEX_SIZE,
                    HALF,
                    INDEX_INTERLEAVED,
                    BLOCK_D,
                    BLOCK_HALF,
                )


def write_entries_triton(call: WriteEntries) -> None:
    """One launch; a latent must fit one program's registers, which holds to Q = 64k."""
    (tokens, _), half = call.latents.shape, call.cos.shape[1]
    if tokens == 0:
        return
    # Without an indexer its arguments are named and not touched.
    index = call.index_keys or IndexKeys(call.q_norm, call.q_norm, call.cache, False)
    size = len(index.weight)
    write_entries_kernel[(tokens, 2 if call.index_keys is None else 3)](
        call.latents,
        call.q_norm,
        call.kv_norm,
        call.q_latent,
        call.cos,
        call.sin,
        call.cache,
        call.slots,
        index.weight,
        index.bias,
        index.cache,
        call.latents.stride(0),
        call.eps,
        Q_SIZE=len(call.q_norm),
        L_SIZE=len(call.kv_norm),
        HALF=half,
        INDEX_SIZE=0 if call.index_keys is None else size,
        INTERLEAVED=call.interleaved,
        INDEX_INTERLEAVED=index.interleaved,
        BLOCK_Q=triton.next_power_of_2(len(call.q_norm)),
        BLOCK_L=triton.next_power_of_2(len(call.kv_norm)),
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(size),
        num_warps=4,
        **dependent_launch(call.latents.device),
    )


@triton.jit(do_not_specialize=("out_tokens",))
def turn_queries_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    index_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    out_stride_token: tl.tensor,
    out_stride_head: tl.tensor,
    index_stride_token: tl.tensor,
    index_stride_head: tl.tensor,
    out_tokens: tl.tensor,
    heads: tl.tensor,
    index_heads: tl.tensor,
    head_parts: tl.tensor,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a token and BLOCK_HEADS heads: `head_parts` for attention's, those behind them for the indexer's."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos = cos_ptr + token * HALF
    sin = sin_ptr + token * HALF
    round_to: tl.constexpr = q_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK_HEADS).to(tl.int64)[:, None]
    if part < head_parts:
        head = part * BLOCK_HEADS + lane
        own = q_ptr + token * q_stride_token + head * q_stride_head
        into = tl.where(token < out_tokens, out_ptr + token * out_stride_token + head * out_stride_head, own)
        a, b = _load_pairs(own, head < heads, BLOCK_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
        _store_turned(into, head < heads, a, b, cos, sin, round_to, BLOCK_HEADS, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        head = (part - head_parts) * BLOCK_HEADS + lane
        own = index_ptr + token * index_stride_token + head * index_stride_head
        real = head < index_heads
        a, b = _load_pairs(own, real, BLOCK_HEADS, HALF, BLOCK_HALF, INDEX_INTERLEAVED)
        _store_turned(own, real, a, b, cos, sin, round_to, BLOCK_HEADS, HALF, BLOCK_HALF, INDEX_INTERLEAVED)


def turn_queries_triton(call: TurnQueries) -> None:
    """One launch."""
    tokens, heads, _ = call.q.shape
    index_q = call.q[:, :0] if call.index_q is None else call.index_q
    index_heads, half = index_q.shape[1], call.cos.shape[1]
    if tokens == 0:
        return
    # Few tokens: small programs, since all of them run at once anyway. Many: fewer programs to start.
    few = tokens * (heads + index_heads) < 4096
    block_heads = min(4 if few else 16, triton.next_power_of_2(max(heads, index_heads)))
    head_parts = triton.cdiv(heads, block_heads)
    turn_queries_kernel[(tokens, head_parts + triton.cdiv(index_heads, block_heads))](
        call.q,
        call.out,
        index_q,
        call.cos,
        call.sin,
        call.q.stride(0),
        call.q.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        index_q.stride(0),
        index_q.stride(1),
        len(call.out),
        heads,
        index_heads,
        head_parts,
        HALF=half,
        INTERLEAVED=call.interleaved,
        INDEX_INTERLEAVED=call.index_interleaved,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=2 if few else 4,
        **dependent_launch(call.q.device),
    )
