"""The pool's ledger, reuse of prefixes, order of eviction, and refusal of every misuse."""

from __future__ import annotations

from hashlib import sha256

import pytest

from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockLedgerError, BlockPool, RequestBlocks
from hookline.scheduling.request import Request

SIZE = 4


def owner(pool: BlockPool, prompt: list[int], salt: bytes = b"") -> RequestBlocks:
    return RequestBlocks(pool, Request("r", prompt, SamplingParams(), 100, cache_salt=salt))


def fill(pool: BlockPool, prompt: list[int], salt: bytes = b"") -> RequestBlocks:
    """An owner whose prompt is computed."""
    blocks = owner(pool, prompt, salt)
    blocks.take_prefix(blocks.match_prefix())
    assert blocks.extend(pool.blocks_for(len(prompt)) - len(blocks.request.block_table))
    blocks.register(len(prompt))
    pool.check()
    return blocks


def ledger(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, SIZE)
    first = pool.allocate(2)
    assert first is not None and len(set(first)) == 2
    assert pool.allocate(2) is None and ledger(pool) == (1, 0, 2)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is not None and pool.allocate(1) is None
    pool.release(first)
    assert ledger(pool) == (2, 0, 1)
    pool.check()


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_are_checked(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(blocks, size)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 0], r"blocks \[0\] twice"),
        ([0, 9], r"blocks \[9\]: ids go from 0 to 3"),
        ([0, -1], r"\[-1\]"),
        ([0, 3], r"\[3\]"),
    ],
)
def test_wrong_release_names_the_blocks_and_changes_nothing(ids: list[int], message: str) -> None:
    pool = BlockPool(4, SIZE)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(BlockLedgerError, match=message):
        pool.release(ids)
    assert ledger(pool) == (2, 0, 2)
    pool.check()


def test_double_release() -> None:
    pool = BlockPool(4, SIZE)
    ids = pool.allocate(2)
    assert ids is not None
    pool.release(ids)
    with pytest.raises(BlockLedgerError, match=r"blocks \[0, 1\] cannot be released"):
        pool.release(ids)
    assert ledger(pool) == (4, 0, 0)


def test_only_full_blocks_with_a_key_are_shared_or_registered() -> None:
    pool = BlockPool(4, SIZE)
    assert pool.allocate(1) == [0]
    with pytest.raises(BlockLedgerError, match=r"blocks \[0\] cannot be shared"):
        pool.share([0])
    pool.register(0, b"key")
    for block_id in (0, 1, 4, -1):
        with pytest.raises(BlockLedgerError, match=f"block {block_id} cannot get a key"):
            pool.register(block_id, b"other")
    with pytest.raises(BlockLedgerError, match="twice"):
        pool.share([0, 0])
    pool.share([0])
    assert pool.references(0) == 2
    pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(4, SIZE)
    pool._free.pop()
    with pytest.raises(BlockLedgerError, match=r"3 free \+ 0 cached \+ 0 referenced, 4 in total: .*\[0\]"):
        pool.check()
    pool._free.extend([3, 3])
    with pytest.raises(BlockLedgerError, match="5 free"):
        pool.check()


def test_a_key_stands_for_salt_and_all_tokens() -> None:
    pool = BlockPool(8, 2)
    blocks = fill(pool, [1, 2, 3, 4], b"salt")
    first = sha256(sha256(b"salt").digest() + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")).digest()
    second = sha256(first + (3).to_bytes(8, "little") + (4).to_bytes(8, "little")).digest()
    assert [pool.lookup(first), pool.lookup(second)] == blocks.request.block_table
    assert owner(pool, [1, 2, 3, 4, 5], b"salt").match_prefix() == blocks.request.block_table
    assert owner(pool, [1, 2, 3, 4, 5], b"").match_prefix() == []
    assert owner(pool, [3, 4, 5], b"salt").match_prefix() == []
    assert owner(pool, [1, 2, 9, 4, 5], b"salt").match_prefix() == blocks.request.block_table[:1]


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (20, 2)])
def test_a_prefix_never_covers_the_whole_prompt(length: int, hit: int) -> None:
    pool = BlockPool(16, SIZE)
    prompt = list(range(20))
    fill(pool, prompt[:11]).release()
    assert len(owner(pool, prompt[:length]).match_prefix()) == hit


def test_output_tokens_are_part_of_the_content() -> None:
    pool = BlockPool(8, SIZE)
    blocks = owner(pool, [1, 2, 3])
    blocks.request.output_token_ids.extend([4, 5, 6, 7, 8])
    blocks.take_prefix([])
    blocks.extend(2)
    blocks.register(7)
    assert [pool.is_reusable(i) for i in blocks.request.block_table] == [True, False]
    blocks.register(8)
    assert owner(pool, list(range(1, 10))).match_prefix() == blocks.request.block_table


def test_no_reuse_without_prefix_caching() -> None:
    pool = BlockPool(4, SIZE, prefix_caching=False)
    fill(pool, list(range(8))).release()
    assert owner(pool, list(range(8))).match_prefix() == []
    assert ledger(pool) == (4, 0, 0)


def test_free_blocks_go_first_then_the_tail_of_the_oldest() -> None:
    pool = BlockPool(6, SIZE)
    old, new = fill(pool, list(range(8))), fill(pool, list(range(100, 108)))
    old_table, new_table = list(old.request.block_table), list(new.request.block_table)
    old.release()
    new.release()
    assert ledger(pool) == (2, 4, 0)
    assert pool.allocate(2) == [4, 5] and pool.counters.evicted_blocks == 0
    assert pool.allocate(4) == [*reversed(old_table), *reversed(new_table)]
    assert pool.counters.evicted_blocks == 4
    pool.check()


def test_use_makes_young() -> None:
    pool = BlockPool(4, SIZE)
    first, second = fill(pool, list(range(8))), fill(pool, list(range(100, 108)))
    used, unused = first.request.block_table[0], list(second.request.block_table)
    first.release()
    second.release()
    again = owner(pool, list(range(8)))
    again.take_prefix(again.match_prefix())
    again.release()
    assert pool.allocate(3) is not None
    assert pool.is_reusable(used) and not any(pool.is_reusable(block_id) for block_id in unused)


def test_equal_content_computed_twice_has_one_key_and_two_blocks() -> None:
    pool = BlockPool(8, SIZE)
    prompt = list(range(9))
    first, second = owner(pool, prompt), owner(pool, prompt)
    for blocks in (first, second):
        blocks.take_prefix(blocks.match_prefix())
        blocks.extend(3)
    first.register(9)
    second.register(9)
    pool.check()
    assert not set(first.request.block_table) & set(second.request.block_table)
    assert owner(pool, prompt).match_prefix() == first.request.block_table[:2]
    second.release()
    assert ledger(pool) == (5, 0, 3)
    first.release()
    assert ledger(pool) == (6, 2, 0)
    pool.check()


def test_release_is_idempotent_and_shared_blocks_stay() -> None:
    pool = BlockPool(8, SIZE)
    first = fill(pool, list(range(9)))
    second = fill(pool, list(range(9)))
    assert second.request.block_table[:2] == first.request.block_table[:2]
    first.release()
    first.release()
    assert first.request.block_table == [] and ledger(pool) == (5, 0, 3)
    assert [pool.references(i) for i in second.request.block_table] == [1, 1, 1]
    with pytest.raises(BlockLedgerError, match="it holds"):
        second.take_prefix([])
    assert (pool.counters.queried_tokens, pool.counters.hit_tokens) == (18, 8)
