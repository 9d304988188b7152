"""Sharding: what all ranks hold, put together again, is the whole tensor."""

from __future__ import annotations

import pytest
import torch

from hookline.errors import ContainerError, UsageError
from hookline.parallel import (
    Parallel,
    check_tp,
    local_experts,
    local_heads,
    local_range,
    local_vocab,
    padded_vocab,
    shard_attn_out,
    shard_experts,
    shard_mlp_1,
    shard_mlp_2,
    shard_qkv,
    shard_unembed,
    why_not_tp,
)

RANKS = pytest.mark.parametrize("ranks", range(1, 9))
HEADS = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        pytest.param(8, 8, 4, id="one key-value head a query head"),
        pytest.param(13, 13, 4, id="uneven"),
        pytest.param(32, 8, 2, id="grouped"),
        pytest.param(28, 4, 2, id="grouped, seven a group"),
        pytest.param(12, 6, 3, id="uneven groups"),
        pytest.param(8, 1, 5, id="one key-value head"),
        pytest.param(9, 3, 64, id="SmolLM2"),
    ],
)
M = 6


def tensor(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def group(ranks: int) -> list[Parallel]:
    return [Parallel(tp_rank=rank, tp_size=ranks) for rank in range(ranks)]


@RANKS
@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 50257])
def test_ranges_cover_all_once_and_differ_by_one_at_most(ranks: int, size: int) -> None:
    parts = [local_range(size, rank, ranks) for rank in range(ranks)]
    assert [item for part in parts for item in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@RANKS
@HEADS
def test_heads_are_shared_out(ranks: int, heads: int, kv_heads: int, head_dim: int) -> None:
    parts = [local_heads(heads, kv_heads, rank) for rank in group(ranks)]
    assert [part.first_head for part in parts[1:]] == [part.first_head + part.num_heads for part in parts[:-1]]
    assert sum(part.num_heads for part in parts) == heads
    for part in parts:
        assert part.num_heads % part.num_kv_heads == 0
        local_ratio = part.num_heads // part.num_kv_heads
        for head in range(part.num_heads):
            kv_head = part.first_kv_head + head // local_ratio
            assert kv_head == (part.first_head + head) // (heads // kv_heads), (
                "each query head has its own key and value"
            )
    if kv_heads >= ranks:
        assert sum(part.num_kv_heads for part in parts) == kv_heads, "nothing is held twice without need"


@RANKS
@HEADS
@pytest.mark.parametrize("width", [(M,), ()], ids=["weight", "bias"])
def test_qkv(ranks: int, heads: int, kv_heads: int, head_dim: int, width: tuple[int, ...]) -> None:
    """`head_dim` has nothing to do with M here; upstream demands M = heads * head_dim."""
    whole = tensor((heads + 2 * kv_heads) * head_dim, *width)
    rebuilt = torch.full_like(whole, -1)
    by_head = rebuilt.view(heads + 2 * kv_heads, head_dim, *width)
    for rank in group(ranks):
        local = local_heads(heads, kv_heads, rank)
        part = shard_qkv(whole, heads, kv_heads, head_dim, rank)
        q, k, v = part.view(-1, head_dim, *width).split([local.num_heads, local.num_kv_heads, local.num_kv_heads])  # type: ignore[no-untyped-call]
        by_head[local.first_head :][: local.num_heads] = q
        by_head[heads + local.first_kv_head :][: local.num_kv_heads] = k
        by_head[heads + kv_heads + local.first_kv_head :][: local.num_kv_heads] = v
    assert torch.equal(rebuilt, whole)


@RANKS
@HEADS
def test_attention_output(ranks: int, heads: int, kv_heads: int, head_dim: int) -> None:
    whole = tensor(M, heads * head_dim)
    parts = [shard_attn_out(whole, heads, kv_heads, head_dim, rank) for rank in group(ranks)]
    assert torch.equal(torch.cat([part for part in parts if part is not None], dim=1), whole)
    for rank, part in zip(group(ranks), parts, strict=True):
        assert part is not None and part.is_contiguous()
        assert part.shape[1] == local_heads(heads, kv_heads, rank).num_heads * head_dim


@RANKS
@HEADS
def test_attention_is_the_sum_over_ranks(ranks: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """A linear stand-in for attention: each query head's output is the product of its q, k and v."""
    torch.manual_seed(ranks)
    qkv = torch.rand((heads + 2 * kv_heads) * head_dim, M, dtype=torch.float64)
    out, x = torch.rand(M, heads * head_dim, dtype=torch.float64), torch.rand(M, dtype=torch.float64)

    def attention(qkv: torch.Tensor, out: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
        q, k, v = (qkv @ x).view(-1, head_dim).split([heads, kv_heads, kv_heads])  # type: ignore[no-untyped-call]
        ratio = heads // kv_heads
        mixed: torch.Tensor = out @ (q * k.repeat_interleave(ratio, 0) * v.repeat_interleave(ratio, 0)).flatten()
        return mixed

    total = torch.zeros(M, dtype=torch.float64)
    for rank in group(ranks):
        local = local_heads(heads, kv_heads, rank)
        columns = shard_attn_out(out, heads, kv_heads, head_dim, rank)
        assert columns is not None
        rows = shard_qkv(qkv, heads, kv_heads, head_dim, rank)
        total += attention(rows, columns, local.num_heads, local.num_kv_heads)
    torch.testing.assert_close(total, attention(qkv, out, heads, kv_heads))


@RANKS
@pytest.mark.parametrize("width", [16, 100, 11])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("columns", [(M,), ()], ids=["weight", "bias"])
def test_mlp_1(ranks: int, width: int, experts: bool, columns: tuple[int, ...]) -> None:
    """Upstream widths that are no multiple of 32 fail, even on one rank."""
    front, dim = ((3,), 1) if experts else ((), 0)
    whole = tensor(*front, width, *columns)
    parts = [shard_mlp_1(whole, rank, gated=False, experts=experts) for rank in group(ranks)]
    assert torch.equal(torch.cat(parts, dim), whole)
    whole = tensor(*front, 2 * width, *columns)
    gated = [shard_mlp_1(whole, rank, gated=True, experts=experts).chunk(2, dim) for rank in group(ranks)]
    gates, ups = [gate for gate, _ in gated], [up for _, up in gated]
    assert torch.equal(torch.cat([*gates, *ups], dim), whole)
    assert all(gate.shape == up.shape and gate.shape[dim] > 0 for gate, up in gated)


@RANKS
@pytest.mark.parametrize("width", [16, 100, 11])
@pytest.mark.parametrize("front", [(), (3,)], ids=["dense", "experts"])
def test_mlp_2(ranks: int, width: int, front: tuple[int, ...]) -> None:
    whole = tensor(*front, M, width)
    parts = [shard_mlp_2(whole, rank, experts=bool(front)) for rank in group(ranks)]
    assert torch.equal(torch.cat([part for part in parts if part is not None], dim=-1), whole)
    assert all(part is not None and part.is_contiguous() for part in parts)


@pytest.mark.parametrize("front", [(), (3,)], ids=["dense", "experts"])
def test_biases_that_are_added_once_are_on_the_first_rank(front: tuple[int, ...]) -> None:
    bias = tensor(*front, M)
    first, *others = [shard_mlp_2(bias, rank, experts=bool(front)) for rank in group(4)]
    assert first is bias and others == [None] * 3
    if not front:
        first, *others = [shard_attn_out(bias, 8, 8, 4, rank) for rank in group(4)]
        assert first is bias and others == [None] * 3


@RANKS
@pytest.mark.parametrize("vocab", [64, 50257 % 1000, 9, 5])
@pytest.mark.parametrize("width", [(M,), ()], ids=["weight", "bias"])
def test_vocabulary_is_padded_at_the_end(ranks: int, vocab: int, width: tuple[int, ...]) -> None:
    """Upstream a vocabulary that does not divide breaks when logits are gathered."""
    whole = tensor(vocab, *width) + 1
    parts = [shard_unembed(whole, rank) for rank in group(ranks)]
    assert len({part.shape for part in parts}) == 1, "all ranks' logits have one width"
    rebuilt = torch.cat(parts)
    assert len(rebuilt) == padded_vocab(vocab, group(ranks)[0])
    assert torch.equal(rebuilt[:vocab], whole) and not rebuilt[vocab:].any()
    rows = [local_vocab(vocab, rank) for rank in group(ranks)]
    assert [row for part in rows for row in part] == list(range(vocab))


@RANKS
def test_experts(ranks: int) -> None:
    whole = tensor(10, 2, 3)
    places = [Parallel(ep_rank=rank, ep_size=ranks) for rank in range(ranks)]
    parts = [shard_experts(whole, place) for place in places]
    assert torch.equal(torch.cat(parts), whole)
    assert [len(part) for part in parts] == [len(local_experts(10, place)) for place in places]


def test_one_rank_gets_the_tensor_itself() -> None:
    alone = Parallel()
    qkv, out, mlp = tensor(12 * 4, M), tensor(M, 8 * 4), tensor(14, M)
    assert shard_qkv(qkv, 8, 2, 4, alone) is qkv
    assert shard_attn_out(out, 8, 2, 4, alone) is out
    assert shard_mlp_1(mlp, alone, gated=True) is mlp and shard_mlp_1(mlp, alone, gated=False) is mlp
    assert shard_mlp_2(mlp, alone) is mlp and shard_unembed(mlp, alone) is mlp and shard_experts(mlp, alone) is mlp


def test_parts_do_not_keep_the_whole_alive() -> None:
    second = Parallel(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2)
    parts = [
        shard_qkv(tensor(12 * 4, M), 8, 2, 4, second),
        shard_attn_out(tensor(M, 32), 8, 2, 4, second),
        shard_mlp_1(tensor(14, M), second, gated=False),
        shard_mlp_1(tensor(14, M), second, gated=True),
        shard_mlp_2(tensor(M, 14), second),
        shard_unembed(tensor(14, M), second),
        shard_experts(tensor(14, M), second),
    ]
    for part in parts:
        assert part is not None
        assert part.untyped_storage().nbytes() == part.nbytes


def test_shapes_that_the_config_does_not_have_are_refused() -> None:
    for place in (Parallel(), Parallel(tp_size=2)):
        with pytest.raises(ContainerError, match="found 40, expected 48"):
            shard_qkv(tensor(40, M), 8, 2, 4, place)
        with pytest.raises(ContainerError, match="found 30, expected 32"):
            shard_attn_out(tensor(M, 30), 8, 2, 4, place)
        with pytest.raises(ContainerError, match="7 rows of a gated MLP"):
            shard_mlp_1(tensor(7, M), place, gated=True)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "reason"),
    [
        (5, 4, 4, "num_heads is 4, less than one a rank"),
        (2, 7, 2, "7 query heads do not fall into 2 equal groups"),
        (1, 0, 1, "sizes must be positive"),
    ],
)
def test_impossible_heads_are_explained(ranks: int, heads: int, kv_heads: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        local_heads(heads, kv_heads, Parallel(tp_size=ranks))
    assert reason in why_not_tp(ranks, num_heads=heads, num_kv_heads=kv_heads)[0]


def test_check_explains_and_proposes() -> None:
    check_tp(8, num_heads=28, num_kv_heads=4, widths={"intermediate_size": 100})
    with pytest.raises(UsageError) as caught:
        check_tp(12, num_heads=9, num_kv_heads=3, widths={"intermediate_size": 5})
    assert "num_heads is 9" in caught.value.message and "intermediate_size is 5, less than" in caught.value.message
    assert caught.value.hint == "Possible sizes: 1, 2, 3, 4, 5."
    with pytest.raises(UsageError, match="No size is possible"):
        check_tp(1, num_heads=7, num_kv_heads=2)


@pytest.mark.parametrize("place", [{"tp_rank": 2, "tp_size": 2}, {"ep_rank": -1}, {"tp_size": 0}])
def test_places_that_do_not_exist(place: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="Ranks count from 0"):
        Parallel(**place)
