"""Tensors of a ragged batch, worked out by hand."""

from __future__ import annotations

import torch

from hookline.batch_processor import BatchProcessor
from hookline.config import EngineConfig
from hookline.model import ModelConfig
from hookline.sampling_params import SamplingParams
from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest

CONFIG = ModelConfig(architecture="A", num_layers=1, hidden_size=4, vocab_size=100, max_position_embeddings=64)
ENGINE = EngineConfig("m", device="cpu", block_size=4)


def request(name: str, prompt: int, output: list[int], blocks: list[int], **params: int) -> Request:
    made = Request(name, list(range(10, 10 + prompt)), SamplingParams(**params), 64)
    made.output_token_ids.extend(output)
    made.block_table.extend(blocks)
    return made


def batch() -> ScheduledBatch:
    """A decode at position 6, a chunk 3..6 of a prompt of 9, and a whole prompt of 2."""
    decode = ScheduledRequest(request("d", 5, [50, 51], [7, 2]), 6, 1, samples=True)
    chunk = ScheduledRequest(request("c", 9, [], [1, 4, 5]), 3, 4, samples=False)
    whole = ScheduledRequest(request("w", 2, [], [9]), 0, 2, samples=True)
    return ScheduledBatch((decode, chunk, whole), num_decodes=1, num_tokens=7)


def test_a_mixed_batch() -> None:
    prepared = BatchProcessor(CONFIG, ENGINE).prepare(batch(), {})
    forward = prepared.forward
    assert forward.token_ids.tolist() == [51, 13, 14, 15, 16, 10, 11]
    assert forward.positions.tolist() == [6, 3, 4, 5, 6, 0, 1]
    assert forward.slots.tolist() == [2 * 4 + 2, 1 * 4 + 3, 16, 17, 18, 36, 37]
    assert forward.query_starts.tolist() == [0, 1, 5, 7]
    assert forward.context_lens.tolist() == [7, 7, 2]
    assert forward.block_tables.tolist() == [[7, 2, 0], [1, 4, 5], [9, 0, 0]]
    assert forward.logits_rows.tolist() == [0, 6]
    assert (forward.num_decodes, forward.max_query_len, forward.max_context_len) == (1, 4, 7)
    assert forward.rope_lengths is None
    assert prepared.sample_rows is None
    assert [r.request_id for r in prepared.sample_requests] == ["d", "w"]
    assert forward.block_tables.dtype == forward.query_starts.dtype == forward.context_lens.dtype == torch.int32


def test_rope_lengths_are_the_prompts_until_the_output_is_longer() -> None:
    forward = BatchProcessor(CONFIG, ENGINE, rope_lengths=True).prepare(batch(), {}).forward
    assert forward.rope_lengths is not None
    assert forward.rope_lengths.tolist() == [7, 9, 9, 9, 9, 2, 2]


def test_prompt_logprobs_want_every_row_but_the_last_tokens() -> None:
    first = ScheduledRequest(request("p", 6, [], [0, 1], prompt_logprobs=0), 0, 4, samples=False)
    plain = ScheduledRequest(request("w", 3, [], [2]), 0, 3, samples=True)
    prepared = BatchProcessor(CONFIG, ENGINE).prepare(ScheduledBatch((first, plain), 0, 7), {})
    assert prepared.forward.logits_rows.tolist() == [0, 1, 2, 3, 6]
    assert [(s.start, s.row, s.count) for s in prepared.prompt_spans] == [(0, 0, 4)]
    assert prepared.sample_rows is not None
    assert prepared.sample_rows.tolist() == [4]
    last = ScheduledRequest(first.request, 4, 2, samples=True)
    prepared = BatchProcessor(CONFIG, ENGINE).prepare(ScheduledBatch((last,), 0, 2), {})
    assert prepared.forward.logits_rows.tolist() == [0, 1]
    assert [(s.start, s.row, s.count) for s in prepared.prompt_spans] == [(4, 0, 1)]
    assert prepared.sample_rows is not None
    assert prepared.sample_rows.tolist() == [1]


def test_an_empty_batch() -> None:
    forward = BatchProcessor(CONFIG, ENGINE).prepare(ScheduledBatch((), 0, 0), {}).forward
    assert forward.token_ids.shape == (0,)
    assert forward.num_requests == 0
