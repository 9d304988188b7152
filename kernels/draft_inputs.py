"""The inputs of a step that verifies drafts, made on the device: K + 1 rows a request, its last token and its drafts.

As `decode_inputs`, but where a request stands is the device's own to know as well, for how many drafts the step before
accepted may not have come to the host yet. With p = positions[slot] + j of row j, 0 to K, and the block size S:

    token = last_tokens[slot], then drafts[slot]        cache slot = table[p // S] * S + p % S, or -1 for j > limit

The host tells for each request how many drafts count, its limit, for it knows for how many rows there are blocks. Rows
behind the limit run, so that all steps have the same shapes, and nothing that is read later depends on them.

Shapes: B requests, Q slots, N blocks of a table, W new blocks of a request in a step, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hookline_kernels.decode_inputs import DecodeInputs, RequestSlots
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose

# Rows of what the host tells: slot, limit, column of the first new block; the new blocks follow.
SLOT, LIMIT, COLUMN, BLOCKS = range(4)


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """What the device keeps of the running requests, beside `RequestSlots`, where there are drafts.

    Attributes:
        positions: [Q] int32, where the last token stands.
        drafts: [Q, K] int64, what is proposed behind it.
        coin_keys: [Q] int64, of the draws that decide on drafts where that is left to chance.
    """

    positions: torch.Tensor
    drafts: torch.Tensor
    coin_keys: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, num_drafts: int, device: torch.device) -> DraftSlots:
        """Empty slots."""
        shapes = ((slots,), torch.int32), ((slots, num_drafts), torch.int64), ((slots,), torch.int64)
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes))


def draft_inputs_reference(
    rows: torch.Tensor, kept: RequestSlots, drafting: DraftSlots, inputs: DecodeInputs, block_size: int, lookahead: int
) -> None:
    """The formula in plain torch."""
    slots, limits, columns, *blocks = rows.long()
    width, num_drafts = kept.tables.shape[1], drafting.drafts.shape[1]
    real = limits >= 0
    for index, block in enumerate(blocks):
        fresh = torch.where(real & (block >= 0))[0]
        kept.tables[slots[fresh], columns[fresh] + index] = block[fresh].int()
    tables, starts = kept.tables[slots], drafting.positions[slots].long()
    used = torch.arange(width, device=rows.device) <= ((starts + num_drafts + lookahead) // block_size)[:, None]
    inputs.block_tables.copy_(torch.where(used & real[:, None], tables, inputs.block_tables))
    steps = torch.arange(num_drafts + 1, device=rows.device)
    places = torch.where(real[:, None], starts[:, None] + steps, 0)
    block = tables.gather(1, (places // block_size).clamp(max=width - 1)).long()
    counts = real[:, None] & (steps <= limits[:, None])
    inputs.slots.copy_(torch.where(counts, block * block_size + places % block_size, -1).flatten())
    tokens = torch.cat([kept.last_tokens[slots][:, None], drafting.drafts[slots]], dim=1)
    inputs.token_ids.copy_(torch.where(real[:, None], tokens, 0).flatten())
    inputs.positions.copy_(places.flatten())
    prompts = kept.prompt_lens[slots].long()[:, None]
    inputs.rope_lengths.copy_(torch.maximum(prompts, places + 1).flatten())
    inputs.context_lens.copy_(torch.where(real, starts + num_drafts + 1, 0))
    inputs.num_outputs.copy_((places + 1 - prompts).clamp(min=0).flatten())
    each = num_drafts + 1
    inputs.temperature.copy_(torch.where(real, kept.temperature[slots], 0.0).repeat_interleave(each))
    for name in ("top_p", "min_p", "top_k", "keys"):
        getattr(inputs, name).copy_(getattr(kept, name)[slots].repeat_interleave(each))


@triton.jit(do_not_specialize=["count"])
def draft_inputs_kernel(
    rows_ptr: tl.tensor,
    last_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    prompts_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    rope_lengths_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_tables_ptr: tl.tensor,
    out_temperature_ptr: tl.tensor,
    out_top_p_ptr: tl.tensor,
    out_min_p_ptr: tl.tensor,
    out_top_k_ptr: tl.tensor,
    num_outputs_ptr: tl.tensor,
    out_keys_ptr: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    NEW_BLOCKS: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a request; EACH is a power of two that holds its rows."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    limit = tl.load(rows_ptr + count + row)
    first = tl.load(rows_ptr + 2 * count + row)
    real = limit >= 0
    start = tl.load(starts_ptr + slot)
    # New blocks are taken from here, not from the table, where they are only just being written.
    table = tables_ptr + slot * width
    last = (start + NUM_DRAFTS + LOOKAHEAD) // BLOCK_SIZE
    for begin in range(0, tl.where(real, last + 1, 0), BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = (column <= last) & (column < width)
        entry = tl.load(table + column, mask=inside, other=0)
        for index in tl.static_range(NEW_BLOCKS):
            block = tl.load(rows_ptr + (3 + index) * count + row)
            entry = tl.where((column == first + index) & (block >= 0), block, entry)
        tl.store(out_tables_ptr + row.to(tl.int64) * width + column, entry, mask=inside)
    step = tl.arange(0, EACH)
    inside = step <= NUM_DRAFTS
    place = tl.where(real, start + step, 0)
    index_of = tl.minimum(place // BLOCK_SIZE, width - 1)
    entry = tl.load(table + index_of, mask=inside & real, other=0)
    for index in tl.static_range(NEW_BLOCKS):
        block = tl.load(rows_ptr + (3 + index) * count + row)
        entry = tl.where((index_of == first + index) & (block >= 0), block, entry)
        tl.store(table + first + index, block, mask=real & (block >= 0))
    cache_slot = entry.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    out = row * (NUM_DRAFTS + 1) + step
    draft = tl.load(drafts_ptr + slot * NUM_DRAFTS + step - 1, mask=inside & real & (step > 0), other=0)
    token = tl.where(step > 0, draft, tl.load(last_ptr + slot, mask=real, other=0))
    prompt = tl.load(prompts_ptr + slot)
    tl.store(token_ids_ptr + out, token, mask=inside)
    tl.store(positions_ptr + out, place.to(tl.int64), mask=inside)
    tl.store(slots_ptr + out, tl.where(real & (step <= limit), cache_slot, -1), mask=inside)
    tl.store(rope_lengths_ptr + out, tl.maximum(prompt, place + 1).to(tl.int64), mask=inside)
    tl.store(contexts_ptr + row, tl.where(real, start + NUM_DRAFTS + 1, 0))
    tl.store(num_outputs_ptr + out, tl.maximum(place + 1 - prompt, 0), mask=inside)
    none = tl.zeros((EACH,), tl.int32)
    tl.store(out_temperature_ptr + out, tl.load(temperature_ptr + slot, mask=real, other=0.0) + none, mask=inside)
    tl.store(out_top_p_ptr + out, tl.load(top_p_ptr + slot) + none, mask=inside)
    tl.store(out_min_p_ptr + out, tl.load(min_p_ptr + slot) + none, mask=inside)
    tl.store(out_top_k_ptr + out, tl.load(top_k_ptr + slot) + none, mask=inside)
    tl.store(out_keys_ptr + out, tl.load(keys_ptr + slot) + none, mask=inside)


def draft_inputs_triton(
    rows: torch.Tensor, kept: RequestSlots, drafting: DraftSlots, inputs: DecodeInputs, block_size: int, lookahead: int
) -> None:
    """One launch."""
    count, num_drafts = rows.shape[1], drafting.drafts.shape[1]
    if count == 0:
        return
    draft_inputs_kernel[(count,)](
        rows,
        kept.last_tokens,
        drafting.drafts,
        drafting.positions,
        kept.tables,
        kept.prompt_lens,
        kept.temperature,
        kept.top_p,
        kept.min_p,
        kept.top_k,
        kept.keys,
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.rope_lengths,
        inputs.context_lens,
        inputs.block_tables,
        inputs.temperature,
        inputs.top_p,
        inputs.min_p,
        inputs.top_k,
        inputs.num_outputs,
        inputs.keys,
        count,
        kept.tables.shape[1],
        NUM_DRAFTS=num_drafts,
        NEW_BLOCKS=rows.shape[0] - BLOCKS,
        LOOKAHEAD=lookahead,
        BLOCK_SIZE=block_size,
        EACH=triton.next_power_of_2(num_drafts + 1),
        BLOCK=128,
        num_warps=1,
    )


Run = Callable[[torch.Tensor, RequestSlots, DraftSlots, DecodeInputs, int, int], None]

IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Run], ...] = (
    Implementation("triton", by_triton, draft_inputs_triton),
    Implementation("reference", anywhere, draft_inputs_reference),
)


def draft_inputs(
    rows: torch.Tensor,
    kept: RequestSlots,
    drafting: DraftSlots,
    inputs: DecodeInputs,
    block_size: int,
    lookahead: int,
    *,
    implementation: str | None = None,
) -> None:
    """Fills `inputs` for a step of K + 1 rows a request, and takes new blocks into `kept.tables`.

    Args:
        rows: [3 + W, B] int32: each request's slot, how many drafts count (-1 for padding, which may name any slot),
            the table's column of its first new block, and its new blocks, -1 behind the last. No two requests that are
            not padding name one slot.
        lookahead: places behind the rows whose blocks the step needs as well.
        implementation: `triton` or `reference`; by default `triton` on a GPU.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2 or rows.shape[0] < BLOCKS or not rows.is_contiguous():
        raise TypeError(f"draft_inputs: rows must be contiguous int32 [3 + W, B], got {rows.dtype} {list(rows.shape)}")
    count = rows.shape[1] * (drafting.drafts.shape[1] + 1)
    if inputs.token_ids.shape[0] != count or inputs.block_tables.shape != (rows.shape[1], kept.tables.shape[1]):
        raise ValueError(
            f"draft_inputs: buffers {list(inputs.token_ids.shape)} with tables {list(inputs.block_tables.shape)} "
            f"do not fit {count} rows of {rows.shape[1]} requests and tables {list(kept.tables.shape)}"
        )
    chosen = implementation or ("triton" if rows.is_cuda else "reference")
    choose(IMPLEMENTATIONS, (rows,), chosen)(rows, kept, drafting, inputs, block_size, lookahead)
