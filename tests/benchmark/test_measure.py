"""Closed measures on a server with a clock of its own: the arithmetic is judged, not the machine."""

from __future__ import annotations

import pytest

from hookline.benchmark.measure import (
    TIMED_STEPS,
    Choice,
    Latency,
    Throughput,
    measure_latency,
    measure_prefill,
    measure_steps,
    measure_throughput,
    settling_steps,
)
from hookline.benchmark.workload import Lengths
from hookline.errors import HooklineError
from tests.benchmark.fake_server import FakeServer


def test_tpot_is_the_time_after_the_first_token() -> None:
    found = Latency(first=0.5, whole=2.0, batch=4, output=16)
    assert found.tpot == pytest.approx(0.1)
    assert found.decode_rate == pytest.approx(40.0)


def test_latency_of_known_steps() -> None:
    server, said = FakeServer(prefill=0.25, decode=0.01), list[str]()
    length = Lengths(7, 11)
    found = measure_latency(server, 320, 3, length, 2, Choice(), clock=server.clock, say=said.append)
    assert (found.first, found.whole) == (pytest.approx(0.25), pytest.approx(0.35))
    assert found.tpot == pytest.approx(0.01)
    assert len(said) == 2
    # A short run that does not count, then one token and all tokens in turn.
    wanted = [params.max_tokens for _, params in server.seen]
    assert wanted == [3] * 3 + ([1] * 3 + [11] * 3) * 2
    assert all(params.ignore_eos and params.temperature == 0 for _, params in server.seen)
    assert all(len(prompt) == 7 for prompt, _ in server.seen)


def test_the_best_repeat_counts() -> None:
    server = FakeServer(prefill=1.0, decode=0.1)

    def faster(text: str) -> None:
        server.prefill, server.decode = 0.5, 0.05

    found = measure_latency(server, 320, 1, Lengths(4, 5), 3, Choice(), clock=server.clock, say=faster)
    assert (found.first, found.whole) == (pytest.approx(0.5), pytest.approx(0.7))


def test_prefill_alone() -> None:
    server = FakeServer(prefill=0.25, decode=0.01)
    assert measure_prefill(server, 320, 2, 9, 2, clock=server.clock) == pytest.approx(0.25)


def test_throughput_counts_all_tokens_once() -> None:
    server = FakeServer(prefill=0.5, decode=0.1)
    work = [Lengths(5, 6), Lengths(9, 3)]
    found = measure_throughput(server, 320, work, Choice(), clock=server.clock)
    assert found == Throughput(pytest.approx(1.0), 2, 14, 9)
    assert (found.output_rate, found.request_rate) == (pytest.approx(9.0), pytest.approx(2.0))


def test_draws_have_seeds_of_their_own() -> None:
    server = FakeServer(prefill=0.5, decode=0.1)
    choice = Choice(temperature=0.8, top_p=0.95)
    measure_throughput(server, 320, [Lengths(4, 4)] * 3, choice, clock=server.clock)
    counted = [params for _, params in server.seen][3:]
    assert [params.seed for params in counted] == [0, 1, 2]
    assert {(params.temperature, params.top_p) for params in counted} == {(0.8, 0.95)}


def test_a_request_that_ends_early_makes_the_measure_void() -> None:
    server = FakeServer(prefill=0.5, decode=0.1, cut=4)
    with pytest.raises(HooklineError, match="request-4 ended with 5 of 6 tokens"):
        measure_throughput(server, 320, [Lengths(4, 6)] * 3, Choice(), clock=server.clock)


def test_steps_are_timed_when_every_request_decodes() -> None:
    server = FakeServer(prefill=1.0, decode=0.02)
    found = measure_steps(server, 320, 3, 7, 2, Choice(), drafts=0, budget=512, room=512, clock=server.clock)
    assert (found.seconds, found.tokens, found.tpot) == (pytest.approx(0.02), 3, found.seconds)
    settled = settling_steps(3, 7, 0, 512)
    assert found.context == 7 + settled + TIMED_STEPS
    assert not server.has_work


def test_steps_count_the_drafts_that_they_accept() -> None:
    server = FakeServer(prefill=1.0, decode=0.03, drafts=3, accepted=(0, 3, 1, 2))
    found = measure_steps(server, 320, 2, 7, 2, Choice(), drafts=3, budget=512, room=4096, clock=server.clock)
    assert (found.drafts, found.accepted, found.tokens) == (3.0, 1.5, 5.0)
    assert found.tpot == pytest.approx(0.03 / 2.5)
    settled = settling_steps(2, 7, 3, 512)
    assert found.context == pytest.approx(7 + 2.5 * (settled + TIMED_STEPS), abs=3)


def test_fewer_steps_are_timed_where_there_is_room_for_no_more() -> None:
    server = FakeServer(prefill=1.0, decode=0.03, drafts=3, accepted=(3,))
    found = measure_steps(server, 320, 1, 8, 2, Choice(), drafts=3, budget=512, room=8 + 4 * 15, clock=server.clock)
    assert found.seconds == pytest.approx(0.03)
    with pytest.raises(HooklineError, match="leaves room for 0"):
        measure_steps(server, 320, 1, 8, 2, Choice(), drafts=3, budget=512, room=40, clock=server.clock)


def test_steps_in_which_a_request_was_missing_are_void() -> None:
    server = FakeServer(prefill=1.0, decode=0.03, drafts=1, accepted=(9,))
    with pytest.raises(HooklineError, match="length"):
        measure_steps(server, 320, 1, 7, 1, Choice(), drafts=1, budget=512, room=4096, clock=server.clock)
    assert not server.has_work
