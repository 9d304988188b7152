"""The frame itself: what a report must not let pass, and what the invariants must find."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline.scheduling.request import Request
from hookline.serving.process import messages
from tests.suites import clock, invariants, soak
from tests.suites.__main__ import _run_lanes, main
from tests.suites.faults import Fault, installed
from tests.suites.invariants import Census, Resources, idle_faults
from tests.suites.registry import LANES, SUITES
from tests.suites.report import SuiteReport, Tally, Tier, page
from tests.suites.rig import DrivenLoop, small_engine, tiny_model
from tests.suites.watched_engine import WatchedLoop
from tests.suites.watched_front import LOOKS


def test_a_suite_that_forced_nothing_has_failed() -> None:
    tally = Tally("T", Tier.T1, 0, 1, ["preemptions", "aborts"])
    with tally.case("one"):
        tally.event("aborts")
    report = tally.report()
    assert report.faults == ["the forced event 'preemptions' never occurred"]
    tally.event("preemptions", 3)
    assert tally.report().faults == []
    assert Tally("T", Tier.T1, 0, 2, []).report().faults == ["0 of 2 cases ran"]


def test_an_error_in_a_case_is_its_failure_and_the_page_tells_all() -> None:
    tally = Tally("T", Tier.T1, 7, 100, ["aborts"])
    for number in range(20):
        with tally.case(f"case {number}"):
            raise ValueError("broken")
    report = SuiteReport.from_json(tally.report().to_json())
    assert report == SuiteReport.from_json(report.to_json()) and report.failed == 20
    text = "\n".join(page([report]))
    assert "T      T1    20 / 100" in text and "aborts 0" in text and "case 0: ValueError: broken" in text
    assert "and 8 more" in text


def test_the_page_says_what_is_left_of_the_plan_and_why() -> None:
    def told(suite: str, tier: Tier, planned: int) -> str:
        return page([Tally(suite, tier, 0, planned, []).report()])[-2]

    assert "K1 at T2: planned: 100; cut to 48: there are no worker ranks yet" in told("K1", Tier.T2, 48)
    assert told("G1", Tier.T2, 99).endswith("planned: 20,040; cut to 99: nobody says why")
    assert "planned:" not in told("G1", Tier.T2, 20_040) and "planned:" not in told("T", Tier.T1, 0)


def test_suites_in_lanes_are_told_on_one_page_and_none_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    every = [name for lane in LANES for name in lane]
    assert len(set(every)) == len(every) and set(every) < set(SUITES)
    assert main(["--lanes", "--suite", "S2"]) == 0
    assert "1 suites, 4 cases" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="the process of S2, no suite ended with 0 reports of 2"):
        list(_run_lanes([["S2", "no suite"]], Tier.T1, 0))


def test_a_soak_tells_growth_from_noise() -> None:
    rng = random.Random(0)
    noisy = [(number, 10**8 + rng.randrange(10**6)) for number in range(0, 50_000, 100)]
    assert abs(soak.upper_slope(noisy)) < 10
    assert soak.upper_slope([(number, value + 100 * number) for number, value in noisy]) > 95
    seconds = [rng.uniform(0.1, 0.2) for _ in range(4_000)]
    calm = soak.usual_slowest(seconds)
    assert 0.19 < calm < 0.2
    assert soak.usual_slowest([*seconds[:500], *([9.0] * 500), *seconds[1_000:]]) < 1.05 * calm
    assert soak.usual_slowest([1.3 * each for each in seconds]) > 1.2 * calm


def test_the_command_says_by_its_exit_code_whether_all_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--suite", "S2", "--seed", "3"]) == 0
    monkeypatch.setattr(clock, "idle_faults", lambda loop: ["I1: a block is left"])
    assert main(["--suite", "S2"]) == 1
    assert "S2 FAILED" in capsys.readouterr().out


@pytest.fixture
def model() -> Iterator[Path]:
    with tiny_model() as folder:
        yield folder


def test_idle_faults_see_what_is_left_over(model: Path) -> None:
    loop = DrivenLoop(small_engine(model, overlap=True))
    loop.serve([[1, 2, 3]], max_tokens=3, ignore_eos=True)
    assert idle_faults(loop) == []
    held = loop.engine.pool.allocate(1) or []
    assert len(idle_faults(loop)) == 2  # its reference, and that nobody has it
    loop.engine.pool.release(held)
    loop.sent.add(99)
    assert idle_faults(loop) == ["I3: requests [99] never ended"]
    loop.sent.clear()
    loop.engine._runner.batch._free.pop()  # type: ignore[attr-defined]
    assert idle_faults(loop) == ["I4: 15 of 16 slots are free, or some twice"]


def test_the_census_counts_requests_that_somebody_keeps(model: Path) -> None:
    census = Census()
    engine = small_engine(model)
    kept: list[object] = []
    add = engine.scheduler.add

    def keep(request: Request) -> None:
        kept.append(request)
        add(request)

    engine.scheduler.add = keep  # type: ignore[method-assign]
    DrivenLoop(engine).serve([[number] for number in range(1, 9)], max_tokens=2)
    assert census.faults(allowed=8) == [] and "8 Request objects" in census.faults(allowed=1)[0]
    kept.clear()
    DrivenLoop(engine).serve([[1]], max_tokens=2)
    assert census.faults(allowed=1) == []


def test_an_engine_process_that_is_watched_tells_what_is_left_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOOKS, str(tmp_path))
    driven = DrivenLoop(small_engine(model, overlap=True))
    loop = driven._loop = WatchedLoop(driven.engine, driven)  # type: ignore[arg-type]
    for number in range(4):
        driven.submit(number, [number], max_tokens=30, ignore_eos=True)
    for _ in range(4):
        driven.turn()
    held = driven.engine.scheduler._running[0]
    driven.command(messages.Abort(0))
    driven.command(messages.Abort(1))
    loop.ask()
    driven.turn()
    assert not list(tmp_path.iterdir())  # it works on
    driven.run()
    seen = json.loads((tmp_path / "engine.json").read_text())
    assert seen["faults"] == ["I3: 3 Request objects are left"]  # of the last step, and `held`
    assert seen["released"] == 2
    loop.ask()
    driven.submit(9, [9], max_tokens=3)
    driven.run()
    seen = json.loads((tmp_path / "engine.json").read_text())
    assert seen["faults"] == [] and seen["slowest_step"] > 0
    loop._leaving.append((held, 0))
    held.block_table += driven.engine.pool.allocate(1) or []
    assert [fault[:2] for fault in loop.seen()["faults"]] == ["I1", "I1", "I1"]
    driven.engine.pool.release(held.block_table)
    held.block_table.clear()
    loop._follow()
    assert "came back after" in loop.seen()["faults"][0] and loop.seen()["faults"] == []


def test_a_fault_strikes_whom_it_names_and_as_often_as_it_says(model: Path) -> None:
    engine = small_engine(model)
    loop, fault = DrivenLoop(engine), Fault("forward", marker=2, after=1, times=2, delay=0.01)
    with installed(engine, fault):
        loop.serve([[1], [1, 2]], max_tokens=4, ignore_eos=True)
        assert fault.struck == []
        loop.serve([[2], [3]], first=5, max_tokens=9, ignore_eos=True)
    assert len(fault.struck) == 2 and all(len(struck) == 2 for struck in fault.struck)
    assert [loop.served[number, 0].finish_reason for number in (5, 6)] == ["length", "length"]


def test_resources_that_grow_are_found(tmp_path: Path) -> None:
    before = Resources.of()
    with (tmp_path / "file").open("w"):
        assert before.faults(Resources.of()) == [f"I5: handles were {before.handles} and are {before.handles + 1}"]
    assert before.faults(Resources.of()) == []


def test_replies_are_searched_for_what_is_inside() -> None:
    sound = '{"error": {"message": "max_tokens is 0; it must be 1 or more", "param": null}} see https://a.b/c/d.json'
    assert invariants.leak_faults(sound, {"x-request-id": "0x1"}, ["key-1"]) == []
    folder = "/some/where"
    for body in ("Traceback (most recent", "<object at 0x7f00aa11>", f"{folder}/core/a.py", "for key-1"):
        assert len(invariants.leak_faults(body, {}, ["key-1"])) == 1, body
    assert invariants.leak_faults("", {"x": "key-1"}, ["key-1"])
    assert not invariants.status_faults(503, {"retry-after": "1"}) and not invariants.status_faults(499, {})
    assert invariants.status_faults(503, {}) and invariants.status_faults(500, {})
    assert not invariants.status_faults(500, {}, injected=True)


def test_metrics_that_fall_or_come_and_go_are_found() -> None:
    before = '# TYPE a_total counter\na_total{b="c"} 2.0\n# TYPE r gauge\nr 1.0\n# TYPE w gauge\nw 2.0\n'
    assert invariants.metrics_faults(before, before, ledger=3, load=("r", "w")) == []
    assert len(invariants.metrics_faults(before, before, ledger=2, load=("r", "w"))) == 1
    assert invariants.metrics_faults(before, before.replace("2.0\n# TYPE r", "1.0\n# TYPE r")) == [
        "I10: a_total{b=c} fell from 2 to 1"
    ]
    assert invariants.metrics_faults(before, before.replace("r 1.0", "r -1.0")) == ["I10: r{} is -1"]
    assert invariants.metrics_faults(before, before.replace('b="c"', 'b="d"'))
