"""What latent attention reads, from the two products before it: this step's cache entries, and its queries.

    write_entries:  latents[t] = q, kv, key, and with an indexer index_key
                    q_latent[t] = rms_norm(q)
                    cache[slots[t]] = rms_norm(kv), turned key                          where the slot is not negative
                    index_cache[slots[t]] = layer_norm(index_key), its first R turned   likewise
    turn_queries:   out[t, h] = turned q[t, h]                                          of the first A tokens
                    q[t, h] = turned q[t, h]                                            of the others
                    index_q[t, i] = the same, its first R turned

What turned means, and which pairs are interleaved, `rotary` says. Norms and angles are fp32; each norm is rounded to
the type of the latents before it is turned or written, and what is turned once more.

Shapes: latents [T, Q + L + R (+ D)]; cos and sin [T, R/2] fp32; cache [blocks, S, L + R]; index_cache [blocks, S, D];
slots [T] int64; q [T, H, R], out [A, H, R] with A at most T, index_q [T, I, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from hookline_kernels.cache_write import cache_write
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose, on_cpu
from hookline_kernels.latent_inputs_triton import (
    IndexKeys,
    TurnQueries,
    WriteEntries,
    turn_queries_triton,
    write_entries_triton,
)
from hookline_kernels.rms_norm import rms_norm
from hookline_kernels.rotary import apply_rotary

__all__ = ["IndexKeys", "turn_queries", "write_entries"]


def write_entries_by_parts(call: WriteEntries, implementation: str | None) -> None:
    """The operations one after the other, each as `implementation` of its own table."""
    rotary = call.cos, call.sin
    index_size = 0 if call.index_keys is None else len(call.index_keys.weight)
    sizes = (len(call.q_norm), len(call.kv_norm), 2 * call.cos.shape[1], index_size)
    q, kv, key, index_key = call.latents.split_with_sizes(sizes, dim=1)
    call.q_latent.copy_(rms_norm(q, call.q_norm, call.eps, implementation=implementation))
    _turn(key.unsqueeze(1), *rotary, call.interleaved, implementation)
    entry = torch.cat((rms_norm(kv, call.kv_norm, call.eps, implementation=implementation), key), dim=1)
    cache_write((entry,), (call.cache,), call.slots, implementation=implementation)
    if call.index_keys is not None:
        weight, bias, cache, interleaved = call.index_keys
        index_key = F.layer_norm(index_key.float(), weight.shape, weight, bias, call.eps).to(index_key.dtype)
        _turn(index_key.unsqueeze(1), *rotary, interleaved, implementation)
        cache_write((index_key,), (cache,), call.slots, implementation=implementation)


def turn_queries_by_parts(call: TurnQueries, implementation: str | None) -> None:
    """The operations one after the other, each as `implementation` of its own table."""
    _turn(call.q, call.cos, call.sin, call.interleaved, implementation)
    call.out.copy_(call.q[: len(call.out)])
    if call.index_q is not None:
        _turn(call.index_q, call.cos, call.sin, call.index_interleaved, implementation)


def _turn(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, implementation: str | None
) -> None:
    """Turns [T, H, D] in place."""
    apply_rotary(heads, heads[:, :0], cos, sin, interleaved, implementation=implementation)


Query = tuple[torch.Tensor]

ENTRY_IMPLEMENTATIONS: tuple[Implementation[Query, Callable[[WriteEntries], None]], ...] = (
    Implementation("torch", on_cpu, partial(write_entries_by_parts, implementation=None)),
    Implementation("triton", by_triton, write_entries_triton),
    Implementation("reference", anywhere, partial(write_entries_by_parts, implementation="reference")),
)

QUERY_IMPLEMENTATIONS: tuple[Implementation[Query, Callable[[TurnQueries], None]], ...] = (
    Implementation("torch", on_cpu, partial(turn_queries_by_parts, implementation=None)),
    Implementation("triton", by_triton, turn_queries_triton),
    Implementation("reference", anywhere, partial(turn_queries_by_parts, implementation="reference")),
)


def write_entries(
    latents: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
    index: IndexKeys | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """The normed latents of queries, [T, Q]; writes the entries of all tokens, and their index keys.

    Args:
        latents: [T, Q + L + R], and D columns more with `index`; a token's columns lie together. Its keys may be
            turned or not afterwards: nobody should read them there.
        q_norm, kv_norm: contiguous [Q] and [L], weights of the norms.
        eps: of all norms, positive.
        cos, sin: [T, R/2] fp32, contiguous, of `rotary_cos_sin`.
        cache: contiguous [blocks, S, L + R]; entries are converted to its type.
        slots: contiguous [T] int64, no slot twice; negative ones are padding. On the CPU a slot past the cache raises,
            on a GPU it is not looked for.
        interleaved: whether a pair of the key is two neighbours instead of one element of each half.
        index: how index keys are made and where they go; None where there are none.
        implementation: `torch`, `triton` or `reference`; by default the first that supports latents.

    Raises:
        TypeError, ValueError: a type, shape or slot that does not fit.
    """
    _check_entries(latents, q_norm, kv_norm, eps, cos, sin, cache, slots)
    width = len(q_norm) + cache.shape[2]
    if index is not None:
        _check_index(index, cos)
        width += len(index.weight)
    if latents.shape[1] != width:
        raise ValueError(f"write_entries: latents of {width} columns expected, got {list(latents.shape)}")
    q_latent = latents.new_empty((len(latents), len(q_norm)))
    call = WriteEntries(latents, q_norm, kv_norm, eps, cos, sin, cache, slots, interleaved, index, q_latent)
    choose(ENTRY_IMPLEMENTATIONS, (latents,), implementation)(call)
    return q_latent


def turn_queries(
    q: torch.Tensor,
    out: torch.Tensor,
    index_q: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    index_interleaved: bool,
    *,
    implementation: str | None = None,
) -> None:
    """Turns the rotary part of all queries: of the first A tokens into `out`, of the others IN PLACE, as of `index_q`.

    Args:
        q: [T, H, R], a head's numbers contiguous; may be a strided view. What it holds of the first A tokens
            afterwards nobody should read.
        out: [A, H, R] of q's type, apart from it; may be a strided view, such as a part of wider queries.
        index_q: [T, I, D] of q's type, likewise, or None.
        cos, sin: [T, R/2] fp32, contiguous, of `rotary_cos_sin`.
        interleaved, index_interleaved: of q and of index_q, whether a pair is two neighbours instead of one element of
            each half.
        implementation: `torch`, `triton` or `reference`; by default the first that supports q.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    _check_rotary("turn_queries", cos, sin, len(q))
    if q.dim() != 3 or q.shape[2] != 2 * cos.shape[1] or out.dim() != 3 or out.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"turn_queries: q [T, H, R] and out [A, H, R] with R = {2 * cos.shape[1]} expected, "
            f"got {list(q.shape)} and {list(out.shape)}"
        )
    if len(out) > len(q):
        raise ValueError(f"turn_queries: out is for at most the {len(q)} tokens of q, got {len(out)}")
    if index_q is not None and (
        index_q.dim() != 3 or len(index_q) != len(q) or index_q.shape[2] < q.shape[2] or index_q.dtype != q.dtype
    ):
        raise ValueError(
            f"turn_queries: index_q {q.dtype} [T, I, D] with T = {len(q)} and D at least R = {q.shape[2]} expected, "
            f"got {index_q.dtype} {list(index_q.shape)}"
        )
    if out.dtype != q.dtype:
        raise TypeError(f"turn_queries: out must be {q.dtype} as q is, got {out.dtype}")
    if any(x.stride(2) != 1 for x in (q, out, q if index_q is None else index_q)):
        raise ValueError("turn_queries: the numbers of a head must lie together")
    call = TurnQueries(q, out, index_q, cos, sin, interleaved, index_interleaved)
    choose(QUERY_IMPLEMENTATIONS, (q,), implementation)(call)


def _check_entries(
    latents: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    _check_rotary("write_entries", cos, sin, len(latents))
    if latents.dim() != 2 or q_norm.dim() != 1 or kv_norm.dim() != 1:
        raise ValueError(
            f"write_entries: latents [T, Q + L + R (+ D)], q_norm [Q] and kv_norm [L] expected, "
            f"got {list(latents.shape)}, {list(q_norm.shape)} and {list(kv_norm.shape)}"
        )
    if cache.dim() != 3 or cache.shape[2] != len(kv_norm) + 2 * cos.shape[1]:
        raise ValueError(
            f"write_entries: a cache [blocks, S, L + R] with L + R = {len(kv_norm)} + {2 * cos.shape[1]} expected, "
            f"got {list(cache.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != latents.shape[:1]:
        raise TypeError(
            f"write_entries: slots must be int64 [T] = [{len(latents)}], got {slots.dtype} {list(slots.shape)}"
        )
    if not eps > 0.0:
        raise ValueError(f"write_entries: eps must be positive, got {eps}")
    if latents.stride(1) != 1 or not all(x.is_contiguous() for x in (q_norm, kv_norm, cache, slots)):
        raise ValueError("write_entries: the columns of a token, norms, cache and slots must be contiguous")


def _check_index(index: IndexKeys, cos: torch.Tensor) -> None:
    weight, bias, cache, _ = index
    if weight.dtype != torch.float32 or bias.dtype != torch.float32:
        raise TypeError(f"write_entries: index weight and bias must be float32, got {weight.dtype} and {bias.dtype}")
    if weight.dim() != 1 or bias.shape != weight.shape or cache.dim() != 3 or cache.shape[2:] != weight.shape:
        raise ValueError(
            f"write_entries: index weight and bias [D] and a cache [blocks, S, D] expected, "
            f"got {list(weight.shape)}, {list(bias.shape)} and {list(cache.shape)}"
        )
    if len(weight) < 2 * cos.shape[1]:
        raise ValueError(f"write_entries: index keys of {len(weight)} are smaller than R = {2 * cos.shape[1]}")
    if not all(x.is_contiguous() for x in (weight, bias, cache)):
        raise ValueError("write_entries: index weight, bias and cache must be contiguous")


def _check_rotary(name: str, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> None:
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"{name}: cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != tokens or not cos.shape[1]:
        raise ValueError(
            f"{name}: cos and sin [T, R/2] with T = {tokens} and R at least 2 expected, "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    if not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"{name}: cos and sin must be contiguous")
