"""Answers that go on with the last message: their prompts as transformers makes them, and what the parsers are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hookline.checkpoint.folder import read_tokenizer_source
from hookline.parsers.contract import ReasoningFormat
from hookline.parsers.hermes import HermesFormat
from hookline.parsers.think import ThinkFormat
from hookline.plugins import PluginRegistry
from hookline.scheduling.output import OutputDelta
from hookline.serving.replies.answers import WholeAnswer
from hookline.serving.replies.choice import AnswerContext
from hookline.serving.replies.token_texts import TokenTexts
from hookline.serving.requests.continuation import ends_in_call, ends_in_reasoning
from hookline.serving.requests.schema import TokenizeBody
from hookline.serving.requests.validate import Validator
from hookline.serving.token_routes import tokenize
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import delta
from tests.serving.small_door import TOOL_TEMPLATE, chat, only, refused, small_door, small_tokenizer
from tests.serving.values import ATTACK, TOOL

GLM = Path(__file__).parents[2] / "data" / "tiny-glm5.2-mtp"
# As SmolLM2 has it.
SMOL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = {"role": "user", "content": "Where is Oslo?"}
GOING_ON: dict[str, Any] = {"continue_final_message": True}
OPEN_CALL = '<tool_call>{"name": "weather", "arguments": {"ci'


def last(text: Any, **fields: Any) -> dict[str, Any]:
    """A call whose answer goes on with an assistant's text."""
    return {"messages": [QUESTION, {"role": "assistant", "content": text}], **GOING_ON, **fields}


@pytest.fixture(scope="module")
def door() -> Validator:
    tokenizer = small_tokenizer(TOOL_TEMPLATE)
    return small_door(tokenizer, tool_format=HermesFormat(), reasoning_format=ThinkFormat())


def rendered(door: Validator, **fields: Any) -> str:
    assert door.tokenizer is not None
    return door.tokenizer.decode(only(chat(door, **fields)).token_ids, skip_special_tokens=False)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_the_prompt_ends_with_the_last_message(door: Validator) -> None:
    begin = "<|im_start|>user\nWhere is Oslo?<|im_end|>\n<|im_start|>assistant\n"
    for fields in (
        last("In Nor"),
        last("In Nor", add_generation_prompt=False),
        last("In Nor", add_generation_prompt=None),
    ):
        assert rendered(door, **fields) == f"{begin}In Nor"
    assert (
        rendered(door, **last([{"type": "text", "text": "In"}, {"type": "text", "text": "Nor"}])) == f"{begin}In\nNor"
    )
    assert rendered(door, **last("")) == begin
    assert rendered(door, messages=[QUESTION], **GOING_ON) == "<|im_start|>user\nWhere is Oslo?"
    assert rendered(door, **last("In Nor") | {"continue_final_message": False}).endswith("assistant\n<think>")


def glm_tokenizer() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer.from_source(read_tokenizer_source(GLM)), PreTrainedTokenizerFast.from_pretrained(GLM)


def smol_tokenizer() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    ours = small_tokenizer(SMOL_TEMPLATE)
    theirs = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer()._tokenizer, chat_template=SMOL_TEMPLATE)
    return ours, theirs


@pytest.mark.parametrize("make", [glm_tokenizer, smol_tokenizer])
def test_prompts_are_those_of_transformers(make: Any) -> None:
    ours, theirs = make()
    for text in ("In Norway", "  so \n", "a < b [x] |", "<think>I know", "<think>I know</think>\nIn Nor", "北é", ""):
        reasoned = {"role": "assistant", "content": text, "reasoning": "hm", "reasoning_content": "hm"}
        for message in ({"role": "assistant", "content": text}, reasoned, {"role": "user", "content": text}):
            messages = [{"role": "system", "content": "Be brief."}, QUESTION, message]
            expected = theirs.apply_chat_template(
                messages, tokenize=True, return_dict=False, add_generation_prompt=False, continue_final_message=True
            )
            assert ours.apply_chat_template(messages, False, continue_final_message=True) == list(expected)


def test_a_text_that_goes_on_makes_no_control_tokens(door: Validator) -> None:
    found = [only(chat(door, **last(text))).token_ids for text in (ATTACK, "harmless")]
    special = [[token_id for token_id in ids if token_id in (256, 257, 258)] for ids in found]
    assert special[0] == special[1] != []
    assert rendered(door, **last(ATTACK)).endswith(ATTACK)


def test_what_cannot_go_on_is_refused(door: Validator) -> None:
    both = refused(door, "chat", **last("a", add_generation_prompt=True))
    assert both.status == 400 and both.param == "continue_final_message" and "add_generation_prompt" in both.message
    call = {"function": {"name": "weather", "arguments": "{}"}}
    for message in ({"tool_calls": [call]}, {"reasoning": "hm"}, {"content": None, "reasoning_content": "hm"}):
        error = refused(door, "chat", messages=[QUESTION, {"role": "assistant", **message}], **GOING_ON)
        assert error.status == 400 and error.param == "continue_final_message" and "text" in error.message
    hides = small_door(small_tokenizer("{% for m in messages %}{{ m.content[:9] }}{% endfor %}"))
    error = refused(hides, "chat", **last("longer than that"))
    assert error.status == 400 and error.param == "messages" and "does not show" in error.message


def test_tokenize_counts_the_same_prompt(door: Validator) -> None:
    fields = last("In Nor")
    found = tokenize(TokenizeBody.parse(fields), door)["tokens"]
    assert tuple(found) == only(chat(door, **fields)).token_ids


# -- parsers -----------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, bool, str]] = [
    ("In Nor", False, "In Nor"),
    ("  In Nor ", False, "  In Nor "),
    ("<think>", True, ""),
    ("<think>I kn", True, ""),
    ("\n<think>\nI kn</thi", True, ""),
    ("<think>I kn</think>", False, ""),
    ("<think>I kn</think>In", False, "In"),
    ("I <think>", False, "I <think>"),
    ("a\ue000", False, "a\ue000"),
]


@pytest.fixture(scope="module")
def glm_reasoning() -> ReasoningFormat:
    found = PluginRegistry().load("GlmMoeDsaForCausalLM").reasoning_format("glm45")
    assert found is not None
    return found


@pytest.mark.parametrize(("text", "inside", "rest"), CASES)
def test_where_reasoning_breaks_off(glm_reasoning: ReasoningFormat, text: str, inside: bool, rest: str) -> None:
    for style in (ThinkFormat(), glm_reasoning):
        assert ends_in_reasoning(text, style) == (inside, rest)
    assert ends_in_reasoning("<think>I kn<tool_call>f", glm_reasoning) == (False, "<tool_call>f")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        *((text, False) for text in ("", "a", "<tool", "<tool_call", "a <b>", "  ")),
        *((text, True) for text in ("<tool_call>", "a<tool_call>\n")),
    ],
)
def test_where_calls_break_off(text: str, inside: bool) -> None:
    glm = PluginRegistry().load("GlmMoeDsaForCausalLM").tool_format("glm45")
    assert glm is not None
    endings = {
        HermesFormat(): (OPEN_CALL, '<tool_call>{"name": "weather", "arguments": {}}', "</tool_call>"),
        glm: ("<tool_call>weather<arg_key>ci", "<tool_call>weather", "</tool_call>"),
    }
    for style, (open_call, begun, end) in endings.items():
        whole_call = begun + end
        assert ends_in_call(text, style, [TOOL]) is inside
        assert ends_in_call(f"a{open_call}", style, [TOOL])
        assert ends_in_call(f"a{begun}", style, [TOOL]) and ends_in_call(f"a{begun}\n", style, [TOOL])
        assert not ends_in_call(f"a{whole_call}", style, [TOOL])
        assert not ends_in_call(f"{whole_call}\nb", style, [TOOL])


def answered(door: Validator, fields: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The message that a client gets when the model says `texts`."""
    assert door.tokenizer is not None
    context = AnswerContext(TokenTexts(door.tokenizer), frozenset({258}), HermesFormat(), ThinkFormat())
    answer = WholeAnswer(chat(door, **fields), context)
    deltas: list[OutputDelta] = [delta(text) for text in texts]
    answer.take(0, [*deltas, delta("", "stop", token_ids=[])])
    message: dict[str, Any] = json.loads(answer.body())["choices"][0]["message"]
    return message


def test_an_answer_goes_on_where_the_message_was(door: Validator) -> None:
    assert answered(door, last("In Nor"), "way", ".")["content"] == "way."
    assert answered(door, last("In Nor"), "<think>", "way")["content"] == "<think>way"
    thought = answered(door, last("<think>I kn"), "ow", "</think>", "Norway")
    assert (thought["reasoning"], thought["content"]) == ("ow", "Norway")
    assert answered(door, last("<think>I kn</think>In"), " Norway")["content"] == " Norway"
    anew = answered(door, last(""), "<think>hm</think>", "Norway")
    assert (anew["reasoning"], anew["content"]) == ("hm", "Norway")
    user = answered(door, {"messages": [{"role": "user", "content": "<think>I"}], **GOING_ON}, "</think>")
    assert user["content"] == "</think>"


def test_constraints_begin_behind_reasoning_that_goes_on(door: Validator) -> None:
    shape = {"response_format": {"type": "json_object"}}
    assert only(chat(door, **last("<think>I kn", **shape))).grammar_after == 260
    request = only(chat(door, **last("Here it is: ", **shape)))
    assert request.grammar is not None and request.grammar_after is None


def test_calls_of_an_answer_that_goes_on(door: Validator) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for choice in ("auto", "required", named):
        fields = last("Let me look.", tools=[TOOL], tool_choice=choice)
        assert (only(chat(door, **fields)).grammar is None) is (choice == "auto")
        (made,) = answered(door, fields, call)["tool_calls"]
        assert made["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        error = refused(door, "chat", **last(OPEN_CALL, tools=[TOOL], tool_choice=choice))
        assert error.status == 400 and error.param == "continue_final_message" and "within a tool call" in error.message
    assert answered(door, last(OPEN_CALL, tools=[TOOL], tool_choice="none"), "ty")["content"] == "ty"
    assert answered(door, last(OPEN_CALL), "ty")["content"] == "ty"
    thinks = chat(door, **last("<think>A <tool_call>", tools=[TOOL]))  # reasoning may speak of the marker
    assert thinks.starts_in_reasoning
