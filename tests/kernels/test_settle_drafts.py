"""settle_drafts: cases whose answer is written down, the Triton kernel against the reference, and the coins."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hookline.execution.sampling_state import SamplingState
from hookline.sampling_params import SamplingParams
from hookline_kernels.settle_drafts import Settled, settle_drafts
from tests.kernels.test_draft_inputs import STARTS, make_slots, run

D = 3
ROWS = [[slot, limit, 0, -1, -1] for slot, limit in ((1, 3), (2, 3), (5, -1), (3, 2), (0, 3), (4, 0))]


def settle(
    targets: list[list[int]], device: torch.device, implementation: str, chance: float | None = None
) -> tuple[Settled, list[int], list[int]]:
    """With drafts 11, 12, 13 of each request; answer, and last tokens and places of all slots."""
    kept, drafting, inputs, rows = run(ROWS, D, "reference", device)
    drafting.drafts.copy_(torch.tensor([11, 12, 13]))
    inputs.token_ids.view(-1, D + 1)[:, 1:] = torch.tensor([11, 12, 13], device=device)
    chosen = torch.tensor(targets, device=device).flatten()
    found = settle_drafts(rows, inputs, chosen, kept, drafting, chance=chance, implementation=implementation)
    found.answer[:, D + 2 :] = 0  # whose place is the next drafts'
    return found, kept.last_tokens.tolist(), drafting.positions.tolist()


TARGETS = [
    [11, 12, 13, 14],  # all accepted, and the bonus
    [11, 99, 13, 14],  # the second rejected
    [11, 12, 13, 14],  # padding
    [11, 12, 13, 14],  # the third is behind the limit
    [11, 12, -1, 14],  # no token after two
    [-1, 12, 13, 14],  # no token at all
]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_what_a_step_gives(implementation: str, triton_device: torch.device) -> None:
    before = make_slots(triton_device).last_tokens.tolist()
    found, last_tokens, positions = settle(TARGETS, triton_device, implementation)
    emitted = [found.answer[row, 1 : 1 + int(found.answer[row, 0])].tolist() for row in range(len(ROWS))]
    assert [tokens for row, tokens in enumerate(emitted) if row != 2] == [
        [11, 12, 13, 14],
        [11, 99],
        [11, 12, 13],
        [11, 12],
        [-1],
    ]
    assert [int(last) % (D + 1) for row, last in enumerate(found.last_rows) if row != 2] == [3, 1, 2, 1, 0]
    shifted = found.next_token_ids.view(-1, D + 1).tolist()
    assert (shifted[0], shifted[1][:2], shifted[3][:3], shifted[4][:2], shifted[5][:1]) == (
        *([11, 12, 13, 14], [11, 99], [11, 12, 13], [11, 12]),
        [0],
    )
    assert last_tokens == [12, 14, 99, 13, 0, before[5]]
    assert positions == [start + more for start, more in zip(STARTS, (2, 4, 2, 3, 1, 0), strict=True)]


@pytest.mark.parametrize("chance", [None, 0.0, 0.5, 1.0])
def test_triton_equals_reference(chance: float | None, triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        targets = torch.tensor([[11, 12, 13, 14]] * len(ROWS))
        wrong = torch.rand(targets.shape, generator=generator) < 0.3
        targets = torch.where(wrong, torch.randint(-1, 9, targets.shape, generator=generator), targets).tolist()
        found, expected = (settle(targets, triton_device, name, chance) for name in ("triton", "reference"))
        for field in dataclasses.fields(Settled):
            assert torch.equal(getattr(found[0], field.name), getattr(expected[0], field.name)), field.name
        assert found[1:] == expected[1:]


def test_the_coins_are_the_hosts() -> None:
    """A step on the device accepts what a step on the host would, by a request's own draws."""
    kept, drafting, inputs, rows = run(ROWS[:1], D, "reference", torch.device("cpu"))
    state = SamplingState(SamplingParams(), [1, 2], frozenset(), 100, seed=9)
    drafting.coin_keys[1] = state.signed_key(2)
    targets = torch.tensor([1, 2, 3, 4])
    for number in range(40):
        inputs.num_outputs.copy_(number + torch.arange(D + 1))
        state.num_outputs = number
        coins = [state.uniform(ahead, 2) < 0.6 for ahead in range(D)]
        found = settle_drafts(rows, inputs, targets, kept, drafting, chance=0.6)
        assert int(found.answer[0, 0]) == 1 + [*coins, False].index(False)


def test_shapes_that_do_not_fit_are_refused() -> None:
    kept, drafting, inputs, rows = run(ROWS, D, "reference", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected 4 of both for each of 6"):
        settle_drafts(rows, inputs, torch.zeros(5, dtype=torch.int64), kept, drafting)
