"""The inputs of a decode step, made on the device from what it keeps of every running request.

Each running request has a slot: its last token, its block table, its prompt's length and its sampling options. A row of
the step names a slot. With p the position of the row's token and S the block size:

    token_ids[r] = last_tokens[slot]        slots[r] = table[p // S] * S + p % S        context_lens[r] = p + 1

A block that the request has just been given is written to its slot's table first. Rows with p < 0 are padding: they
write to no slot of the cache (-1) and have a context of 0.

Shapes: R rows, Q slots, N blocks of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """What the device keeps of the running requests.

    Attributes:
        last_tokens: [Q] int64.
        tables: [Q, N] int32 block ids.
        prompt_lens: [Q] int32.
        temperature, min_p: [Q] float32.
        top_p: [Q] float64, as users give it: rounded to fp32 it may lie on the other side of a sum.
        top_k: [Q] int32.
        keys: [Q] int64, of the requests' random draws.
    """

    last_tokens: torch.Tensor
    tables: torch.Tensor
    prompt_lens: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, blocks: int, device: torch.device) -> RequestSlots:
        """Empty slots."""
        shapes = {
            "last_tokens": ((slots,), torch.int64),
            "tables": ((slots, blocks), torch.int32),
            "prompt_lens": ((slots,), torch.int32),
            "temperature": ((slots,), torch.float32),
            "top_p": ((slots,), torch.float64),
            "min_p": ((slots,), torch.float32),
            "top_k": ((slots,), torch.int32),
            "keys": ((slots,), torch.int64),
        }
        return cls(**{name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()})


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How each row's token is chosen.

    Attributes:
        temperature, min_p: [R] float32; a temperature of 0 takes the likeliest.
        top_p: [R] float64.
        top_k, num_outputs: [R] int32; the latter is how many output tokens the request has before this step's.
        keys: [R] int64.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    num_outputs: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step reads, of B requests with the same number of rows each: one, or more where it verifies drafts.

    Attributes:
        token_ids, positions, slots, rope_lengths: [R] int64, as `ForwardBatch` has them; positions of padding are 0.
        context_lens: [B] int32.
        block_tables: [B, N] int32; entries past a request's context keep what they had.
        temperature and the rest: see `SamplingOptions`; padding has a temperature of 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope_lengths: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    num_outputs: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def zeros(cls, requests: int, blocks: int, device: torch.device, each: int = 1) -> DecodeInputs:
        """Buffers for a step of up to so many requests, of `each` rows."""
        rows = requests * each
        integers, floats = (
            ("token_ids", "positions", "slots", "rope_lengths", "keys"),
            ("temperature", "top_p", "min_p"),
        )
        made = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in integers}
        made |= {name: torch.zeros(rows, dtype=torch.float32, device=device) for name in floats}
        made["top_p"] = torch.zeros(rows, dtype=torch.float64, device=device)
        made |= {name: torch.zeros(rows, dtype=torch.int32, device=device) for name in ("top_k", "num_outputs")}
        made["context_lens"] = torch.zeros(requests, dtype=torch.int32, device=device)
        made["block_tables"] = torch.zeros((requests, blocks), dtype=torch.int32, device=device)
        return cls(**made)

    @property
    def options(self) -> SamplingOptions:
        """The part that the choice of tokens reads."""
        return SamplingOptions(**{field.name: getattr(self, field.name) for field in fields(SamplingOptions)})

    def first(self, requests: int) -> DecodeInputs:
        """The buffers of a smaller step, which share this one's memory."""
        rows = requests * (self.token_ids.shape[0] // self.context_lens.shape[0])
        counts = {"context_lens": requests, "block_tables": requests}
        return DecodeInputs(**{f.name: getattr(self, f.name)[: counts.get(f.name, rows)] for f in fields(self)})


def decode_inputs_reference(rows: torch.Tensor, kept: RequestSlots, inputs: DecodeInputs, block_size: int) -> None:
    """The formula in plain torch."""
    slots, positions, new_blocks = rows.long()
    real, place = positions >= 0, positions.clamp(min=0)
    fresh = torch.where(real & (new_blocks >= 0))[0]
    kept.tables[slots[fresh], place[fresh] // block_size] = new_blocks[fresh].int()
    tables = kept.tables[slots]
    used = torch.arange(tables.shape[1], device=rows.device) <= (place // block_size)[:, None]
    inputs.block_tables.copy_(torch.where(used & real[:, None], tables, inputs.block_tables))
    block = tables.gather(1, (place // block_size)[:, None])[:, 0].long()
    inputs.slots.copy_(torch.where(real, block * block_size + place % block_size, -1))
    inputs.token_ids.copy_(torch.where(real, kept.last_tokens[slots], 0))
    inputs.positions.copy_(place)
    prompts = kept.prompt_lens[slots].long()
    inputs.rope_lengths.copy_(torch.maximum(prompts, place + 1))
    inputs.context_lens.copy_(positions + 1)
    inputs.num_outputs.copy_((place + 1 - prompts).clamp(min=0))
    inputs.temperature.copy_(torch.where(real, kept.temperature[slots], 0.0))
    for name in ("top_p", "min_p", "top_k", "keys"):
        getattr(inputs, name).copy_(getattr(kept, name)[slots])


@triton.jit(do_not_specialize=["count"])
def decode_inputs_kernel(
    rows_ptr: tl.tensor,
    last_ptr: tl.tensor,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    position = tl.load(rows_ptr + count + row)
    new_block = tl.load(rows_ptr + 2 * count + row)
    real = position >= 0
    place = tl.maximum(position, 0)
    index = place // BLOCK_SIZE
    fresh = real & (new_block >= 0)
    known = tl.load(tables_ptr + slot * width + index, mask=real, other=0)
    block = tl.where(fresh, new_block, known)
    tl.store(tables_ptr + slot * width + index, block, mask=fresh)
    for start in range(0, tl.where(real, index + 1, 0), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column <= index
        entry = tl.load(tables_ptr + slot * width + column, mask=inside & (column < index), other=0)
        entry = tl.where(column == index, block, entry)
        tl.store(out_tables_ptr + row.to(tl.int64) * width + column, entry, mask=inside)
    cache_slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    prompt = tl.load(prompts_ptr + slot)
    tl.store(token_ids_ptr + row, tl.load(last_ptr + slot, mask=real, other=0))
    tl.store(positions_ptr + row, place.to(tl.int64))
    tl.store(slots_ptr + row, tl.where(real, cache_slot, -1))
    tl.store(rope_lengths_ptr + row, tl.maximum(prompt, place + 1).to(tl.int64))
    tl.store(contexts_ptr + row, position + 1)
    tl.store(num_outputs_ptr + row, tl.maximum(place + 1 - prompt, 0))
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot, mask=real, other=0.0))
    tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot))
    tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot))
    tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot))
    tl.store(out_keys_ptr + row, tl.load(keys_ptr + slot))


def decode_inputs_triton(rows: torch.Tensor, kept: RequestSlots, inputs: DecodeInputs, block_size: int) -> None:
    """One launch."""
    count, width = rows.shape[1], kept.tables.shape[1]
    if count == 0:
        return
    decode_inputs_kernel[(count,)](
        rows,
        kept.last_tokens,
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
        width,
        BLOCK_SIZE=block_size,
        BLOCK=128,
        num_warps=1,
    )


Run = Callable[[torch.Tensor, RequestSlots, DecodeInputs, int], None]

IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Run], ...] = (
    Implementation("triton", by_triton, decode_inputs_triton),
    Implementation("reference", anywhere, decode_inputs_reference),
)


def decode_inputs(
    rows: torch.Tensor,
    kept: RequestSlots,
    inputs: DecodeInputs,
    block_size: int,
    *,
    implementation: str | None = None,
) -> None:
    """Fills `inputs` for a step, and takes new blocks into `kept.tables`.

    Args:
        rows: [3, R] int32: each row's slot, its token's position (-1 for padding, which may name any slot), and the
            block at that position where the request has just been given it, else -1. No two real rows name one slot.
        implementation: `triton` or `reference`; by default `triton` on a GPU.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2 or rows.shape[0] != 3 or not rows.is_contiguous():
        raise TypeError(f"decode_inputs: rows must be contiguous int32 [3, R], got {rows.dtype} {list(rows.shape)}")
    if inputs.token_ids.shape[0] != rows.shape[1] or inputs.block_tables.shape[1] != kept.tables.shape[1]:
        raise ValueError(
            f"decode_inputs: buffers {list(inputs.token_ids.shape)} with tables {list(inputs.block_tables.shape)} "
            f"do not fit {rows.shape[1]} rows and tables {list(kept.tables.shape)}"
        )
    chosen = implementation or ("triton" if rows.is_cuda else "reference")
    choose(IMPLEMENTATIONS, (rows,), chosen)(rows, kept, inputs, block_size)
