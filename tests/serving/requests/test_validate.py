"""The one door: what is refused and by which name, and what a sound call becomes. No engine."""

from __future__ import annotations

import sys
from itertools import islice
from subprocess import run
from typing import Any

import pytest

from hookline.errors import InvalidRequestError, ModelConfigError
from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.limits import Limits
from hookline.serving.requests.schema import ChatBody, CompletionsBody
from hookline.serving.requests.validate import Validator
from hookline.serving.requests.validated import ValidatedCall
from tests.serving import values
from tests.serving.small_door import (
    TOOL_TEMPLATE,
    CallFormat,
    ThinkFormat,
    chat,
    complete,
    only,
    refused,
    small_door,
    small_tokenizer,
)
from tests.serving.values import CHAT, COMPLETIONS, HUGE, MESSAGES


@pytest.fixture(scope="module")
def door() -> Validator:
    return small_door(small_tokenizer(TOOL_TEMPLATE))


# -- all fields --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", values.CHAT_BAD)
def test_bad_values_of_a_chat_are_refused_by_name(door: Validator, name: str) -> None:
    for value in values.CHAT_BAD[name]:
        fields: dict[str, Any] = {name: value}
        error = refused(door, "chat", **fields)
        assert error.status == 400 and (error.param or "").startswith(name)


@pytest.mark.parametrize("name", values.COMPLETIONS_BAD)
def test_bad_values_of_a_completion_are_refused_by_name(door: Validator, name: str) -> None:
    for value in values.COMPLETIONS_BAD[name]:
        fields: dict[str, Any] = {name: value}
        error = refused(door, **fields)
        assert error.status == 400 and (error.param or "").startswith(name)


def test_sound_values_are_served(door: Validator) -> None:
    for name, some in values.CHAT_SOUND.items():
        for value in some:
            only(chat(door, **{name: value}))
    for name, some in values.COMPLETIONS_SOUND.items():
        for value in some:
            assert complete(door, **{name: value}).prompts


@pytest.mark.parametrize("seed", range(4))
def test_any_body_is_served_or_refused_and_nothing_else(seed: int) -> None:
    formats: dict[str, Any] = {"tool_format": CallFormat(), "reasoning_format": ThinkFormat()} if seed % 2 else {}
    door, outcomes = small_door(small_tokenizer(TOOL_TEMPLATE), strict=seed == 3, **formats), {200: 0, 400: 0, 404: 0}
    for body in islice(values.bodies(CHAT, values.CHAT_BAD, values.CHAT_SOUND, seed), 300):
        outcomes[outcome(door.chat, ChatBody, body)] += 1
    for body in islice(values.bodies(COMPLETIONS, values.COMPLETIONS_BAD, values.COMPLETIONS_SOUND, seed), 300):
        outcomes[outcome(door.completions, CompletionsBody, body)] += 1
    assert outcomes[200] > 20 and outcomes[400] > 100, outcomes


def outcome(route: Any, body_class: Any, body: dict[str, Any]) -> int:
    try:
        call: ValidatedCall = route(body_class.parse(body), "salt")
    except (ApiError, InvalidRequestError, ModelConfigError) as error:
        answer = api_error(error)
        assert len(answer.message) < 1000 and "Traceback" not in answer.message and " at 0x" not in answer.message
        return answer.status
    for request in call.prompts:
        assert request.token_ids and all(type(i) is int and 0 <= i < 320 for i in request.token_ids)
        assert len(request.token_ids) + (request.params.max_tokens or 0) <= 256
    return 200


# -- the small adversarial cases ---------------------------------------------------------------------------------------


def test_case_1_max_tokens_0(door: Validator) -> None:
    assert refused(door, max_tokens=0).param == "max_tokens"
    assert refused(door, "chat", max_tokens=0).param == "max_tokens"
    assert refused(door, "chat", max_completion_tokens=0).param == "max_completion_tokens"
    call = complete(door, max_tokens=0, echo=True, logprobs=1)
    assert call.prompt_only and only(call).params.max_tokens == 1
    assert not complete(door, max_tokens=1, echo=True).prompt_only


def test_case_3_min_tokens_beyond_the_room(door: Validator) -> None:
    error = refused(door, prompt="a" * 206, min_tokens=100, max_tokens=None)
    assert error.param == "min_tokens" and "50" in error.message
    assert only(complete(door, prompt="a" * 206, min_tokens=50)).params.max_tokens == 50


def test_case_5_empty_prompts(door: Validator) -> None:
    empty: list[Any] = ["", [], [[]], [""]]
    for prompt in empty:
        assert refused(door, prompt=prompt).param == "prompt"
    with_bos = small_door(small_tokenizer(bos=True))
    assert only(complete(with_bos, prompt="")).token_ids == (256,)
    assert refused(with_bos, prompt=[]).param == "prompt"


def test_case_7_token_ids_that_are_none(door: Validator) -> None:
    for prompt in ([-1], [1.0], [True], [320], [1, -1]):
        assert refused(door, prompt=prompt).param == "prompt"
    assert only(complete(door, prompt=[0, 319])).token_ids == (0, 319)


def test_case_9_what_the_cache_can_never_hold() -> None:
    door = small_door(num_blocks=16)
    error = refused(door, prompt=[1] * 100, max_tokens=100)
    assert error.param == "max_tokens" and "128" in error.message and "200" in error.message
    assert refused(door, prompt=[1] * 200).param == "prompt"
    assert only(complete(door, prompt=[1] * 100)).params.max_tokens == 28


def test_case_11_a_tiny_temperature_is_taken(door: Validator) -> None:
    assert only(complete(door, temperature=1e-30)).params.temperature == 1e-30


def test_case_13_logit_bias(door: Validator) -> None:
    for bias in ({"320": 5}, {"-1": 5}, {str(number): 1 for number in range(10_000)}, {"1": 1e308}):
        assert (refused(door, logit_bias=bias).param or "").startswith("logit_bias")


def test_case_15_stop_token_ids(door: Validator) -> None:
    assert refused(door, stop_token_ids=[320]).param == "stop_token_ids"


def test_case_21_logprobs(door: Validator) -> None:
    for count in (513, 21, -1):
        assert refused(door, logprobs=count).param == "logprobs"
        assert refused(door, "chat", logprobs=True, top_logprobs=count).param == "top_logprobs"


def test_case_27_deep_and_large_schemas(door: Validator) -> None:
    large = {"enum": list(range(100_000))}
    for schema in (values.DEEP, large):
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        assert refused(door, "chat", response_format=shape).param == "response_format.json_schema.schema"
        assert refused(door, guided_json=schema).param == "guided_json"
    # A loop of references is small and flat: the compiler judges it.
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert only(complete(door, guided_json=loop)).grammar is not None


def test_case_29_no_template_from_a_client(door: Validator) -> None:
    source = "{% for a in range(10**9) %}{% endfor %}"
    assert refused(door, "chat", chat_template=source).param == "chat_template"
    error = refused(door, "chat", chat_template_kwargs={"chat_template": source})
    assert error.param == "chat_template_kwargs.chat_template"


def test_case_31_text_makes_no_control_tokens(door: Validator) -> None:
    plain = only(chat(door, messages=[{"role": "user", "content": "obey"}])).token_ids
    attack = only(chat(door, messages=[{"role": "user", "content": values.ATTACK}])).token_ids
    assert attack.count(256) == plain.count(256) == 2 and attack.count(257) == plain.count(257) == 1
    assert {256, 257}.isdisjoint(only(complete(door, prompt=values.ATTACK)).token_ids)
    by_tool = [{"type": "function", "function": {"name": "a", "description": values.ATTACK}}]
    with_tools = small_door(small_tokenizer(TOOL_TEMPLATE), tool_format=CallFormat())
    assert only(chat(with_tools, tools=by_tool)).token_ids.count(256) == 3  # one for the turn of tools


# -- options -----------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_openai(door: Validator) -> None:
    params = only(chat(door)).params
    assert (params.temperature, params.top_p, params.n, params.logprobs) == (1.0, 1.0, 1, None)
    assert params.max_tokens == 256 - len(only(chat(door)).token_ids)
    assert only(complete(door, temperature=None, top_p=None)).params.temperature == 1.0


def test_options_arrive(door: Validator) -> None:
    options = {"min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "n": 2}
    options |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1, "ignore_eos": True}
    options |= {"skip_special_tokens": False, "max_tokens": 9, "prompt_logprobs": 4}
    texts: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [5], "allowed_token_ids": [1, 5], "bad_words": ["x"]}
    params = only(complete(door, **options, **texts, logit_bias={"5": 1})).params
    for name, value in options.items():
        assert getattr(params, name) == value
    for name, value in texts.items():
        assert getattr(params, name) == tuple(value)
    assert dict(params.logit_bias) == {5: 1.0}
    assert only(complete(door, stop="a")).params.stop == ("a",)
    assert only(complete(door, seed=-1)).params.seed == 2**63 - 1


def test_a_stream_has_no_place_for_the_prompts_log_probabilities(door: Validator) -> None:
    for route in ("chat", "completions"):
        assert refused(door, route, stream=True, prompt_logprobs=0).param == "prompt_logprobs"
    assert complete(door, stream=True, echo=True, logprobs=1).stream


def test_the_new_name_of_max_tokens_wins(door: Validator) -> None:
    assert only(chat(door, max_tokens=5, max_completion_tokens=7)).params.max_tokens == 7
    assert only(chat(door, max_tokens=5)).params.max_tokens == 5


def test_a_context_too_long_says_the_numbers(door: Validator) -> None:
    error = refused(door, prompt="a" * 100, max_tokens=157)
    assert (error.status, error.param, error.code) == (400, "max_tokens", "context_length_exceeded")
    assert all(number in error.message for number in ("256", "257", "100", "157", "156"))
    assert only(complete(door, prompt="a" * 100, max_tokens=156)).params.max_tokens == 156
    error = refused(door, prompt="a" * 256)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert refused(door, "chat", messages=[{"role": "user", "content": HUGE}]).code == "context_length_exceeded"
    assert refused(door, "chat", max_completion_tokens=256).param == "max_completion_tokens"


def test_a_text_much_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    door, sizes = small_door(), list[int]()
    assert door.tokenizer is not None
    whole = door.tokenizer.encode

    def watched(text: str, *args: Any, **kwargs: Any) -> list[int]:
        sizes.append(len(text))
        return whole(text, *args, **kwargs)

    monkeypatch.setattr(door.tokenizer, "encode", watched)
    cuts: list[dict[str, Any]] = [{}, {"truncate_prompt_tokens": 5}]
    for cut in cuts:
        error = refused(door, prompt="a" * 2_000_000, **cut)
        assert error.code == "context_length_exceeded" and "more than" in error.message
        assert refused(door, "chat", messages=[{"role": "user", "content": HUGE}] * 20, **cut).param == "messages"
    assert max(sizes) <= 64 * 256
    assert only(complete(door, prompt="a" * 4097, truncate_prompt_tokens=5)).token_ids == tuple(whole("aaaaa"))


def test_prompts_can_be_cut(door: Validator) -> None:
    request = only(complete(door, prompt="abcdef", truncate_prompt_tokens=2))
    whole = only(complete(door, prompt="ef"))
    assert request.token_ids == whole.token_ids
    assert (request.prompt, whole.prompt) == (None, "ef")
    assert len(only(complete(door, prompt=[1] * 1000, truncate_prompt_tokens=-1, max_tokens=6)).token_ids) == 250
    assert len(only(chat(door, truncate_prompt_tokens=10)).token_ids) == 10


def test_logprobs_of_both_routes(door: Validator) -> None:
    call = chat(door, logprobs=True, top_logprobs=3)
    assert call.logprobs and only(call).params.logprobs == 3
    assert only(chat(door, logprobs=True)).params.logprobs == 0
    assert refused(door, "chat", top_logprobs=3).param == "top_logprobs"
    # As lm-eval scores: the prompt's tokens too.
    scored = complete(door, prompt=[[1, 2], [3]], echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert [request.params.prompt_logprobs for request in scored.prompts] == [1, 1]
    assert [request.token_ids for request in scored.prompts] == [(1, 2), (3,)]
    assert scored.echo and scored.logprobs
    assert only(complete(door, logprobs=1)).params.prompt_logprobs is None
    assert only(complete(door, logprobs=1, echo=True, prompt_logprobs=5)).params.prompt_logprobs == 5


def test_what_only_shapes_the_answer(door: Validator) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    call = chat(door, stream=True, stream_options=usage, include_stop_str_in_output=True, request_id="mine")
    assert call.stream and call.include_usage and call.continuous_usage and call.include_stop
    assert call.label == "mine" and call.kind == "chat" and call.model == "tiny"
    only_continuous = chat(door, stream=True, stream_options={"continuous_usage_stats": True})
    assert not only_continuous.include_usage and not only_continuous.continuous_usage
    assert refused(door, "chat", stream_options=usage).param == "stream_options"
    assert complete(door, return_token_ids=True).return_token_ids


def test_limits_hold_at_the_limit_and_one_beyond() -> None:
    door = small_door(limits=Limits(n=2, prompts=2, messages=2, label_chars=3, schema_nodes=3, schema_depth=2))
    assert complete(door, n=2, prompt=["a", "b"], request_id="abc").prompts
    assert chat(door, messages=MESSAGES * 2).prompts
    nodes, depth = {"a": 1, "b": 2}, {"a": {"b": 1}}
    assert complete(door, guided_json=nodes).prompts and complete(door, guided_json=depth).prompts
    assert refused(door, n=3).param == "n"
    assert refused(door, prompt=["a"] * 3).param == "prompt"
    assert refused(door, request_id="abcd").param == "request_id"
    assert refused(door, "chat", messages=MESSAGES * 3).param == "messages"
    assert refused(door, guided_json={"a": 1, "b": 2, "c": 3}).param == "guided_json"
    assert refused(small_door(limits=Limits(schema_depth=2)), guided_json={"a": {"b": {}}}).param == "guided_json"
    scored = small_door(limits=Limits(prompt_logprobs=12))  # two prompts of three tokens, each with one likeliest
    assert complete(scored, prompt=[[1, 2, 3], [4, 5, 6]], echo=True, logprobs=1).prompts
    assert refused(scored, prompt=[[1, 2, 3], [4, 5, 6, 7]], echo=True, logprobs=1).param == "prompt_logprobs"
    small = small_door(limits=Limits(schema_bytes=10))
    assert complete(small, guided_regex="a" * 10).prompts
    assert refused(small, guided_regex="a" * 11).code == "constraint_too_large"
    assert refused(small, guided_json='{"a": "bcdefg"}').code == "constraint_too_large"


def test_models_and_salts(door: Validator) -> None:
    assert chat(door, model="other").model == "other"
    error = refused(door, "chat", model="gpt")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "tiny, other" in error.message
    own = only(door.chat(ChatBody.parse({**CHAT, "cache_salt": "mine"}), "key")).cache_salt
    assert {own, only(door.chat(ChatBody.parse(CHAT), "key")).cache_salt} == {"key:mine", "key"}


def test_strict_servers_refuse_what_they_do_not_know() -> None:
    door = small_door(strict=True)
    assert refused(door, colour=1).code == "unknown_field"
    assert complete(door, user="me", metadata={}, store=True, service_tier="auto", priority=3).prompts


def test_a_checkpoint_without_a_tokenizer_takes_ids_alone() -> None:
    whole = small_door()
    door = Validator(whole.facts, None, whole.config, CallFormat(), ThinkFormat())
    assert only(complete(door, prompt=[1, 2])).token_ids == (1, 2)
    assert refused(door, prompt="a").param == "prompt"
    assert refused(door, "chat").param == "messages"


def test_the_door_loads_no_torch() -> None:
    code = "import sys, hookline.serving.requests.validate as a, hookline.serving.token_routes as b; "
    code += "sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
