"""Whole reports made of deltas: right in every field, and no more work than one copy of what came before."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import OutputDelta, Timing
from hookline.serving.process.growing_output import GrowingOutput


class Entry:
    """Counts how often its logprob is read."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def logprob(self) -> float:
        self.reads += 1
        return -0.5


def test_reports_are_made_of_deltas_in_any_order() -> None:
    growing = GrowingOutput("request-1", None, (1, 2), SamplingParams(n=2))
    last = OutputDelta("r", 1, "b", [2], finish_reason="stop", cached_tokens=1, timing=Timing(total=3.0))
    report = growing.take([last, OutputDelta("r", 0, "a", [1], finish_reason="stop")])
    assert report.finished and report.timing.total == 3.0
    assert [output.text for output in report.outputs] == ["a", "b"]
    assert (report.usage.completion_tokens, report.usage.cached_tokens) == (2, 0)  # as `Engine`: of the first


def test_a_report_stays_as_it_was_while_the_request_goes_on() -> None:
    growing = GrowingOutput("request-1", "hi", (1,), SamplingParams(n=2))
    first = growing.take([OutputDelta("r", 0, "a", [1, 2]), OutputDelta("r", 1, "x", [9])])
    second = growing.take([OutputDelta("r", 0, "b", [3], finish_reason="stop", stop_reason=3)])
    assert [(output.text, output.token_ids, output.finish_reason) for output in first.outputs] == [
        ("a", (1, 2), None),
        ("x", (9,), None),
    ]
    ended, other = second.outputs
    assert (ended.text, ended.token_ids, ended.finish_reason, ended.stop_reason) == ("ab", (1, 2, 3), "stop", 3)
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (3, 4)
    assert not second.finished and second.prompt == "hi"
    assert other is first.outputs[1]  # what has no news is not copied
    assert ended.logprobs is None and ended.cumulative_logprob is None


def test_what_came_before_is_not_added_up_again() -> None:
    growing = GrowingOutput("request-1", None, (1,), SamplingParams(logprobs=0))
    entries = [Entry() for _ in range(50)]
    for number, entry in enumerate(entries):
        given: Any = [entry]
        [output] = growing.take([OutputDelta("r", 0, "", [number], logprobs=given)]).outputs
        assert output.logprobs is not None and len(output.logprobs) == number + 1
        assert output.cumulative_logprob == pytest.approx(-0.5 * (number + 1))
    assert {entry.reads for entry in entries} == {1}
