"""Cache blocks: which are free, who holds the others, and which hold a prefix that can be used again.

A block is in exactly one of three states, and the pool's ledger is `free + cached + referenced == total`:

- free: holds nothing of use;
- cached: full, known by the key of its content, held by no request; given out, oldest first, when no block is free;
- referenced: held by one request, or by several if it is full and known by its key.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from hookline.scheduling.request import FinishReason, Request


class BlockLedgerError(RuntimeError):
    """Blocks were used in a way that would give one to two owners or lose it: a fault of the engine, not of a user."""


@dataclass(slots=True)
class PoolCounters:
    """What prefix reuse did since the pool was made; each only grows.

    Attributes:
        queried_tokens: tokens of requests that were looked up when they got their first blocks.
        hit_tokens: of those, tokens found in the cache.
        evicted_blocks: cached blocks that were given up for new content.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


class BlockPool:
    """Block ids 0 to `num_blocks - 1`. Every operation is O(1) a block and takes effect in full or not at all.

    Args:
        num_blocks: how many blocks each cache group has; groups share the ids.
        block_size: tokens a block.
        prefix_caching: keep full blocks for reuse after their request let them go.
    """

    __slots__ = ("_by_key", "_cached", "_free", "_keys", "_references", "block_size", "counters", "num_blocks",
                 "prefix_caching")  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.counters = PoolCounters()
        self._free = list(reversed(range(num_blocks)))  # last released, first given: its memory is still at hand
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks kept for reuse that no request holds."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[block_id]

    def is_reusable(self, block_id: int) -> bool:
        """Whether the block is full and known by the key of its content."""
        return self._keys[block_id] is not None

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, and nothing changed, when fewer are available."""
        free, references = self._free, self._references
        if count > len(free) + len(self._cached):
            return None
        ids = []
        for _ in range(count):
            block_id = free.pop() if free else self._evict()
            references[block_id] = 1
            ids.append(block_id)
        return ids

    def lookup(self, key: bytes) -> int | None:
        """The block whose content has this key."""
        return self._by_key.get(key)

    def share(self, ids: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which `lookup` found.

        Raises:
            BlockLedgerError: if one of them is no reusable block, or stands twice.
        """
        self._check_ids(ids, "share")
        if bad := [block_id for block_id in ids if self._keys[block_id] is None]:
            raise BlockLedgerError(f"blocks {bad} cannot be shared: they are not full blocks with a key")
        for block_id in ids:
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Drop one reference of each block; the last of `ids` becomes the first to be evicted.

        Raises:
            BlockLedgerError: if one is foreign, is held by no request, or stands twice; then nothing was released.
        """
        self._check_ids(ids, "release")
        if bad := [block_id for block_id in ids if self._references[block_id] == 0]:
            raise BlockLedgerError(f"blocks {bad} cannot be released: no request holds them")
        for block_id in reversed(ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if self._keys[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, key: bytes) -> None:
        """Make a full block reusable under `key`. If another block has that content already, this one stays private.

        Raises:
            BlockLedgerError: if no request holds the block, or it has another key.
        """
        if not 0 <= block_id < self.num_blocks or self._references[block_id] == 0 or self._keys[block_id] is not None:
            raise BlockLedgerError(f"block {block_id} cannot get a key: it is not held, or has one")
        if key not in self._by_key:
            self._by_key[key] = block_id
            self._keys[block_id] = key

    def forget(self, ids: Sequence[int]) -> None:
        """Makes those of these blocks private again that one request alone holds: nobody is to trust their content."""
        for block_id in ids:
            key = self._keys[block_id]
            if key is not None and self._references[block_id] == 1:
                del self._by_key[key]
                self._keys[block_id] = None

    def check(self) -> None:
        """Recount everything.

        Raises:
            BlockLedgerError: with the ledger, if a block is lost, in two states, or wrongly known by a key.
        """
        referenced = [block_id for block_id, count in enumerate(self._references) if count > 0]
        states = Counter([*self._free, *self._cached, *referenced])
        keys = {block_id: key for block_id, key in enumerate(self._keys) if key is not None}
        faults = [
            f"blocks in no or several states: {[i for i in range(self.num_blocks) if states[i] != 1]}"
            if len(states) != self.num_blocks or states.total() != self.num_blocks
            else "",
            f"free blocks with a key: {[i for i in self._free if i in keys]}" if keys.keys() & self._free else "",
            f"cached blocks without: {[i for i in self._cached if i not in keys]}"
            if self._cached.keys() - keys
            else "",
            "keys and blocks differ" if {key: i for i, key in keys.items()} != self._by_key else "",
            "negative references" if min(self._references) < 0 else "",
        ]
        if any(faults):
            raise BlockLedgerError(
                f"{len(self._free)} free + {len(self._cached)} cached + {len(referenced)} referenced, "
                f"{self.num_blocks} in total: " + "; ".join(fault for fault in faults if fault)
            )

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        key = self._keys[block_id]
        if key is not None:
            del self._by_key[key]
            self._keys[block_id] = None
        self.counters.evicted_blocks += 1
        return block_id

    def _check_ids(self, ids: Sequence[int], verb: str) -> None:
        if bad := [block_id for block_id in ids if not 0 <= block_id < self.num_blocks]:
            raise BlockLedgerError(f"cannot {verb} blocks {bad}: ids go from 0 to {self.num_blocks - 1}")
        if len(set(ids)) != len(ids):
            twice = [block_id for block_id, count in Counter(ids).items() if count > 1]
            raise BlockLedgerError(f"cannot {verb} blocks {twice} twice")


class RequestBlocks:
    """The one owner of a request's blocks: what it took is let go by `release`, once, on every way out.

    A full block's key is SHA-256 over the key of the block before it (for the first, over the salt) and its token ids
    as 8 little-endian bytes each; so a key stands for all tokens from the first. Keys outlive `release`: a preempted
    request finds its blocks again without hashing.
    """

    __slots__ = ("_keys", "_pack", "_pool", "_registered", "_root", "request")

    def __init__(self, pool: BlockPool, request: Request) -> None:
        self.request = request
        self._pool = pool
        self._pack = struct.Struct(f"<{pool.block_size}q").pack
        self._root = sha256(request.cache_salt).digest()
        self._keys: list[bytes] = []
        self._registered = 0

    def match_prefix(self) -> list[int]:
        """The longest run of full cached blocks from the first token on. Nothing is taken yet.

        It never covers all tokens: the last one has to run, or there would be no logits to choose the next from.
        """
        if not self._pool.prefix_caching:
            return []
        ids = []
        for index in range((self.request.num_tokens - 1) // self._pool.block_size):
            block_id = self._pool.lookup(self._key(index))
            if block_id is None:
                break
            ids.append(block_id)
        return ids

    def take_prefix(self, ids: list[int]) -> None:
        """Share the blocks that `match_prefix` found.

        Raises:
            BlockLedgerError: if the request holds blocks already.
        """
        table = self.request.block_table
        if table:
            raise BlockLedgerError(f"{self.request.request_id} cannot take blocks {ids}: it holds {table}")
        self._pool.share(ids)
        table.extend(ids)
        self._registered = len(ids)
        self._pool.counters.queried_tokens += self.request.num_tokens
        self._pool.counters.hit_tokens += len(ids) * self._pool.block_size

    def extend(self, count: int) -> bool:
        """Take `count` more blocks; false, and nothing changed, when the pool has fewer."""
        ids = self._pool.allocate(count)
        if ids is None:
            return False
        self.request.block_table.extend(ids)
        return True

    def give_back(self, count: int) -> None:
        """Let the last `count` blocks go, which `extend` took for a step that did not happen."""
        table = self.request.block_table
        if count:
            self._pool.release(table[-count:])
            del table[-count:]

    def register(self, computed_tokens: int) -> None:
        """Make the blocks reusable that computed tokens fill."""
        if not self._pool.prefix_caching:
            return
        full = computed_tokens // self._pool.block_size
        for index in range(self._registered, full):
            self._pool.register(self.request.block_table[index], self._key(index))
        self._registered = full

    def release(self) -> None:
        """Let all blocks go; a second call does nothing. What one that failed has left in them is not used again."""
        if self.request.finish_reason is FinishReason.ERROR:
            self._pool.forget(self.request.block_table)
        if self.request.block_table:
            self._pool.release(self.request.block_table)
            self.request.block_table.clear()

    def _key(self, index: int) -> bytes:
        keys, size = self._keys, self._pool.block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else self._root
            keys.append(sha256(parent + self._pack(*self.request.token_ids(start, start + size))).digest())
        return keys[index]


def check_owners(pool: BlockPool, owners: Sequence[RequestBlocks]) -> None:
    """Recount all blocks and their owners.

    Raises:
        BlockLedgerError: with the ledger, if a block is lost, or has owners that it must not have.
    """
    pool.check()
    held = Counter(block_id for owner in owners for block_id in owner.request.block_table)
    for block_id in range(pool.num_blocks):
        count = pool.references(block_id)
        if held[block_id] != count or (count > 1 and not pool.is_reusable(block_id)):
            names = [owner.request.request_id for owner in owners if block_id in owner.request.block_table]
            raise BlockLedgerError(f"block {block_id} has {count} references and stands in the tables of {names}")
