"""draft_inputs: the reference against a loop over rows, the Triton kernel against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hookline_kernels.decode_inputs import DecodeInputs, RequestSlots
from hookline_kernels.draft_inputs import DraftSlots, draft_inputs
from tests.kernels.test_decode_inputs import BLOCKS, SIZE, SLOTS, make_slots

STARTS = (0, 5, 129 * SIZE - 2, 600, SIZE * BLOCKS - 8, 7)
NEW = 2

# Slot, limit, column of the first new block, new blocks; the fourth stands before the table's end.
ROWS: list[list[list[int]]] = [
    [],
    [[0, 3, 0, 9, 10]],
    [[1, 0, 3, -1, -1], [5, -1, 0, 3, -1], [2, 3, 129, 17, 18], [4, 2, BLOCKS - 1, 5, -1], [5, -1, -1, -1, -1]],
    [[3, 1, 150, 30, -1], [1, 3, 2, 33, 34]],
]


def make_drafts(num_drafts: int, device: torch.device) -> DraftSlots:
    drafts = torch.randint(0, 99, (SLOTS, num_drafts), generator=torch.Generator().manual_seed(2))
    keys = torch.arange(SLOTS) * -(2**60) + 77
    return DraftSlots(torch.tensor(STARTS, dtype=torch.int32, device=device), drafts.to(device), keys.to(device))


def run(
    rows: list[list[int]], num_drafts: int, implementation: str, device: torch.device
) -> tuple[RequestSlots, DraftSlots, DecodeInputs, torch.Tensor]:
    kept, drafting = make_slots(device), make_drafts(num_drafts, device)
    inputs = DecodeInputs.zeros(8, BLOCKS, device, num_drafts + 1)
    inputs.block_tables.fill_(-7)
    wanted = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 3 + NEW).t().contiguous()
    inputs = inputs.first(len(rows))
    draft_inputs(wanted, kept, drafting, inputs, SIZE, 3, implementation=implementation)
    return kept, drafting, inputs, wanted


@pytest.mark.parametrize("num_drafts", [1, 3, 4])
@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_reference_is_the_formula(rows: list[list[int]], num_drafts: int) -> None:
    cpu = torch.device("cpu")
    before, drafts = make_slots(cpu), make_drafts(num_drafts, cpu).drafts
    kept, _, inputs, _ = run(rows, num_drafts, "reference", cpu)
    for request, (slot, limit, column, *blocks) in enumerate(rows):
        if limit < 0:
            assert inputs.context_lens[request] == 0 and (inputs.block_tables[request] == -7).all()
        else:
            table = before.tables[slot].clone()
            for index, block in enumerate(blocks):
                if block >= 0:
                    table[column + index] = block
            assert torch.equal(kept.tables[slot], table)
            count = min((STARTS[slot] + num_drafts + 3) // SIZE + 1, BLOCKS)
            assert torch.equal(inputs.block_tables[request, :count], table[:count])
            assert (inputs.block_tables[request, count:] == -7).all()
            assert inputs.context_lens[request] == STARTS[slot] + num_drafts + 1
        for step in range(num_drafts + 1):
            row = request * (num_drafts + 1) + step
            if limit < 0:
                assert (inputs.slots[row], inputs.token_ids[row], inputs.temperature[row]) == (-1, 0, 0)
                assert inputs.positions[row] == 0
                continue
            position, prompt = STARTS[slot] + step, int(before.prompt_lens[slot])
            place = table[position // SIZE] * SIZE + position % SIZE
            assert inputs.slots[row] == (place if step <= limit else -1)
            assert inputs.positions[row] == position
            assert inputs.rope_lengths[row] == max(prompt, position + 1)
            assert inputs.num_outputs[row] == max(0, position + 1 - prompt)
            assert inputs.token_ids[row] == (drafts[slot, step - 1] if step else before.last_tokens[slot])
            for name in ("temperature", "top_p", "min_p", "top_k", "keys"):
                assert getattr(inputs, name)[row] == getattr(before, name)[slot]


@pytest.mark.parametrize("num_drafts", [1, 3, 4])
@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_triton_equals_reference(rows: list[list[int]], num_drafts: int, triton_device: torch.device) -> None:
    found, expected = (run(rows, num_drafts, name, triton_device) for name in ("triton", "reference"))
    for one, other in zip(found[:3], expected[:3], strict=True):
        for field in dataclasses.fields(one):
            assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_bad_arguments_are_refused() -> None:
    cpu = torch.device("cpu")
    kept, drafting = make_slots(cpu), make_drafts(3, cpu)
    fitting = DecodeInputs.zeros(2, BLOCKS, cpu, 4)
    bad = [
        (torch.zeros(5, 2, dtype=torch.int64), fitting, TypeError),
        (torch.zeros(2, 2, dtype=torch.int32), fitting, TypeError),
        (torch.zeros(5, 3, dtype=torch.int32), fitting, ValueError),
        (torch.zeros(5, 2, dtype=torch.int32), DecodeInputs.zeros(2, BLOCKS, cpu, 3), ValueError),
        (torch.zeros(5, 2, dtype=torch.int32), DecodeInputs.zeros(2, BLOCKS + 1, cpu, 4), ValueError),
    ]
    for rows, inputs, error in bad:
        with pytest.raises(error, match="draft_inputs"):
            draft_inputs(rows, kept, drafting, inputs, SIZE, 3)
