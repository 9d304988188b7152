"""Where a rank stands, and how tensors are cut for it. Shape letters: see docs/containers.md.

Everything here is a pure function of shapes and tensors; nothing communicates. Widths need not divide evenly: the
first ranks get one more. One rank gets the tensor itself; of several, each gets a copy of its part, so that the whole
can be freed. Tensors are in the canonical layouts: QKV rows all-Q, all-K, all-V; gate rows before up rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hookline.errors import ContainerError, UsageError


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank's place: ranks of a TP group hold parts of every layer, ranks of an EP group hold whole experts."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for rank, size, name in ((self.tp_rank, self.tp_size, "tp"), (self.ep_rank, self.ep_size, "ep")):
            if not 0 <= rank < size:
                raise UsageError(f"{name}_rank is {rank} of {size} ranks", hint="Ranks count from 0 to size - 1.")


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """The heads that one rank computes; every key-value head serves `num_heads / num_kv_heads` of its query heads."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int


def local_range(size: int, rank: int, ranks: int) -> range:
    """The part of `size` things that `rank` holds; where they do not divide evenly, the first ranks hold one more."""
    small, larger = divmod(size, ranks)
    first = rank * small + min(rank, larger)
    return range(first, first + small + (rank < larger))


def local_heads(num_heads: int, num_kv_heads: int, parallel: Parallel) -> LocalHeads:
    """The heads of a rank.

    With at least as many key-value heads as ranks, a rank takes whole groups: key-value heads and all query heads that
    they serve. With fewer, several ranks hold a copy of one key-value head and share its query heads.

    Raises:
        UsageError: there are fewer query heads than ranks, or they do not fall into equal groups.
    """
    rank, ranks = parallel.tp_rank, parallel.tp_size
    reasons = _head_reasons(ranks, num_heads, num_kv_heads)
    if reasons:
        raise UsageError(f"TP size {ranks} is not possible: {'; '.join(reasons)}")
    ratio = num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        groups = local_range(num_kv_heads, rank, ranks)
        return LocalHeads(groups.start * ratio, len(groups) * ratio, groups.start, len(groups))
    for kv_head in range(num_kv_heads):
        sharers = local_range(ranks, kv_head, num_kv_heads)
        if rank in sharers:
            queries = local_range(ratio, rank - sharers.start, len(sharers))
            return LocalHeads(kv_head * ratio + queries.start, len(queries), kv_head, 1)
    raise AssertionError("every rank shares some key-value head")


def local_vocab(vocab_size: int, parallel: Parallel) -> range:
    """The vocabulary rows of a rank, of which all but the last ranks hold `padded_vocab / tp_size`."""
    width = padded_vocab(vocab_size, parallel) // parallel.tp_size
    first = min(parallel.tp_rank * width, vocab_size)
    return range(first, min(first + width, vocab_size))


def padded_vocab(vocab_size: int, parallel: Parallel) -> int:
    """V rounded up so that every rank's logits have one width; what lies past V, at the very end, is padding."""
    return -(-vocab_size // parallel.tp_size) * parallel.tp_size


def local_experts(num_experts: int, parallel: Parallel) -> range:
    """The experts that a rank of the EP group holds."""
    return local_range(num_experts, parallel.ep_rank, parallel.ep_size)


def shard_qkv(
    param: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, parallel: Parallel
) -> torch.Tensor:
    """[(H + 2K) * D, M] or its bias [(H + 2K) * D]: the rows of this rank's heads, again all-Q, all-K, all-V."""
    _expect(param.shape[0], (num_heads + 2 * num_kv_heads) * head_dim, "QKV rows, (H + 2K) * D")
    if parallel.tp_size == 1:
        return param
    heads = local_heads(num_heads, num_kv_heads, parallel)
    # First rows of this rank's Q, K and V, counted in heads.
    starts = (
        heads.first_head,
        num_heads + heads.first_kv_head,
        num_heads + num_kv_heads + heads.first_kv_head,
    )
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    return torch.cat(
        [param.narrow(0, start * head_dim, count * head_dim) for start, count in zip(starts, counts, strict=True)]
    )


def shard_attn_out(
    param: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, parallel: Parallel
) -> torch.Tensor | None:
    """[M, H * D]: the columns of this rank's query heads. A bias [M] is whole on rank 0 and None elsewhere."""
    if param.dim() == 1:
        return _on_first_rank(param, parallel)
    _expect(param.shape[-1], num_heads * head_dim, "attention output columns, H * D")
    if parallel.tp_size == 1:
        return param
    heads = local_heads(num_heads, num_kv_heads, parallel)
    return _part(param, -1, range(heads.first_head * head_dim, (heads.first_head + heads.num_heads) * head_dim))


def shard_mlp_1(param: torch.Tensor, parallel: Parallel, *, gated: bool, experts: bool = False) -> torch.Tensor:
    """[F, M], or gated [2F, M], or the bias: this rank's rows, of gate and up alike. `experts`: with E in front."""
    dim = 1 if experts else 0
    rows = param.shape[dim]
    if gated and rows % 2:
        raise ContainerError(f"{rows} rows of a gated MLP cannot be halved into gate and up")
    if parallel.tp_size == 1:
        return param
    halves = param.chunk(2, dim) if gated else (param,)
    part = local_range(halves[0].shape[dim], parallel.tp_rank, parallel.tp_size)
    return torch.cat([half.narrow(dim, part.start, len(part)) for half in halves], dim)


def shard_mlp_2(param: torch.Tensor, parallel: Parallel, *, experts: bool = False) -> torch.Tensor | None:
    """[M, F]: this rank's columns. A bias [M] is whole on rank 0 and None elsewhere. `experts`: with E in front."""
    if param.dim() == (2 if experts else 1):
        return _on_first_rank(param, parallel)
    if parallel.tp_size == 1:
        return param
    return _part(param, -1, local_range(param.shape[-1], parallel.tp_rank, parallel.tp_size))


def shard_unembed(param: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """[V, M] or a bias [V]: this rank's rows, filled up with zeros to `padded_vocab / tp_size`."""
    if parallel.tp_size == 1:
        return param
    rows = local_vocab(param.shape[0], parallel)
    part = param.new_zeros(padded_vocab(param.shape[0], parallel) // parallel.tp_size, *param.shape[1:])
    part[: len(rows)] = param[rows.start : rows.stop]
    return part


def shard_experts(param: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """[E, ...]: this rank's experts."""
    return param if parallel.ep_size == 1 else _part(param, 0, local_experts(param.shape[0], parallel))


def why_not_tp(tp_size: int, *, num_heads: int, num_kv_heads: int, widths: dict[str, int] | None = None) -> list[str]:
    """Every reason why a model cannot be split over `tp_size` ranks; empty where it can.

    Args:
        widths: by name what is split into columns or rows, such as `intermediate_size`; each rank needs at least one.
    """
    narrow = [f"{name} is {width}, less than one a rank" for name, width in (widths or {}).items() if width < tp_size]
    return _head_reasons(tp_size, num_heads, num_kv_heads) + narrow


def check_tp(tp_size: int, *, num_heads: int, num_kv_heads: int, widths: dict[str, int] | None = None) -> None:
    """Refuse an impossible TP size; arguments as for `why_not_tp`.

    Raises:
        UsageError: with every reason, and the sizes that are possible.
    """
    shapes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    reasons = why_not_tp(tp_size, **shapes, widths=widths)
    if reasons:
        sizes = [str(size) for size in range(1, max(16, tp_size)) if not why_not_tp(size, **shapes, widths=widths)]
        raise UsageError(
            f"TP size {tp_size} is not possible: {'; '.join(reasons)}",
            hint=f"Possible sizes: {', '.join(sizes)}." if sizes else "No size is possible: the config is unsound.",
        )


def _head_reasons(ranks: int, num_heads: int, num_kv_heads: int) -> list[str]:
    if ranks < 1 or num_heads < 1 or num_kv_heads < 1:
        return [f"sizes must be positive, not {ranks} ranks, {num_heads} heads, {num_kv_heads} key-value heads"]
    reasons = []
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not fall into {num_kv_heads} equal groups")
    if num_heads < ranks:
        reasons.append(f"num_heads is {num_heads}, less than one a rank")
    return reasons


def _expect(found: int, expected: int, what: str) -> None:
    if found != expected:
        raise ContainerError(
            f"{what}: found {found}, expected {expected}", hint="The checkpoint's shapes and its config disagree."
        )


def _on_first_rank(param: torch.Tensor, parallel: Parallel) -> torch.Tensor | None:
    return param if parallel.tp_rank == 0 else None


def _part(param: torch.Tensor, dim: int, part: range) -> torch.Tensor:
    """A copy of a part, so that the whole can be freed."""
    return param.narrow(dim, part.start, len(part)).clone(memory_format=torch.contiguous_format)
