"""The draft step by step: what it writes, what it reads, and what it must not depend on.

Requests here are driven by hand, so that any number of drafts can be accepted, right or wrong, and every cache entry
looked at. Unused entries hold NaN throughout. Tests whose names end in a fault of other engines are held to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline_glm5_2_mtp.mtp import _rows_of
from tests.glm5_2.drafting import BLOCKS, GROUPS, TOP_K, Drafting, Request, S, Step, prompt

LENGTHS = (1, 5, 11, 12, 13, 30)
TOLERANCE = 2e-5


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.isfinite(found).all()) and torch.allclose(found, expected, rtol=1e-4, atol=TOLERANCE)


def lists_of(step: Step) -> list[list[set[int]]]:
    return [[set(row) - {-1} for row in each.tolist()] for each in step.lists]


def fresh(tokens: list[int], num_drafts: int = 3, **fields: Any) -> tuple[Drafting, Request, Step]:
    """A prefill of all of `tokens` but the last, which is taken as what follows them."""
    other = Drafting(num_drafts, **fields)
    request = other.add(tokens[:-1])
    return other, request, other.step([request], following=tokens[-1:])


@pytest.mark.parametrize("accept", [[0, 1, 2, 3, 0, 1], [3, 3, 3, 3, 3, 3], [0] * 6, [2, 0, 3, 1, 1, 2]])
def test_after_each_step_all_caches_are_those_of_a_fresh_prefill(accept: list[int]) -> None:
    """Rows below L + m + n, whatever was accepted, right or wrong. What is proposed next is the same too."""
    run = Drafting()
    requests = [run.add(prompt(length)) for length in LENGTHS]
    run.step(requests)
    for turn in range(3):
        step = run.step(requests, accept=accept[turn:] + accept[:turn])
        assert step.counts == accept[turn:] + accept[:turn]
        for row in (0, 2, 3, 5) if turn == 2 else (1, 4):
            request = requests[row]
            assert request.computed == len(request.tokens) - 1
            other, same, expected = fresh(request.tokens)
            for group in GROUPS:
                found = run.entries(request, group, request.computed)
                assert close(found, other.entries(same, group, same.computed)), (turn, row, group)
            assert close(step.draft_logits[:, row], expected.draft_logits[:, 0])
            assert [each[row] for each in lists_of(step)] == [each[0] for each in lists_of(expected)]


def test_nan_behind_the_committed_tokens_changes_nothing() -> None:
    """The leftovers of rejected drafts and of draft steps are never read, in no cache and by no step."""
    found = []
    for poisons in (False, True):
        run, steps = Drafting(fill=torch.nan if poisons else 0.0), []
        requests = [run.add(prompt(length)) for length in LENGTHS]
        for accept in ([0] * 6, [1, 0, 2, 3, 0, 1], [0] * 6, [3] * 6, [2] * 6):
            if poisons:
                for request in requests:
                    run.poison(request, request.computed)
            steps.append(run.step(requests, accept))
        found.append(steps)
    for clean, poisoned in zip(*found, strict=True):
        assert torch.equal(clean.logits, poisoned.logits)
        assert torch.equal(clean.draft_logits, poisoned.draft_logits)
        assert all(torch.equal(*pair) for pair in zip(clean.lists, poisoned.lists, strict=True))


@pytest.mark.parametrize("value", [torch.nan, 1e4])
def test_later_draft_steps_do_not_depend_on_rows_behind_the_last_accepted_one(value: float) -> None:
    """Not on those of rejected drafts, which step 0 has just written, and not on those of the steps before."""
    found = []
    for poisons in (False, True):
        run = Drafting(5)
        requests = [run.add(prompt(length)) for length in LENGTHS]
        run.step(requests)

        def before(call: int) -> None:
            if call >= 1:
                for request in requests:  # noqa: B023
                    run.poison(request, request.computed, ("draft_latent", "draft_index"), value)  # noqa: B023

        if poisons:
            run.watch.before = before
        found.append(run.step(requests, accept=[0, 1, 2, 3, 0, 1]).draft_logits)
    assert torch.equal(*found)


def test_pitfall_state_before_the_norm_carried_on() -> None:
    """Pitfall: the state before the norm is recycled. The state that goes in gives the logits of the step before."""
    run = Drafting(4)
    proposer: Any = run.proposer
    join, given = proposer._join, []
    proposer._join = lambda ids, hidden: (given.append((ids, hidden)), join(ids, hidden))[1]
    requests = [run.add(prompt(length)) for length in LENGTHS]
    step = run.step(requests)
    assert len(given) == 4
    for number, (ids, hidden) in enumerate(given[1:]):
        assert torch.equal(ids, step.drafts[:, number])
        assert torch.equal(run.model.compute_logits(hidden), step.draft_logits[number])


def test_the_first_state_is_after_the_targets_last_norm() -> None:
    run = Drafting()
    proposer: Any = run.proposer
    join, given = proposer._join, []
    proposer._join = lambda ids, hidden: (given.append(hidden), join(ids, hidden))[1]
    step = run.step([run.add(prompt(13)), run.add(prompt(4))])
    assert torch.equal(run.model.compute_logits(given[0]), step.logits)


def test_pitfall_where_the_shared_list_is_taken_one_row_a_request() -> None:
    """Pitfalls: the list of another row, or lists that are not brought to one a request before the later steps."""
    run = Drafting()
    requests = [run.add(prompt(length)) for length in LENGTHS]
    run.step(requests)
    accept = [0, 1, 2, 3, 0, 1]
    step = run.step(requests, accept)
    every = run.watch.calls[0][2]
    assert every is not None and len(every) == 4 * len(requests)
    for given in step.lists:
        for row, n in enumerate(accept):
            assert torch.equal(given[row], every[4 * row + n])
    for row in (2, 3, 4, 5):
        _, _, alone = fresh(requests[row].tokens)
        assert lists_of(step)[0][row] == lists_of(alone)[0][0]
        assert close(step.draft_logits[:, row], alone.draft_logits[:, 0])


def test_no_own_position_is_added_and_short_contexts_are_not_dense() -> None:
    """Pitfalls: later steps that see themselves or each other, and a switch to all positions in short contexts."""
    run = Drafting(5)
    requests = [run.add(prompt(length)) for length in LENGTHS]
    run.step(requests)
    step = run.step(requests, accept=[2, 0, 3, 1, 1, 2])
    assert len(step.lists) == 4
    for given in lists_of(step):
        for request, seen in zip(requests, given, strict=True):
            assert max(seen) < request.computed
            assert len(seen) == min(request.computed, TOP_K)
    assert (step.lists[0] == -1).any()
    assert all(torch.equal(step.lists[0], other) for other in step.lists[1:])


def test_pitfall_the_targets_list_in_the_draft() -> None:
    """Pitfall: the target's list is used in the draft."""
    run = Drafting()
    target, made = run.model.attention, []

    def spy(*args: Any, **places: Any) -> Any:
        result = target(*args, **places)
        made.append(result[1])
        return result

    run.model.attention = spy  # type: ignore[assignment]
    request = run.add(prompt(40))
    step = run.step([request])
    assert lists_of(step)[0][0] != set(made[-1][-1].tolist())


def test_each_row_stands_at_the_position_of_its_state() -> None:
    """Row i has the state of position i and the token after it; later rows follow the last accepted one."""
    run = Drafting(4)
    requests = [run.add(prompt(length)) for length in LENGTHS]
    run.step(requests)
    begin = [request.computed for request in requests]
    step = run.step(requests, accept=[0, 1, 2, 3, 4, 1])
    first, *later = step.batches
    assert first.positions.tolist() == [start + place for start in begin for place in range(5)]
    for number, batch in enumerate(later, start=1):
        expected = [request.computed - 1 + number for request in requests]
        assert batch.positions.tolist() == expected
        assert batch.context_lens.tolist() == [position + 1 for position in expected]
        assert batch.query_starts.tolist() == list(range(len(requests) + 1))


def test_pitfall_index_keys_of_later_steps() -> None:
    """The index keys of those rows are written by the next step 0, before anything reads them."""
    run = Drafting(4)
    requests = [run.add(prompt(length)) for length in LENGTHS]
    step = run.step(requests)
    for request in requests:
        end = request.computed
        latents = run.entries(request, "draft_latent", end + 4, end)
        assert torch.isfinite(latents[:, :3]).all() and latents[:, 3].isnan().all()
        assert run.entries(request, "draft_index", end + 4, end).isnan().all()
        assert torch.isfinite(run.entries(request, "draft_index", end)).all()
    assert len(step.lists) == 3
    run.step(requests, accept=[4] * 6)
    for request in requests:
        assert torch.isfinite(run.entries(request, "draft_index", request.computed)).all()


@pytest.mark.parametrize("chunk", [1, 5, 8, 12])
def test_chunks_of_a_prefill_use_the_prompts_own_next_token(chunk: int) -> None:
    """Also beside requests that decode. The caches are those of the prefill in one piece."""
    run = Drafting()
    decoding = run.add(prompt(7), room=100)
    run.step([decoding])
    request = run.add(prompt(30))
    steps = 0
    while request.computed < 30:
        step = run.step([decoding, request], accept=[steps % 4, 0], chunk=chunk, following=[3, 5])
        steps += 1
    assert steps == -(-30 // chunk)
    other, same, expected = fresh([*prompt(30), 5])
    for group in GROUPS:
        assert close(run.entries(request, group, 30), other.entries(same, group, 30)), group
    assert close(step.draft_logits[:, 1], expected.draft_logits[:, 0])
    other, same, _ = fresh(decoding.tokens)
    for group in GROUPS:
        assert close(run.entries(decoding, group, decoding.computed), other.entries(same, group, same.computed)), group


def test_pitfall_padded_rows_of_a_captured_step() -> None:
    """Pitfall: padded rows with zero or stale lengths read or write where they must not."""
    found = []
    for padding in (0, 3):
        run = Drafting()
        requests = [run.add(prompt(length)) for length in LENGTHS]
        steps = [run.step(requests, accept, padding=padding) for accept in (None, [0, 1, 2, 3, 0, 1], [3] * 6)]
        held = {block for request in requests for block in request.table}
        free = [block for block in range(BLOCKS) if block not in held]
        assert all(tensor[free].isnan().all() for tensor in run._tensors())
        for step in steps:
            assert all((batch.slots[len(requests) :] == -1).all() for batch in step.batches[1:])
            assert all((batch.context_lens[len(requests) :] == 0).all() for batch in step.batches[1:])
        found.append(steps)
    for plain, padded in zip(*found, strict=True):
        assert close(padded.draft_logits, plain.draft_logits)
        assert torch.equal(padded.drafts, plain.drafts)


def test_fewer_drafts_are_the_first_of_more() -> None:
    most = {}
    for num_drafts in (5, 3, 2, 1):
        run = Drafting(num_drafts)
        step = run.step([run.add(prompt(length)) for length in LENGTHS])
        assert step.drafts.shape == (len(LENGTHS), num_drafts) and step.drafts.dtype == torch.int64
        most.setdefault("logits", step.draft_logits)
        assert torch.equal(step.draft_logits, most["logits"][:num_drafts])


def test_without_a_shared_list_each_step_makes_its_own() -> None:
    """Checkpoints that do not share it: the indexer runs in every step, and sees the row itself."""
    run = Drafting(3, index_share_for_mtp_iteration=False)
    request = run.add(prompt(6))
    run.step([request])
    step = run.step([request], accept=[1])
    made = [set(rows[0].tolist()) - {-1} for _, _, rows in run.watch.calls[1:] if rows is not None]
    assert not step.lists and made == [set(range(request.computed + 1)), set(range(request.computed + 2))]
    assert torch.isfinite(run.entries(request, "draft_index", request.computed + 2)).all()


def test_draft_steps_behind_the_block_table_write_nowhere() -> None:
    """As in the last step of a request that fills its table. What is proposed is the same."""
    found = []
    for room in (32, 0):
        run = Drafting(5)
        requests = [run.add(prompt(2 * S), room)]
        found.append(run.step(requests).draft_logits)
        held = {block for request in requests for block in request.table}
        free = [block for block in range(BLOCKS) if block not in held]
        assert all(tensor[free].isnan().all() for tensor in run._tensors())
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_a_whole_step_is_one_graph() -> None:
    """Target, gathering and all draft steps; replayed with other numbers of accepted drafts and other tokens."""
    run = Drafting(3, device="cuda")
    requests = [run.add(prompt(length)) for length in LENGTHS]
    run.step(requests)
    forward, _ = run.batch(requests, 1000, 2)
    starts = forward.query_starts[:-1].long()
    last_rows, tokens = starts.clone(), torch.full_like(forward.token_ids, 7)

    def whole() -> tuple[torch.Tensor, torch.Tensor]:
        return run._propose(forward, run.model.forward(forward), tokens, last_rows)

    whole()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts, logits = whole()
    for accept in ([0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 0, 1, 0, 0], [3, 3, 3, 3, 3, 3, 0, 0]):
        last_rows.copy_(starts + torch.tensor(accept, device="cuda"))
        tokens.add_(1)
        graph.replay()
        found = drafts[: len(requests)].clone(), logits[:, : len(requests)].clone()
        expected = whole()
        assert torch.equal(found[0], expected[0][: len(requests)])
        assert torch.allclose(found[1], expected[1][:, : len(requests)], rtol=1e-4, atol=1e-4)


def test_a_batch_of_nothing_proposes_nothing() -> None:
    run = Drafting()
    forward, _ = run.batch([run.add([1])], 1000, 0)
    none = {name: getattr(forward, name)[:0] for name in ("token_ids", "positions", "slots", "context_lens")}
    empty = replace(forward, **none, block_tables=forward.block_tables[:0], query_starts=forward.query_starts[:1])
    hidden = torch.empty((0, run.model.config.hidden_size))
    drafts, _ = run._propose(empty, hidden, empty.token_ids, empty.token_ids)
    assert drafts.shape == (0, 3)


@pytest.mark.parametrize("lengths", [None, 7])
def test_the_rows_of_draft_steps_are_made_without_waiting_for_the_device(lengths: int | None) -> None:
    """A tensor on the meta device has no values, so that whatever reads one on the host fails."""
    run = Drafting()
    forward, _ = run.batch([run.add(prompt(5)), run.add(prompt(9))], 1000, 1)
    if lengths is not None:
        forward = replace(forward, rope_lengths=torch.full((15,), lengths))
    last_rows = torch.tensor([4, 13, 14])
    rows = _rows_of(forward, last_rows, 4)
    assert [batch.positions.tolist() for batch in rows] == [[4 + i, 8 + i, 0] for i in range(4)]
    if lengths is not None:
        found = [batch.rope_lengths.tolist() for batch in rows if batch.rope_lengths is not None]
        assert found == [[max(7, 5 + i), max(7, 9 + i), 7] for i in range(4)]
    tensors = {
        name: value.to("meta")
        for name in forward.__dataclass_fields__
        if isinstance(value := getattr(forward, name), torch.Tensor)
    }
    without = _rows_of(replace(forward, **tensors), last_rows.to("meta"), 4)
    assert [batch.slots.shape for batch in without] == [batch.slots.shape for batch in rows]
    assert all(batch.slots.dtype == torch.int64 for batch in without)
