"""Models: the contract of a forward pass, its batch, and what a model asks of the cache.

Shape letters: T tokens in the batch, B requests, H query heads, K key-value heads, D head size, M model size,
F feed-forward size, V vocabulary, S block size, R rows whose logits are wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hookline.config import EngineConfig
    from hookline.container import ContainerMap, LayerContainer
    from hookline.parallel import Parallel

CacheTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every architecture's config has; an architecture derives its own from it.

    Attributes:
        architecture: as the checkpoint names it.
        num_layers, hidden_size, vocab_size: the usual; `vocab_size` is the width of the logits.
        max_position_embeddings: the longest context that the model was made for.
        dtype: the checkpoint's own number format, such as `bfloat16`.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Shapes of a decoder with grouped-query attention and an MLP."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache group: the same kind of cache entry for `num_layers` layers, addressed by the one block table.

    Attributes:
        name: unique among the model's groups.
        num_layers: layers that hold such an entry.
        entries: name and shape of what one token stores in one layer, such as `("k", (K, D)), ("v", (K, D))`.
        dtype: of the entries.
    """

    name: str
    num_layers: int
    entries: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype

    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers of the group."""
        width = sum(torch.Size(shape).numel() for _, shape in self.entries)
        return width * self.num_layers * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step. Tokens of all requests lie end to end; requests with one token come first.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's place in its request.
        slots: [T] int64, where each token's cache entry goes: block id * S + place in the block.
        block_tables: [B, blocks] int32; entries past a request's blocks are 0 and never read.
        query_starts: [B + 1] int32, first row of each request; the last entry is T.
        context_lens: [B] int32, tokens in the cache once this step's are written.
        logits_rows: [R] int64, rows whose logits are wanted.
        num_decodes: how many requests at the front have one token.
        max_query_len, max_context_len: largest of the batch, known on the host.
        cache: group name to one mapping of entry name to tensor [blocks, S, ...] for each layer of the group.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    logits_rows: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    cache: Mapping[str, Sequence[CacheTensors]]

    @property
    def num_requests(self) -> int:
        """B."""
        return self.context_lens.shape[0]
