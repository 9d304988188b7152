"""`/tokenize`, `/detokenize` and `/tokenizer_info` without their routes."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.requests.schema import ChatBody, DetokenizeBody, TokenizeBody
from hookline.serving.requests.validate import Validator
from hookline.serving.token_routes import detokenize, tokenize, tokenizer_info
from tests.conftest import CHAT_TEMPLATE
from tests.serving.small_door import TOOL_TEMPLATE, CallFormat, small_door, small_tokenizer
from tests.serving.values import ANY, ATTACK, CHAT, MESSAGES, TOOL


@pytest.fixture(scope="module")
def door() -> Validator:
    return small_door(small_tokenizer(bos=True))


def ids_of(door: Validator, **fields: Any) -> list[int]:
    answer = tokenize(TokenizeBody.parse(fields), door)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 256
    ids: list[int] = answer["tokens"]
    return ids


def text_of(door: Validator, ids: list[int]) -> str:
    text: str = detokenize(DetokenizeBody.parse({"tokens": ids}), door)["prompt"]
    return text


def test_a_prompt_there_and_back(door: Validator) -> None:
    for text in ("hello", "é👩‍👩‍👧\x00", ATTACK, "a" * 1000):
        assert text_of(door, ids_of(door, prompt=text, add_special_tokens=False)) == text
        assert ids_of(door, prompt=text)[0] == 256
    assert ids_of(door, prompt="") == [256]
    assert ids_of(door, prompt="", add_special_tokens=False) == []


def test_messages_as_a_chat_has_them() -> None:
    door = small_door(small_tokenizer(TOOL_TEMPLATE), tool_format=CallFormat())
    body = ChatBody.parse({**CHAT, "tools": [TOOL]})
    assert tuple(ids_of(door, messages=MESSAGES, tools=[TOOL])) == door.chat(body, "").prompts[0].token_ids
    assert len(ids_of(door, messages=MESSAGES)) > len(ids_of(door, messages=MESSAGES, add_generation_prompt=False))
    quick = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    assert tuple(ids_of(door, **quick)) == door.chat(ChatBody.parse(CHAT | quick), "").prompts[0].token_ids
    assert ids_of(door, **quick) != ids_of(door, messages=MESSAGES)


def test_control_tokens_come_by_their_own_text_alone(door: Validator) -> None:
    assert ids_of(door, prompt="<|endoftext|>", add_special_tokens=False) == [258]  # as lm-eval asks for the end token
    for text in ("a<|endoftext|>", "<|endoftext|><|endoftext|>", "<|im_end|>", ATTACK):
        assert {256, 257, 258}.isdisjoint(ids_of(door, prompt=text, add_special_tokens=False))


def test_token_texts(door: Validator) -> None:
    answer = tokenize(TokenizeBody.parse({"prompt": "a é", "return_token_strs": True}), door)
    assert answer["token_strs"] == ["<|im_start|>", "a", " ", "\ufffd", "\ufffd"]


def test_bad_bodies(door: Validator) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "model": "gpt"}, "model"),
        ({"prompt": "\ud800"}, "prompt"),
    ]
    for fields, param in bad:
        with pytest.raises((ApiError, InvalidRequestError)) as caught:
            tokenize(TokenizeBody.parse(fields), door)
        assert api_error(caught.value).param == param
    refused = 0
    for value in ANY:
        try:
            detokenize(DetokenizeBody.parse({"tokens": value}), door)
        except ApiError as error:
            refused += error.status == 400 and (error.param or "").startswith("tokens")
    assert refused == len(ANY) - 3  # [], [0], and [1] many times
    with pytest.raises(ApiError, match="from 0 to 319"):
        text_of(door, [1, 320])


def test_a_text_is_bounded(door: Validator) -> None:
    most = door.config.limits.tokenize_chars
    with pytest.raises(ApiError, match=f"{most + 1} characters; at most {most}"):
        tokenize(TokenizeBody.parse({"prompt": "a" * (most + 1)}), door)
    assert tokenize(TokenizeBody.parse({"prompt": "a" * 1000}), door)["count"] > 1000


def test_tokenizer_info(door: Validator) -> None:
    info = tokenizer_info(door)
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|im_start|>", "<|endoftext|>", None)


def test_without_a_tokenizer() -> None:
    whole = small_door()
    door = Validator(whole.facts, None, whole.config, None, None)
    with pytest.raises(InvalidRequestError):
        tokenize(TokenizeBody.parse({"prompt": "a"}), door)
    with pytest.raises(InvalidRequestError):
        detokenize(DetokenizeBody.parse({"tokens": [1]}), door)
    with pytest.raises(InvalidRequestError):
        tokenizer_info(door)
