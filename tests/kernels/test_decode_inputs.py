"""decode_inputs: the reference against a loop over rows, the Triton kernel against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hookline_kernels.decode_inputs import DecodeInputs, RequestSlots, decode_inputs

SLOTS, BLOCKS, SIZE = 6, 300, 4


def make_slots(device: torch.device) -> RequestSlots:
    generator = torch.Generator().manual_seed(0)
    kept = RequestSlots.zeros(SLOTS, BLOCKS, torch.device("cpu"))
    made = {
        field.name: torch.randint(1, 40, getattr(kept, field.name).shape, generator=generator)
        .to(getattr(kept, field.name).dtype)
        .to(device)
        for field in dataclasses.fields(kept)
    }
    return RequestSlots(**made)


def run(rows: list[list[int]], implementation: str, device: torch.device) -> tuple[RequestSlots, DecodeInputs]:
    kept, inputs = make_slots(device), DecodeInputs.zeros(8, BLOCKS, device)
    inputs.block_tables.fill_(-7)
    wanted = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 3).t().contiguous()
    decode_inputs(wanted, kept, inputs.first(len(rows)), SIZE, implementation=implementation)
    return kept, inputs


# Slot, position, new block of each row; the second has its table's last place.
ROWS: list[list[list[int]]] = [
    [],
    [[2, 0, 9]],
    [[1, SIZE * BLOCKS - 1, -1], [0, 5, -1], [5, -1, -1], [4, 8, 33], [5, -1, 3]],
    [[3, 130 * SIZE, 17], [2, 128 * SIZE - 1, -1], [1, 128 * SIZE, 5]],
]


@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_reference_is_the_formula(rows: list[list[int]]) -> None:
    before = make_slots(torch.device("cpu"))
    kept, inputs = run(rows, "reference", torch.device("cpu"))
    for row, (slot, position, new_block) in enumerate(rows):
        if position < 0:
            assert (inputs.slots[row], inputs.context_lens[row], inputs.temperature[row]) == (-1, 0, 0)
            assert inputs.token_ids[row] == 0 and (inputs.block_tables[row] == -7).all()
            continue
        table = before.tables[slot].clone()
        if new_block >= 0:
            table[position // SIZE] = new_block
        assert torch.equal(kept.tables[slot], table)
        count = position // SIZE + 1
        assert torch.equal(inputs.block_tables[row, :count], table[:count])
        assert (inputs.block_tables[row, count:] == -7).all()
        assert inputs.slots[row] == table[position // SIZE] * SIZE + position % SIZE
        assert (inputs.positions[row], inputs.context_lens[row]) == (position, position + 1)
        prompt = int(before.prompt_lens[slot])
        assert inputs.rope_lengths[row] == max(prompt, position + 1)
        assert inputs.num_outputs[row] == max(0, position + 1 - prompt)
        assert inputs.token_ids[row] == before.last_tokens[slot]
        for name in ("temperature", "top_p", "min_p", "top_k", "keys"):
            assert getattr(inputs, name)[row] == getattr(before, name)[slot]


@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_triton_equals_reference(rows: list[list[int]], triton_device: torch.device) -> None:
    found, expected = run(rows, "triton", triton_device), run(rows, "reference", triton_device)
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(one):
            assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_bad_arguments_are_refused() -> None:
    cpu = torch.device("cpu")
    kept, inputs = RequestSlots.zeros(2, 4, cpu), DecodeInputs.zeros(3, 4, cpu)
    bad: list[tuple[torch.Tensor, Any, type[Exception]]] = [
        (torch.zeros(3, 3, dtype=torch.int64), inputs, TypeError),
        (torch.zeros(2, 3, dtype=torch.int32), inputs, TypeError),
        (torch.zeros(3, 2, dtype=torch.int32), inputs, ValueError),
        (torch.zeros(3, 3, dtype=torch.int32), DecodeInputs.zeros(3, 5, cpu), ValueError),
    ]
    for rows, buffers, error in bad:
        with pytest.raises(error, match="decode_inputs"):
            decode_inputs(rows, kept, buffers, 16)
