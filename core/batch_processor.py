"""Batch processors: a scheduled batch becomes the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hookline.model import CacheTensors, ForwardBatch, ModelConfig

if TYPE_CHECKING:
    from hookline.config import EngineConfig
    from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Logits rows `row` to `row + count` belong to the prompt tokens from `start` of a request that wants their
    log probabilities."""

    request: Request
    start: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A forward batch and what its logits rows are for.

    Attributes:
        forward: the tensors.
        sample_requests: requests that get a token, in the batch's order.
        sample_rows: their rows among the logits, one for each request and one for each draft that it verifies; None
            where they are all the rows there are.
        prompt_spans: rows of requests that want log probabilities of their prompt.
    """

    forward: ForwardBatch
    sample_requests: tuple[Request, ...]
    sample_rows: torch.Tensor | None
    prompt_spans: tuple[PromptSpan, ...]


class BatchProcessor:
    """The default: token ids, positions, slots and block tables of a ragged batch.

    Args:
        rope_lengths: whether the model asks for `ForwardBatch.rope_lengths`.
    """

    def __init__(self, config: ModelConfig, engine_config: EngineConfig, *, rope_lengths: bool = False) -> None:
        self.block_size = engine_config.block_size
        self.device = torch.device(engine_config.device)
        self.rope_lengths = rope_lengths

    def prepare(self, batch: ScheduledBatch, cache: Mapping[str, Sequence[CacheTensors]]) -> PreparedBatch:
        """The tensors of `batch`, whose requests already own the blocks that they need."""
        parts = batch.requests
        counts = np.fromiter((part.count for part in parts), np.int64, len(parts))
        starts = np.fromiter((part.start for part in parts), np.int64, len(parts))
        query_starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        owner = np.repeat(np.arange(len(parts)), counts)
        positions = starts[owner] + np.arange(batch.num_tokens) - query_starts[owner]
        tables = block_tables(parts)
        slots = tables[owner, positions // self.block_size] * np.int64(self.block_size) + positions % self.block_size
        rows, sample_rows, spans = _logits_rows(parts, query_starts)
        lengths = None
        if self.rope_lengths:
            prompts = np.fromiter((len(part.request.prompt_token_ids) for part in parts), np.int64, len(parts))
            lengths = self._tensor(np.maximum(prompts[owner], positions + 1))
        forward = ForwardBatch(
            token_ids=self._tensor(_token_ids(parts, batch.num_tokens)),
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            block_tables=self._tensor(tables),
            query_starts=self._tensor(query_starts.astype(np.int32)),
            context_lens=self._tensor((starts + counts).astype(np.int32)),
            logits_rows=self._tensor(rows),
            num_decodes=batch.num_decodes,
            max_query_len=int(counts.max(initial=0)),
            max_context_len=int((starts + counts).max(initial=0)),
            rope_lengths=lengths,
            cache=cache,
        )
        return PreparedBatch(
            forward=forward,
            sample_requests=tuple(part.request for part in parts if part.samples),
            sample_rows=self._tensor(sample_rows) if len(sample_rows) < len(rows) else None,
            prompt_spans=spans,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(array), self.device)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`, in the order of its stream and not waited for.

    From memory that is not pinned the driver may wait for all that the stream has still to do.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _token_ids(parts: Sequence[ScheduledRequest], num_tokens: int) -> np.ndarray:
    tokens = np.empty(num_tokens, np.int64)
    row = 0
    for part in parts:
        # A decode's token may be pending: whoever has it puts it in (`DeviceRunner`).
        known = part.request.token_ids(part.start, part.start + part.count)
        tokens[row : row + part.count] = [*known, *part.drafts] if part.drafts else known or 0
        row += part.count
    return tokens


def block_tables(parts: Sequence[ScheduledRequest]) -> np.ndarray:
    """Block ids [len(parts), blocks] int32, zeros behind each part's own."""
    width = max((len(part.request.block_table) for part in parts), default=0)
    tables = np.zeros((len(parts), width), np.int32)
    for row, part in enumerate(parts):
        blocks = part.request.block_table
        tables[row, : len(blocks)] = blocks
    return tables


def _logits_rows(
    parts: Sequence[ScheduledRequest], query_starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[PromptSpan, ...]]:
    """Rows whose logits are wanted, which of those are sampled, and those of prompt log probabilities."""
    rows: list[int] = []
    sample_rows: list[int] = []
    spans: list[PromptSpan] = []
    for part, first, end in zip(parts, query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        wants_prompt = part.request.params.prompt_logprobs is not None
        prompt_left = len(part.request.prompt_token_ids) - 1 - part.start
        if wants_prompt and prompt_left > 0:
            spans.append(PromptSpan(part.request, part.start, len(rows), min(part.count, prompt_left)))
            rows.extend(range(first, end))
        elif part.samples:
            rows.extend(range(end - 1 - len(part.drafts), end))
        if part.samples:
            sample_rows.extend(range(len(rows) - 1 - len(part.drafts), len(rows)))
    return np.array(rows, np.int64), np.array(sample_rows, np.int64), tuple(spans)
