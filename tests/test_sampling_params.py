"""Sampling options: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import MAX_LOGIT_BIAS, SamplingParams, check_params

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1),
    ("max_tokens", None, None),
    ("min_tokens", 0, 0),
    ("temperature", 0, 0.0),
    ("temperature", 1e-30, 1e-30),
    ("temperature", 100, 100.0),
    ("top_k", -1, 0),
    ("top_k", 10**6, 10**6),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 0.5, 0.5),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("seed", 0, 0),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("n", 64, 64),
    ("stop", "end", ("end",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", None, ()),
    ("stop", ["x" * 256] * 16, ("x" * 256,) * 16),
    ("bad_words", ["no"], ("no",)),
    ("stop_token_ids", [3, 4], (3, 4)),
    ("allowed_token_ids", [3], (3,)),
    ("allowed_token_ids", [3, 1] * 1000, (3, 1)),
    ("logit_bias", {"5": -100, 6: 100.0}, {5: -100.0, 6: 100.0}),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 20, 20),
    ("ignore_eos", True, True),
]

REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 1.0),
    ("max_tokens", 2**63),
    ("stop", ["\ud83d"]),
    ("bad_words", "\ud83d"),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("n", 0),
    ("n", 65),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["a"] * 17),
    ("stop", ["x" * 257]),
    ("stop", 3),
    ("stop", {"a"}),
    ("bad_words", [""]),
    ("bad_words", ["a"] * 129),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [1] * 129),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1.0: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: 1e308}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "2"}),
    ("logit_bias", [1, 2]),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", 513),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("ignore_eos", 1),
    ("skip_special_tokens", "yes"),
]


@pytest.mark.parametrize(("name", "value", "kept"), ACCEPTED, ids=str)
def test_accepts(name: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept
    assert type(found) is type(kept) or name == "logit_bias"


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_and_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert "must be" in caught.value.message
    assert len(caught.value.message) < 300


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="at most max_tokens, which is 4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_is_frozen_to_the_bottom() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0  # type: ignore[index]


def test_from_dict_lays_fields_over_a_base() -> None:
    base = SamplingParams(temperature=0.5, top_k=7, stop=("x",), logit_bias={3: 1.0})
    params = SamplingParams.from_dict({"top_k": 9, "stop": ["y"]}, base)
    assert (params.temperature, params.top_k, params.stop, params.logit_bias) == (0.5, 9, ("y",), {3: 1.0})
    assert SamplingParams.from_dict({}) == SamplingParams()


def test_from_dict_names_what_it_does_not_know() -> None:
    with pytest.raises(InvalidRequestError, match="Did you mean temperature") as caught:
        SamplingParams.from_dict({"temprature": 1.0})
    assert caught.value.field == "temprature"
    with pytest.raises(InvalidRequestError, match="The fields are max_tokens"):
        SamplingParams.from_dict({"zzzz": 1.0})


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_token_ids_stay_within_the_logits(name: str) -> None:
    SamplingParams(**{name: [511]}).check_against(512, 1, 64)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{name} is 512; .* from 0 to 511") as caught:
        SamplingParams(**{name: [3, 512]}).check_against(512, 1, 64)  # type: ignore[arg-type]
    assert caught.value.field == name


def test_bounds_that_need_the_model() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias is 512"):
        SamplingParams(logit_bias={512: 5.0}).check_against(512, 1, 64)
    SamplingParams(min_tokens=50).check_against(512, 14, 64)
    with pytest.raises(InvalidRequestError, match="at most 50: the prompt has 14 tokens and the context 64") as caught:
        SamplingParams(min_tokens=51).check_against(512, 14, 64)
    assert caught.value.field == "min_tokens"
    with pytest.raises(InvalidRequestError, match="logprobs is 9"):
        SamplingParams(logprobs=9).check_against(8, 1, 64)


def test_holds_without_assertions_and_needs_no_torch() -> None:
    script = (
        "import sys\nfrom hookline.sampling_params import SamplingParams\n"
        "try:\n    SamplingParams(top_p=float('nan'))\nexcept ValueError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["top_p is nan; it must be a number above 0 to 1", "False"]


@pytest.mark.parametrize("params", [{"max_tokens": 2}, "max_tokens", 5])
def test_what_is_no_params_is_refused(params: object) -> None:
    assert check_params(None) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="not SamplingParams") as caught:
        check_params(params)
    assert caught.value.field == "params"
