"""What the scheduler decides, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockLedgerError, BlockPool
from hookline.scheduling.request import FinishReason, Request, RequestStatus, ScheduledBatch
from hookline.scheduling.scheduler import ADMIT_AFTER, Scheduler, SchedulerError

SIZE, EOS = 4, 99


def make(blocks: int = 64, caching: bool = True, **options: Any) -> Scheduler:
    options = {"max_batch_tokens": 16, "max_running": 4, "max_model_len": 200, **options}
    return Scheduler(BlockPool(blocks, SIZE, caching), **options)


def ask(name: str, prompt: int | list[int], **params: Any) -> Request:
    """A request; a number asks for a prompt of so many tokens that no other name shares."""
    tokens = [1_000 * ord(name) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(**params), 200, frozenset({EOS}))


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int, bool]]:
    return [(part.request.request_id, part.start, part.count, part.samples) for part in batch.requests]


def step(scheduler: Scheduler, *tokens: int) -> list[tuple[str, int, int, bool]]:
    """Run one step in which each part that samples gets the next of `tokens`, or 7."""
    batch = scheduler.schedule()
    rest = iter(tokens)
    scheduler.update(batch, [[next(rest, 7)] for part in batch.requests if part.samples])
    scheduler.check()
    return shape(batch)


def test_decodes_first_then_running_prefills_then_new_ones() -> None:
    scheduler = make(max_chunk_tokens=6)
    for name, length in (("a", 3), ("b", 20)):
        scheduler.add(ask(name, length))
    assert step(scheduler) == [("a", 0, 3, True), ("b", 0, 6, False)]
    scheduler.add(ask("c", 20))
    assert step(scheduler) == [("a", 3, 1, True), ("b", 6, 6, False), ("c", 0, 6, False)]
    scheduler.add(ask("d", 9))
    assert step(scheduler) == [("a", 4, 1, True), ("b", 12, 6, False), ("c", 6, 6, False), ("d", 0, 3, False)]
    assert step(scheduler) == [("a", 5, 1, True), ("b", 18, 2, True), ("c", 12, 6, False), ("d", 3, 6, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 0)


def test_a_chunk_of_one_token_stands_among_the_decodes() -> None:
    scheduler = make(max_batch_tokens=4)
    scheduler.add(ask("a", 3))
    scheduler.add(ask("b", 8))
    batch = scheduler.schedule()
    assert shape(batch) == [("b", 0, 1, False), ("a", 0, 3, True)]
    assert (batch.num_decodes, batch.num_tokens) == (1, 4)
    assert [(r.request_id, kept) for r, kept in scheduler.update(batch, [[7]])] == [("a", [7])]


def test_no_more_run_than_allowed() -> None:
    scheduler = make(max_running=2)
    for name in "abc":
        scheduler.add(ask(name, 2, max_tokens=2))
    assert [part[0] for part in step(scheduler)] == ["a", "b"]
    assert [part[0] for part in step(scheduler)] == ["a", "b"]
    assert [part[0] for part in step(scheduler)] == ["c"]


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop_token"),
    [
        ({}, [5, EOS], [5, EOS], FinishReason.STOP, EOS),
        ({"ignore_eos": True, "max_tokens": 3}, [5, EOS, 6], [5, EOS, 6], FinishReason.LENGTH, None),
        ({"stop_token_ids": (6,)}, [5, 6], [5, 6], FinishReason.STOP, 6),
        ({"stop_token_ids": (6,), "ignore_eos": True}, [EOS, 6], [EOS, 6], FinishReason.STOP, 6),
        ({"min_tokens": 2}, [EOS, EOS, EOS], [EOS, EOS, EOS], FinishReason.STOP, EOS),
        ({"max_tokens": 1}, [5], [5], FinishReason.LENGTH, None),
        ({"max_tokens": 1}, [EOS], [EOS], FinishReason.STOP, EOS),
    ],
)
def test_ends_by_token(
    params: dict[str, Any], tokens: list[int], kept: list[int], reason: FinishReason, stop_token: int | None
) -> None:
    for pieces in ([[token] for token in tokens], [[*tokens, 8, EOS]]):
        scheduler = make()
        request = ask("a", 3, **params)
        scheduler.add(request)
        for piece in pieces:
            assert request.status is not RequestStatus.FINISHED
            ((got, new),) = scheduler.update(scheduler.schedule(), [piece])
            assert got is request and request.output_token_ids[-len(new) :] == new
        assert (request.output_token_ids, request.finish_reason) == (kept, reason)
        assert request.stop_token_id == stop_token
        assert not scheduler.has_work and request.block_table == []


def test_max_total_tokens_ends_a_request() -> None:
    scheduler = make(max_model_len=10)
    first, second = ask("a", 3), replace(ask("b", 3), max_total_tokens=5)
    scheduler.add(first)
    scheduler.add(second)
    while scheduler.has_work:
        step(scheduler)
    assert (first.num_tokens, second.num_tokens) == (10, 5)
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH


def test_a_second_request_takes_the_cached_prefix() -> None:
    scheduler = make()
    scheduler.add(ask("a", list(range(10)), max_tokens=4))
    while scheduler.has_work:
        step(scheduler, 50)
    again = ask("b", [*range(10), 50, 50, 1])
    scheduler.add(again)
    assert step(scheduler) == [("b", 12, 1, True)]
    assert again.cached_tokens == 12
    logits = ask("c", [*range(10), 50, 50, 1], prompt_logprobs=0)
    scheduler.add(logits)
    assert step(scheduler)[1] == ("c", 0, 13, True)
    assert logits.cached_tokens == 0


def test_blocks_are_reusable_while_their_request_runs_whatever_the_chunks() -> None:
    for chunk in (1, 3, 5, 16):
        scheduler = make(max_chunk_tokens=chunk)
        scheduler.add(ask("a", list(range(15))))
        while step(scheduler)[0][1] < 16:
            pass
        twin = ask("b", [*range(15), 7, 1])
        scheduler.add(twin)
        step(scheduler)
        assert twin.cached_tokens == 16


def test_the_last_come_gives_way_and_loses_no_token() -> None:
    scheduler = make(blocks=5, caching=False)
    first, second = ask("a", 7, max_tokens=12), ask("b", 5, max_tokens=12)
    scheduler.add(first)
    scheduler.add(second)
    third = ask("c", 1, max_tokens=1)
    step(scheduler, 1, 2)
    scheduler.add(third)
    outputs = {"a": [1], "b": [2]}
    preempted: list[str] = []
    for token in range(10, 60):
        if not scheduler.has_work:
            break
        batch = scheduler.schedule()
        preempted += [request.request_id for request in batch.preempted]
        if batch.preempted:
            assert scheduler.num_waiting >= 1 and second.block_table == [] and second.computed_tokens == 0
        sampled = [[token + i] for i in range(sum(part.samples for part in batch.requests))]
        for request, new in scheduler.update(batch, sampled):
            outputs.setdefault(request.request_id, []).extend(new)
        scheduler.check()
    assert preempted == ["b"] and second.preemptions == 1
    assert [len(outputs[name]) for name in "abc"] == [12, 12, 1]
    assert (first.output_token_ids, second.output_token_ids) == (outputs["a"], outputs["b"])


def test_a_preempted_request_finds_its_blocks_again() -> None:
    scheduler = make(preempt_every=4)
    request = ask("a", 9, max_tokens=6)
    scheduler.add(request)
    starts = []
    while scheduler.has_work:
        starts.append(step(scheduler)[0][1:3])
    assert starts == [(0, 9), (9, 1), (10, 1), (8, 4), (12, 1), (13, 1)]
    assert (request.preemptions, request.cached_tokens) == (1, 0)


def test_forced_preemption_never_stops_progress() -> None:
    for every in (1, 2, 3):
        scheduler = make(preempt_every=every, max_chunk_tokens=1, caching=False)
        requests = [ask(name, 5, max_tokens=4) for name in "ab"]
        for request in requests:
            scheduler.add(request)
        steps = 0
        while scheduler.has_work:
            step(scheduler)
            steps += 1
            assert steps < 200
        assert requests[1].preemptions > 0
        assert all(len(request.output_token_ids) == 4 for request in requests)


def test_one_who_was_preempted_waits_until_all_its_tokens_fit() -> None:
    scheduler = make(blocks=12, caching=False, max_batch_tokens=64)
    requests = [ask(name, 12, max_tokens=24) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    computed = 0
    while scheduler.has_work:
        computed += sum(part[2] for part in step(scheduler))
    assert sum(request.preemptions for request in requests) == 2
    assert computed < 1.5 * 3 * 36


def test_nobody_comes_in_while_blocks_are_short() -> None:
    scheduler = make(blocks=4, caching=False)
    scheduler.add(ask("a", 8, max_tokens=8))
    assert step(scheduler) == [("a", 0, 8, True)]
    scheduler.add(ask("b", 16 - 1, max_tokens=1))
    assert step(scheduler) == [("a", 8, 1, True)]
    for _ in range(6):
        assert [part[0] for part in step(scheduler)] == ["a"]
    assert step(scheduler) == [("b", 0, 15, True)]


def test_an_older_prefill_takes_blocks_back_from_a_younger_decode() -> None:
    scheduler = make(blocks=8, caching=False, max_chunk_tokens=5)
    scheduler.add(ask("a", 28, max_tokens=1))
    scheduler.add(ask("b", 4, max_tokens=20))
    batches = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        batches.append(batch)
        assert batch.num_tokens == sum(part.count for part in batch.requests)
        scheduler.update(batch, [[7] for part in batch.requests if part.samples])
        scheduler.check()
    assert [[r.request_id for r in batch.preempted] for batch in batches if batch.preempted] == [["b"]]


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding", "preempted", "in flight"])
def test_abort_gives_everything_back(moment: str) -> None:
    scheduler = make(max_chunk_tokens=3, preempt_every=3 if moment == "preempted" else None)
    request = ask("a", 6)
    scheduler.add(request)
    scheduler.add(other := ask("b", 6))
    if moment == "waiting":
        assert scheduler.abort("b") is other
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 4, "preempted": 3, "in flight": 3}[moment]):
        step(scheduler)
    batch = scheduler.schedule() if moment == "in flight" else None
    assert scheduler.abort("a") is request and scheduler.abort("a") is None
    assert request.finish_reason is FinishReason.ABORT
    if batch is not None:
        assert request.block_table != [], "the step in flight still needs them"
        assert [kept for _, kept in scheduler.update(batch, [[], [7]])] == [[], [7]]
    assert request.block_table == []
    scheduler.check()
    scheduler.abort("b")
    assert not scheduler.has_work and scheduler._pool.num_referenced == 0


def test_a_lost_step_ends_its_requests_alone() -> None:
    scheduler = make(max_running=2)
    requests = [ask(name, 3) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    scheduler.abort("b")
    assert scheduler.fail(batch) == [requests[0]]
    assert [request.finish_reason for request in requests] == [FinishReason.ERROR, FinishReason.ABORT, None]
    scheduler.check()
    assert step(scheduler) == [("c", 0, 3, True)]


def test_a_step_that_did_not_happen_is_scheduled_anew() -> None:
    scheduler = make(max_running=2)
    for name in "abc":
        scheduler.add(ask(name, 3))
    step(scheduler)
    batch = scheduler.schedule()
    scheduler.abort("b")
    scheduler.retract(batch)
    scheduler.check()
    with pytest.raises(SchedulerError, match="not the newest step in flight"):
        scheduler.retract(batch)
    assert step(scheduler) == [("a", 3, 1, True), ("c", 0, 3, True)]


def test_verbs_out_of_turn_are_refused() -> None:
    scheduler = make()
    assert scheduler.schedule().requests == () and scheduler.schedule().requests == ()
    request = ask("a", 3)
    with pytest.raises(SchedulerError, match="never added"):
        scheduler.finish(request, FinishReason.STOP)
    scheduler.add(request)
    batch = scheduler.schedule()
    with pytest.raises(SchedulerError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(SchedulerError, match="not the oldest step"):
        scheduler.update(ScheduledBatch((), 0, 0), [])
    with pytest.raises(SchedulerError, match="2 lists of sampled tokens for 1"):
        scheduler.update(batch, [[1], [2]])
    assert (request.computed_tokens, request.pending_tokens) == (3, 1)
    scheduler.update(batch, [[]])
    with pytest.raises(SchedulerError, match="'a' got no token"):
        scheduler.schedule()
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add(ask("a", 3))
    scheduler.abort("a")
    with pytest.raises(SchedulerError, match="is finished"):
        scheduler.add(request)


def test_check_sees_a_block_with_a_second_owner() -> None:
    scheduler = make()
    requests = [ask(name, 3) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    requests[0].block_table.append(requests[1].block_table[0])
    with pytest.raises(BlockLedgerError, match=r"has 1 references and stands in the tables of \['a', 'b'\]"):
        scheduler.check()


def test_requests_are_let_in_together() -> None:
    """With two seats in four wanted, one that is free stays so until another is, or for so many steps."""
    scheduler = make(max_running=4, admit_together=2)
    for name in "abcdef":
        scheduler.add(ask(name, 3))
    assert [part[0] for part in step(scheduler)] == ["a", "b", "c", "d"]
    scheduler.abort("a")
    assert [part[0] for part in step(scheduler)] == ["b", "c", "d"]
    scheduler.abort("b")
    assert [part[0] for part in step(scheduler)] == ["c", "d", "e", "f"]
    scheduler.add(ask("g", 3))
    scheduler.abort("c")
    held = 0
    while "g" not in [part[0] for part in step(scheduler)]:
        held += 1
    assert held == ADMIT_AFTER
    scheduler.add(ask("h", 3))
    for name in "defg":
        scheduler.abort(name)
    assert [part[0] for part in step(scheduler)] == ["h"], "held back with nobody running"
