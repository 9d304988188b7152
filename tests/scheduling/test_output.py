"""Stop strings against an oracle on the whole text, and the JSON form of results."""

from __future__ import annotations

import json
import random

import pytest

from hookline.scheduling.output import (
    CompletionOutput,
    RequestOutput,
    StopStringMatcher,
    Timing,
    TokenLogprob,
    Usage,
)


def oracle(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """End, start and stop string of the match that is complete first."""
    return min(((text.find(s) + len(s), text.find(s), s) for s in stops if s in text), default=None)


def held_by(text: str, stops: list[str]) -> int:
    """How long the longest suffix is that could still become a stop string."""
    return max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)


def test_equals_the_oracle_for_random_stops_and_cuts() -> None:
    rng = random.Random(0)
    matches = holds = across = 0
    for _ in range(5_000):
        letters = rng.choice(("ab", "abc", "aé🙂"))
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 30)))
        stops = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 7))) for _ in range(rng.randint(0, 4))]
        cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
        matcher = StopStringMatcher(stops)
        found = oracle(text, stops)
        shown = ""
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            shown += matcher.push(text[start:end])
            if found is None or end < found[0]:
                assert shown == text[: end - held_by(text[:end], stops)], (text, stops, cuts)
                holds += shown != text[:end]
            else:
                across += start > found[1] and matcher.matched is not None
                assert shown == text[: found[1]] and matcher.matched == found[2], (text, stops, cuts)
        shown += matcher.flush()
        assert shown == (text if found is None else text[: found[1]])
        assert matcher.flush() == "" and (matcher.matched is None) == (found is None)
        matches += found is not None
    assert min(matches, holds, across, 5_000 - matches) > 500


def test_no_stops_pass_everything_at_once() -> None:
    matcher = StopStringMatcher(())
    assert [matcher.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert matcher.flush() == ""


def test_nothing_passes_after_a_match() -> None:
    matcher = StopStringMatcher(["END"])
    assert [matcher.push(piece) for piece in ("one E", "N", "D two", "three")] == ["one ", "", "", ""]
    assert (matcher.flush(), matcher.matched) == ("", "END")


def output(index: int = 0, **fields: object) -> CompletionOutput:
    return CompletionOutput(index, "text", (5, 6), "stop", "END", **fields)  # type: ignore[arg-type]


def result(*outputs: CompletionOutput, **fields: object) -> RequestOutput:
    usage, timing = Usage(2, 2, 1), Timing(0.5, 1.0, 2.0)
    return RequestOutput("r", "hi", (1, 2), outputs, True, usage, timing, **fields)  # type: ignore[arg-type]


def test_one_continuation_as_json() -> None:
    assert json.loads(json.dumps(result(output()).to_dict(), allow_nan=False)) == {
        "prompt_token_ids": [1, 2],
        "token_ids": [5, 6],
        "text": "text",
        "finish_reason": "stop",
        "stop_reason": "END",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 1},
        "timing": {"queued": 0.5, "time_to_first_token": 1.0, "total": 2.0},
    }


def test_several_continuations_as_json() -> None:
    shape = result(output(), output(1)).to_dict()
    assert "text" not in shape and [entry["index"] for entry in shape["outputs"]] == [0, 1]
    assert shape["outputs"][1]["token_ids"] == [5, 6]


def test_logprobs_as_json() -> None:
    impossible = TokenLogprob(5, float("-inf"), 9, ((6, -0.5), (5, float("-inf"))))
    shape = result(
        output(logprobs=(impossible, TokenLogprob(6, -0.5, 1)), cumulative_logprob=float("-inf")),
        prompt_logprobs=(None, TokenLogprob(2, -1.0, 1)),
    ).to_dict()
    json.dumps(shape, allow_nan=False)
    assert shape["logprobs"][0] == {"token_id": 5, "logprob": None, "rank": 9, "top": [[6, -0.5], [5, None]]}
    assert shape["cumulative_logprob"] is None
    assert shape["prompt_logprobs"] == [None, {"token_id": 2, "logprob": -1.0, "rank": 1, "top": []}]


@pytest.mark.parametrize("record", [output(), result(output()), Usage(1, 1), Timing(), TokenLogprob(1, 0.0, 1)])
def test_records_are_frozen(record: object) -> None:
    with pytest.raises(AttributeError):
        setattr(record, record.__slots__[0], None)  # type: ignore[attr-defined]
