"""Cases for the tests of latent attention and the indexer: rows of several requests over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A paged cache with the contexts of some requests, each request's last `counts` tokens being the rows of q.

    `padding` rows of q follow that belong to no request.
    """

    q: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    counts: list[int]
    contexts: list[int]
    owned: torch.Tensor
    padding: int

    @property
    def query_starts(self) -> torch.Tensor:
        return torch.tensor([0, *accumulate(self.counts)], dtype=torch.int32, device=self.q.device)

    @property
    def context_lens(self) -> torch.Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Each row's request and position; position -1 for padding."""
        rows = []
        for request, (count, context) in enumerate(zip(self.counts, self.contexts, strict=True)):
            rows += [(request, context - count + row if context else -1) for row in range(count)]
        return rows + [(0, -1)] * self.padding

    @property
    def lists(self) -> tuple[torch.Tensor, ...]:
        return self.cache, self.block_tables, self.query_starts, self.context_lens

    @property
    def bounds(self) -> dict[str, Any]:
        return {"max_query_len": max(self.counts, default=0), "max_context_len": max(self.contexts, default=0)}

    def entries(self, request: int, positions: list[int]) -> torch.Tensor:
        """[len(positions), width] in fp64."""
        block_size = self.cache.shape[1]
        table = self.block_tables[request].tolist()
        blocks = [table[position // block_size] for position in positions]
        places = [position % block_size for position in positions]
        return self.cache.cpu()[blocks, places].double()

    def with_garbage(self, value: float) -> LatentCase:
        """The same case with `value` in each cache entry that belongs to no context."""
        cache = self.cache.clone()
        cache.flatten(0, 1)[~self.owned] = value
        return replace(self, cache=cache)


def make_case(
    contexts: list[int],
    counts: list[int],
    *,
    heads: int = 4,
    width: int = 80,
    block_size: int = 16,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LatentCase:
    """Scattered blocks, NaN in what belongs to no context, no block of the cache past a request's own, q a view."""
    generator = torch.Generator().manual_seed(len(contexts) + width)
    needed = [-(-context // block_size) for context in contexts]
    blocks = 2 + sum(needed)
    order = torch.randperm(blocks, generator=generator).tolist()
    tables = torch.full((len(contexts), max([*needed, 1]) + 1), 1_000_000, dtype=torch.int32)
    owned = torch.zeros(blocks * block_size, dtype=torch.bool)
    for request, context in enumerate(contexts):
        own = torch.tensor([order.pop() for _ in range(needed[request])], dtype=torch.int32)
        tables[request, : len(own)] = own
        positions = torch.arange(context)
        owned[own[positions // block_size].long() * block_size + positions % block_size] = True
    cache = torch.randn(blocks, block_size, width, generator=generator)
    fused = torch.randn(sum(counts) + padding, heads * width + 24, generator=generator)
    case = LatentCase(
        q=fused.to(device, dtype)[:, : heads * width].unflatten(1, (heads, width)),
        cache=cache.to(device, cache_dtype or dtype),
        block_tables=tables.to(device),
        counts=counts,
        contexts=contexts,
        owned=owned.to(device),
        padding=padding,
    )
    return case.with_garbage(float("nan"))
