"""What a verification gives: which drafts count, the token after them, and where the request stands then.

Of K drafts the first n are accepted, where n is the number before the first that is not the target's own choice, or is
behind the limit; the token after them is the target's choice of row n. A request whose row n leaves no token to choose
gives its n drafts alone, and the next step finds what there is; with n = 0 it gives -1.

Shapes: B requests, Q slots, K drafts, R = B * (K + 1) rows.

Source: the greedy verification of Leviathan, Kalman, Matias 2023; a draw of the target's own in place of its argmax
leaves the distribution as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hookline_kernels.decode_inputs import DecodeInputs, RequestSlots
from hookline_kernels.draft_inputs import LIMIT, SLOT, DraftSlots
from hookline_kernels.implementations import Implementation, anywhere, by_triton, choose
from hookline_kernels.sampling import uniform_reference
from hookline_kernels.sampling_rules import uniform


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of a step's drafts.

    Attributes:
        answer: [B, 2K + 2] int64: how many tokens the request gets, those and zeros behind them, K + 1 together; and K
            places for the next drafts, which are not written.
        next_token_ids: [R] int64, the token after each row's; of rows behind the last accepted one it is any token.
        last_rows: [B] int64, the row of the last accepted token; of padding its first row.
    """

    answer: torch.Tensor
    next_token_ids: torch.Tensor
    last_rows: torch.Tensor

    @classmethod
    def empty(cls, requests: int, num_drafts: int, device: torch.device) -> Settled:
        """Memory for a step of so many requests."""
        shapes = ((requests, 2 * num_drafts + 2), (requests * (num_drafts + 1),), (requests,))
        return cls(*(torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes))


def settle_drafts_reference(
    rows: torch.Tensor,
    inputs: DecodeInputs,
    targets: torch.Tensor,
    kept: RequestSlots,
    drafting: DraftSlots,
    chance: float | None,
    settled: Settled,
) -> None:
    """The formula in plain torch."""
    slots, limits = rows[SLOT].long(), rows[LIMIT].long()
    num_drafts = drafting.drafts.shape[1]
    columns = torch.arange(num_drafts, device=rows.device)
    tokens = inputs.token_ids.view(-1, num_drafts + 1)
    drafts, chosen = tokens[:, 1:], targets.view(-1, num_drafts + 1)
    matches = drafts == chosen[:, :-1]
    if chance is not None:
        numbers = inputs.num_outputs.view(-1, num_drafts + 1)[:, :-1]
        coins = uniform_reference(drafting.coin_keys[slots][:, None].expand_as(numbers), numbers)
        matches = (coins < chance) & (chosen[:, :-1] >= 0)
    accepted = (matches & (columns < limits[:, None])).long().cumprod(dim=1).sum(dim=1)
    following = chosen.gather(1, accepted[:, None])[:, 0]
    emitted = accepted + ((following >= 0) | (accepted == 0))
    shifted = torch.cat([drafts, torch.zeros_like(drafts[:, :1])], dim=1)
    shifted = torch.where(
        torch.arange(num_drafts + 1, device=rows.device) == accepted[:, None], following[:, None], shifted
    )
    inside = torch.arange(num_drafts + 1, device=rows.device) < emitted[:, None]
    settled.answer[:, 0] = emitted
    settled.answer[:, 1 : num_drafts + 2] = torch.where(inside, shifted, 0)
    settled.next_token_ids.copy_(shifted.clamp(min=0).flatten())
    order = torch.arange(len(slots), device=rows.device) * (num_drafts + 1)
    settled.last_rows.copy_(order + emitted - 1)
    real = limits >= 0
    own = slots[real]
    kept.last_tokens[own] = shifted.gather(1, emitted[:, None] - 1)[:, 0].clamp(min=0)[real]
    drafting.positions[own] += emitted[real].int()


@triton.jit(do_not_specialize=["count"])
def settle_drafts_kernel(
    rows_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    last_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    coin_keys_ptr: tl.tensor,
    answer_ptr: tl.tensor,
    next_ptr: tl.tensor,
    last_rows_ptr: tl.tensor,
    count: tl.tensor,
    chance_ptr: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    """One program a request; EACH is a power of two that holds its rows."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    limit = tl.load(rows_ptr + count + row)
    step = tl.arange(0, EACH)
    rows = row * (NUM_DRAFTS + 1) + step
    inside = step <= NUM_DRAFTS
    is_draft = step < NUM_DRAFTS
    draft = tl.load(token_ids_ptr + rows + 1, mask=is_draft, other=0)
    target = tl.load(targets_ptr + rows, mask=inside, other=-1)
    matches = draft == target
    if BY_CHANCE:
        coin = uniform(tl.load(coin_keys_ptr + slot), tl.load(numbers_ptr + rows, mask=inside, other=0))
        matches = (coin < tl.load(chance_ptr)) & (target >= 0)
    matches = matches & is_draft & (step < limit)
    accepted = tl.min(tl.where(matches, EACH, step))  # the first that is not accepted; row K never is
    following = tl.sum(tl.where(step == accepted, target, 0))
    emitted = accepted + ((following >= 0) | (accepted == 0)).to(tl.int32)
    shifted = tl.where(step == accepted, following, draft)
    answer = answer_ptr + row * (2 * NUM_DRAFTS + 2)
    tl.store(answer, emitted.to(tl.int64))
    tl.store(answer + 1 + step, tl.where(step < emitted, shifted, 0), mask=inside)
    tl.store(next_ptr + rows, tl.maximum(shifted, 0), mask=inside)
    tl.store(last_rows_ptr + row, (row * (NUM_DRAFTS + 1) + emitted - 1).to(tl.int64))
    last = tl.sum(tl.where(step == emitted - 1, shifted, 0))
    tl.store(last_ptr + slot, tl.maximum(last, 0), mask=limit >= 0)
    tl.store(starts_ptr + slot, tl.load(starts_ptr + slot) + emitted, mask=limit >= 0)


def settle_drafts_triton(
    rows: torch.Tensor,
    inputs: DecodeInputs,
    targets: torch.Tensor,
    kept: RequestSlots,
    drafting: DraftSlots,
    chance: float | None,
    settled: Settled,
) -> None:
    """One launch; with a chance another, which keeps it in fp64."""
    count, num_drafts = rows.shape[1], drafting.drafts.shape[1]
    if count == 0:
        return
    settle_drafts_kernel[(count,)](
        rows,
        inputs.token_ids,
        targets,
        inputs.num_outputs,
        kept.last_tokens,
        drafting.positions,
        drafting.coin_keys,
        settled.answer,
        settled.next_token_ids,
        settled.last_rows,
        count,
        targets if chance is None else torch.full((1,), chance, dtype=torch.float64, device=rows.device),
        NUM_DRAFTS=num_drafts,
        BY_CHANCE=chance is not None,
        EACH=triton.next_power_of_2(num_drafts + 1),
        num_warps=1,
    )


Run = Callable[
    [torch.Tensor, DecodeInputs, torch.Tensor, RequestSlots, DraftSlots, "float | None", Settled],
    None,
]

IMPLEMENTATIONS: tuple[Implementation[tuple[torch.Tensor], Run], ...] = (
    Implementation("triton", by_triton, settle_drafts_triton),
    Implementation("reference", anywhere, settle_drafts_reference),
)


def settle_drafts(
    rows: torch.Tensor,
    inputs: DecodeInputs,
    targets: torch.Tensor,
    kept: RequestSlots,
    drafting: DraftSlots,
    *,
    chance: float | None = None,
    implementation: str | None = None,
) -> Settled:
    """Settles a step's drafts, and takes the new last tokens and their places into the slots.

    Args:
        rows: as `draft_inputs` takes them.
        inputs: as it filled them.
        targets: [R] int64, the target's choice of each row, -1 where there is none.
        chance: accepts each draft by a coin of this chance, whatever it is, for benchmarks.
        implementation: `triton` or `reference`; by default `triton` on a GPU.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    num_drafts = drafting.drafts.shape[1]
    if targets.shape != inputs.token_ids.shape or targets.shape[0] != rows.shape[1] * (num_drafts + 1):
        raise ValueError(
            f"settle_drafts: {list(targets.shape)} choices and {list(inputs.token_ids.shape)} tokens; expected "
            f"{num_drafts + 1} of both for each of {rows.shape[1]} requests"
        )
    settled = Settled.empty(rows.shape[1], num_drafts, rows.device)
    chosen = implementation or ("triton" if rows.is_cuda else "reference")
    choose(IMPLEMENTATIONS, (rows,), chosen)(rows, inputs, targets, kept, drafting, chance, settled)
    return settled
