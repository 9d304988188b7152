"""Open and closed loops on a server with a clock of its own: who waits, and how long."""

from __future__ import annotations

import pytest

from hookline.benchmark.measure import Choice
from hookline.benchmark.open_loop import Objectives, Trace, measure_serving, percentile, summarise
from hookline.benchmark.workload import Lengths, poisson_arrivals
from hookline.errors import HooklineError, UsageError
from tests.benchmark.fake_server import FakeServer

LOOSE = Objectives(ttft=10.0, itl=10.0)


def trace(due: float, *reports: float) -> Trace:
    return Trace(due, Lengths(4, len(reports)), list(reports), len(reports))


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert percentile([float(number) for number in range(1, 101)], 0.99) == 99
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_times_of_a_trace() -> None:
    one = trace(1.0, 1.5, 1.75, 2.25)
    assert one.ttft == 0.5
    assert one.gaps == [0.25, 0.5]


def test_goodput_counts_requests_that_keep_both_objectives() -> None:
    objectives = Objectives(ttft=0.5, itl=0.25)
    good, late, slow = trace(0.0, 0.5, 0.75), trace(1.0, 1.6, 1.7), trace(2.0, 2.1, 2.5)
    assert [objectives.kept_by(one) for one in (good, late, slow)] == [True, False, False]
    assert objectives.kept_by(trace(0.0, 0.1))
    found = summarise([good, late, slow], objectives)
    assert (found.good, found.seconds, found.output_tokens) == (1, 2.5, 6)
    assert found.goodput == pytest.approx(0.4)
    assert len(found.gaps) == 3


def test_one_bad_gap_of_many_is_forgiven() -> None:
    steady = [0.1 * number for number in range(1, 200)]
    assert Objectives(1.0, 0.15).kept_by(trace(0.0, *steady, steady[-1] + 5.0))
    assert not Objectives(1.0, 0.15).kept_by(trace(0.0, *steady[:50], steady[49] + 5.0))


def test_requests_come_when_they_are_due_and_wait_from_then() -> None:
    server, rate, count = FakeServer(prefill=0.5, decode=0.1), 1.0, 6
    work = [Lengths(3, 4)] * count
    found = measure_serving(server, 320, work, rate, 0, LOOSE, Choice(), clock=server.clock, sleep=server.sleep)
    dues = poisson_arrivals(count, rate)
    assert server.slept[0] == pytest.approx(dues[0])
    # The first comes to an idle server: one step to its first token, one for each other.
    assert found.ttfts[0] == pytest.approx(0.5)
    assert len(found.ttfts) == count and len(found.gaps) == 3 * count
    assert found.good == count
    assert found.output_tokens == 4 * count
    # Who comes while a step runs waits for its end, and that counts.
    assert max(found.ttfts) > 0.5


def test_a_server_that_falls_behind_shows_it() -> None:
    server = FakeServer(prefill=1.0, decode=1.0)
    work = [Lengths(3, 4)] * 8
    found = measure_serving(server, 320, work, 100.0, 0, LOOSE, Choice(), clock=server.clock, sleep=server.sleep)
    dues = poisson_arrivals(8, 100.0)
    # The first one's step holds up all others, which then share the second.
    assert found.ttfts[1:] == [pytest.approx(2.0 + dues[0] - due) for due in dues[1:]]


def test_warm_up_is_sent_and_not_counted() -> None:
    server = FakeServer(prefill=0.1, decode=0.1)
    work = [Lengths(3, 2)] * 10
    found = measure_serving(server, 320, work, 5.0, 4, LOOSE, Choice(), clock=server.clock, sleep=server.sleep)
    assert len(found.ttfts) == 6
    assert found.output_tokens == 12
    assert len([params for _, params in server.seen if params.max_tokens == 2]) == 8 + 10
    assert found.seconds < server.now - poisson_arrivals(10, 5.0)[3]


def test_an_error_of_a_request_is_told() -> None:
    server = FakeServer(prefill=0.1, decode=0.1, cut=8)
    with pytest.raises(HooklineError, match="request-8 ended with 2 of 3"):
        measure_serving(
            server, 320, [Lengths(3, 3)] * 5, 5.0, 0, LOOSE, Choice(), clock=server.clock, sleep=server.sleep
        )


def test_a_closed_loop_sends_the_next_when_one_ends() -> None:
    server = FakeServer(prefill=0.5, decode=0.1)
    work = [Lengths(3, 4)] * 6
    found = measure_serving(
        server, 320, work, None, 0, LOOSE, Choice(), concurrency=2, clock=server.clock, sleep=server.sleep
    )
    # Pairs run together, each from a prefill's step on, and nobody waits to be sent.
    assert list(found.ttfts) == pytest.approx([0.5] * 6)
    assert list(found.e2els) == pytest.approx([0.8] * 6)
    assert list(found.tpots) == pytest.approx([0.1] * 6)
    assert found.seconds == pytest.approx(2.4)


@pytest.mark.parametrize(("rate", "concurrency"), [(None, None), (1.0, 2)])
def test_a_load_is_open_or_closed(rate: float | None, concurrency: int | None) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        measure_serving(FakeServer(1, 1), 320, [Lengths(3, 4)], rate, 0, LOOSE, Choice(), concurrency=concurrency)
