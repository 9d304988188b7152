"""Steps of made-up requests on a GPU: what they take at their largest, and what has to be compiled for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hookline.execution.decode_step import choose_tokens
from hookline.execution.kv_cache import allocate_cache
from hookline.model import DraftBatch, ForwardBatch, TransformerModel
from hookline_kernels.decode_inputs import DecodeInputs


def measure_steps(
    model: TransformerModel, tokens: int, requests: int, block_size: int, num_drafts: int = 0, *, proposes: bool = False
) -> tuple[int, int]:
    """Bytes that a step of `tokens` prefill tokens, and a step of `requests` that decode, have in use at their peak.

    Runs both on a cache of one block, which every token reads and none writes.

    Args:
        num_drafts: how many drafts each request verifies.
        proposes: whether the model's own draft runs in each step as well.
    """
    rows, drafts = requests * (1 + num_drafts), num_drafts if proposes else 0
    most = min(rows, max(tokens, requests))
    prefill = _peak(model.device, lambda: _run(model, tokens, 1, most, block_size, drafts))
    decode = _peak(model.device, lambda: _run(model, rows, requests, rows, block_size, drafts))
    return prefill, decode


def prefill_kinds(model: TransformerModel, block_size: int, num_drafts: int) -> list[Callable[[], None]]:
    """Small prefill steps that make the kernels compile what steps with prefill chunks use, one each.

    Args:
        num_drafts: how many the model's own draft proposes then.
    """
    few, many, short, long = 16, 128, 128, 4096  # rows of a request, tokens of a context
    bounds = ((few, short), (many, short), (many, long))
    kinds = [partial(_run, model, 2, 2, 1, block_size, num_drafts, bound) for bound in bounds]
    # Models may have another way for a chunk that really has many rows.
    return [*kinds, partial(_run, model, many, 1, 1, block_size, num_drafts, (many, short))]


@torch.inference_mode()
def _run(
    model: TransformerModel,
    tokens: int,
    requests: int,
    rows: int,
    block_size: int,
    num_drafts: int = 0,
    bounds: tuple[int, int] | None = None,
) -> None:
    """`bounds` are what the step is told about its longest rows and context, where they are not what they are."""
    device, each = model.device, tokens // requests
    query_len, context_len = bounds or (each, each)
    places = torch.arange(each, device=device)
    starts = torch.arange(0, tokens + 1, each, device=device, dtype=torch.int32)
    chosen = min(rows, tokens)
    forward = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=places.repeat(requests),
        slots=torch.full((tokens,), -1, device=device),
        block_tables=torch.zeros((requests, -(-context_len // block_size)), dtype=torch.int32, device=device),
        query_starts=starts,
        context_lens=torch.full((requests,), each, dtype=torch.int32, device=device),
        logits_rows=torch.arange(tokens if num_drafts else chosen, device=device),
        num_decodes=requests if bounds is None and each == 1 else 0,
        max_query_len=query_len,
        max_context_len=context_len,
        rope_lengths=torch.full((tokens,), each, device=device),
        cache=allocate_cache(model.cache_specs(), 1, block_size, device),
    )
    hidden = model.forward(forward)
    choose_tokens(model.compute_logits(hidden[:chosen]), DecodeInputs.zeros(chosen, 1, device).options)
    if num_drafts and model.proposer is not None:
        model.proposer.propose(DraftBatch(forward, hidden, forward.token_ids, starts[1:].long() - 1, num_drafts))


def _peak(device: torch.device, run: Callable[[], None]) -> int:
    run()  # what is compiled or set up once is not the step's
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
