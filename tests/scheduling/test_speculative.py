"""What the scheduler decides where requests have drafts, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.request import FinishReason, Request, RequestStatus, ScheduledBatch
from hookline.scheduling.scheduler import SchedulerError
from hookline.scheduling.speculative import SpeculativeScheduler

SIZE, EOS = 4, 99


def make(blocks: int = 64, **options: Any) -> SpeculativeScheduler:
    options = {"max_batch_tokens": 16, "max_running": 4, "max_model_len": 200, **options}
    return SpeculativeScheduler(BlockPool(blocks, SIZE), **options)


def ask(name: str, prompt: int, **params: Any) -> Request:
    return Request(
        name, [1_000 * ord(name) + i for i in range(prompt)], SamplingParams(**params), 200, frozenset({EOS})
    )


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int, tuple[int, ...]]]:
    return [(part.request.request_id, part.start, part.count, tuple(part.drafts)) for part in batch.requests]


def step(
    scheduler: SpeculativeScheduler, tokens: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]] | None = None
) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """One step that gives these tokens and drafts to the parts that sample."""
    batch = scheduler.schedule()
    scheduler.update(batch, [list(new) for new in tokens])
    scheduler.take_drafts(batch, [()] * batch.num_samples if drafts is None else drafts)
    scheduler.check()
    return shape(batch)


def test_accepted_drafts_count_as_computed_and_rejected_ones_do_not() -> None:
    scheduler, request = make(), ask("a", 5)
    scheduler.add(request)
    assert step(scheduler, [[7]], [[8, 9, 10]]) == [("a", 0, 5, ())]
    assert step(scheduler, [[8, 9, 20]], [[21]]) == [("a", 5, 4, (8, 9, 10))]
    assert (request.computed_tokens, request.output_token_ids) == (8, [7, 8, 9, 20])
    assert step(scheduler, [[30]]) == [("a", 8, 2, (21,))]
    assert request.computed_tokens == 9
    assert step(scheduler, [[31]]) == [("a", 9, 1, ())]


def test_requests_have_different_numbers_of_drafts_beside_prefills() -> None:
    scheduler = make(max_chunk_tokens=6)
    for name, length in (("a", 2), ("b", 2), ("c", 2)):
        scheduler.add(ask(name, length))
    step(scheduler, [[1], [2], [3]], [[5, 6], [], [7]])
    scheduler.add(ask("d", 20))
    batch = scheduler.schedule()
    assert shape(batch) == [("b", 2, 1, ()), ("a", 2, 3, (5, 6)), ("c", 2, 2, (7,)), ("d", 0, 6, ())]
    assert (batch.num_decodes, batch.num_tokens, batch.num_samples, batch.version) == (1, 12, 3, None)


def test_drafts_take_no_block_that_another_needs_for_its_own_token() -> None:
    """The one block that is left goes to the later request, which could not run otherwise."""
    scheduler = make(blocks=3)
    scheduler.add(ask("a", 2, max_tokens=8))
    step(scheduler, [[1]])
    scheduler.add(ask("b", 4, max_tokens=4))
    step(scheduler, [[1], [2]], [[5, 6, 7], []])
    batch = scheduler.schedule()
    assert not batch.preempted
    assert sorted(shape(batch)) == [("a", 3, 1, ()), ("b", 4, 1, ())]


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """Every running request gets its own token first; then those that came first get their drafts."""
    scheduler = make(max_batch_tokens=6)
    for name in "abc":
        scheduler.add(ask(name, 2))
    step(scheduler, [[1], [2], [3]], [[5, 6], [7, 8], [9]])
    assert step(scheduler, [[1]] * 3) == [("c", 2, 1, ()), ("a", 2, 3, (5, 6)), ("b", 2, 2, (7,))]


def test_a_running_prefill_keeps_a_token_of_the_budget() -> None:
    scheduler = make(max_batch_tokens=5)
    scheduler.add(ask("a", 2))
    scheduler.add(ask("b", 20))
    assert step(scheduler, [[1]], [[4, 5, 6, 7, 8]]) == [("a", 0, 2, ()), ("b", 0, 3, ())]
    assert step(scheduler, [[1]]) == [("b", 3, 1, ()), ("a", 2, 4, (4, 5, 6))]


def test_the_most_tokens_cut_the_output() -> None:
    scheduler, request = make(), ask("a", 2, max_tokens=4)
    scheduler.add(request)
    step(scheduler, [[1]], [[5, 6, 7, 8]])
    assert step(scheduler, [[5, 6, 7, 8, 9]], [[9]]) == [("a", 2, 5, (5, 6, 7, 8))]
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.LENGTH, [1, 5, 6, 7])
    assert request.draft_token_ids == ()


def test_no_draft_stands_behind_the_context() -> None:
    scheduler, request = make(max_model_len=6), ask("a", 2)
    scheduler.add(request)
    step(scheduler, [[1]], [[5, 6, 7, 8]])
    assert step(scheduler, [[5, 6, 7, 8]], [[9]]) == [("a", 2, 4, (5, 6, 7))]
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.LENGTH, [1, 5, 6, 7])


@pytest.mark.parametrize(
    ("params", "kept", "reason"),
    [
        ({}, [1, EOS], FinishReason.STOP),
        ({"ignore_eos": True}, [1, EOS, 6, 7], None),
        ({"stop_token_ids": (6,), "ignore_eos": True}, [1, EOS, 6], FinishReason.STOP),
        ({"min_tokens": 2, "stop_token_ids": (6,)}, [1, EOS, 6], FinishReason.STOP),
    ],
)
def test_an_end_inside_the_accepted_run(params: dict[str, Any], kept: list[int], reason: FinishReason | None) -> None:
    scheduler, request = make(), ask("a", 2, **params)
    scheduler.add(request)
    step(scheduler, [[1]], [[EOS, 6]])
    step(scheduler, [[EOS, 6, 7]])
    assert (request.output_token_ids, request.finish_reason) == (kept, reason)


def test_nobody_loses_blocks_for_drafts() -> None:
    scheduler = make(blocks=5)
    for name in "ab":
        scheduler.add(ask(name, 7, max_tokens=5))
    step(scheduler, [[1], [2]], [[5, 6, 7], [8, 9]])
    # The last block goes to the drafts of the first; the second has a place for its next token, and for no draft.
    assert step(scheduler, [[1], [2]]) == [("b", 7, 1, ()), ("a", 7, 4, (5, 6, 7))]
    assert scheduler.num_running == 2


def test_preemption_drops_drafts() -> None:
    scheduler = make(blocks=5)
    first, second = ask("a", 7, max_tokens=9), ask("b", 6, max_tokens=5)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler, [[1], [2]], [[], [8]])
    assert step(scheduler, [[1], [8, 2]], [[], [9, 9]]) == [("a", 7, 1, ()), ("b", 6, 2, (8,))]
    for _ in range(4):  # the first takes the last block, and the second waits for one with what it has
        assert [name for name, *_ in step(scheduler, [[1]])] == ["a"]
        assert (second.status, second.draft_token_ids) == (RequestStatus.RUNNING, (9, 9))
    assert scheduler.schedule().preempted == (second,)
    assert (second.status, second.draft_token_ids) == (RequestStatus.WAITING, ())


def test_places_to_look_ahead() -> None:
    scheduler, request = make(lookahead=3), ask("a", 4)
    scheduler.add(request)
    step(scheduler, [[1]], [[5, 6]])
    assert len(request.block_table) == 2, "4 tokens, and 3 places behind them"
    step(scheduler, [[2]], [[5]])
    assert len(request.block_table) == 3, "7 tokens with drafts, and 3 places behind them"
    step(scheduler, [[2]])
    assert len(request.block_table) == 3


def test_the_cache_has_to_hold_the_look_ahead() -> None:
    scheduler = make(blocks=4, lookahead=3)
    scheduler.add(ask("a", 8, max_tokens=5))
    with pytest.raises(InvalidRequestError, match="up to 6 new ones and 3 drafts need 5 cache blocks"):
        scheduler.add(ask("b", 8, max_tokens=6))


def test_a_lost_step_leaves_its_drafts_for_the_next() -> None:
    scheduler, request = make(), ask("a", 2)
    scheduler.add(request)
    step(scheduler, [[1]], [[5, 6]])
    scheduler.retract(scheduler.schedule())
    assert step(scheduler, [[5, 9]]) == [("a", 2, 3, (5, 6))]
    assert request.computed_tokens == 4


def test_verbs_out_of_turn_are_refused() -> None:
    scheduler = make()
    scheduler.add(ask("a", 2))
    batch = scheduler.schedule()
    scheduler.update(batch, [[1]])
    with pytest.raises(SchedulerError, match="2 lists of drafts for 1 parts"):
        scheduler.take_drafts(batch, [[1], [2]])
    with pytest.raises(SchedulerError, match="leave room for one in flight alone"):
        make(max_in_flight=2)


def test_a_step_ahead_counts_on_all_drafts_and_is_corrected() -> None:
    """Two steps in flight: the second one's place is the farthest there can be, and blocks are there for it."""
    scheduler, request = make(max_in_flight=2, num_drafts=3, lookahead=3), ask("a", 5)
    scheduler.add(request)
    prefill = scheduler.schedule()
    first = scheduler.schedule()
    assert shape(first) == [("a", 5, 4, (-1, -1, -1))]
    scheduler.update(prefill, [[7]])
    scheduler.take_drafts(prefill, [[8, 9, 10]])
    second = scheduler.schedule()
    assert shape(second) == [("a", 9, 4, (-1, -1, -1))]
    assert len(request.block_table) * SIZE >= 9 + 4 + 3
    scheduler.update(first, [[8, 20]])  # one of three
    scheduler.take_drafts(first, [[21, 22, 23]])
    assert (request.output_token_ids, request.computed_tokens, request.pending_tokens) == ([7, 8, 20], 11, 4)
    third = scheduler.schedule()
    assert shape(third) == [("a", 11, 4, (-1, -1, -1))]
    scheduler.update(second, [[21, 22, 23, 30]])
    scheduler.take_drafts(second, [[31, 32, 33]])
    scheduler.update(third, [[31, 40]])
    scheduler.take_drafts(third, [[41, 42, 43]])
    assert (request.computed_tokens, request.num_tokens, request.pending_tokens) == (13, 14, 0)
    assert shape(scheduler.schedule()) == [("a", 13, 4, (41, 42, 43))]
    scheduler.check()


def test_a_step_ahead_waits_where_it_could_be_the_last_or_has_no_room() -> None:
    scheduler, request = make(max_in_flight=2, num_drafts=3), ask("a", 5, max_tokens=2)
    scheduler.add(request)
    prefill = scheduler.schedule()
    step = scheduler.schedule()
    assert shape(step) == [("a", 5, 4, (-1, -1, -1))]
    scheduler.update(prefill, [[7]])
    assert scheduler.schedule().requests == ()  # the step in flight gives its second token
    scheduler.update(step, [[8]])
    assert request.finish_reason is FinishReason.LENGTH

    scheduler, request = make(blocks=3, max_model_len=12, max_in_flight=2, num_drafts=3), ask("b", 7)
    scheduler.add(request)
    prefill = scheduler.schedule()
    scheduler.update(prefill, [[7]])
    scheduler.take_drafts(prefill, [[1, 2, 3]])
    step = scheduler.schedule()
    assert shape(step) == [("b", 7, 4, (1, 2, 3))]
    assert scheduler.schedule().requests == ()  # with all accepted there is no place for another draft
    scheduler.update(step, [[8]])
    scheduler.take_drafts(step, [[4, 5, 6]])
    assert shape(scheduler.schedule()) == [("b", 8, 4, (4, 5, 6))]
    scheduler.check()
