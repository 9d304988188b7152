"""What clients read: both routes, whole and streamed, made of deltas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hookline.parsers.think import ThinkFormat
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import OutputDelta
from hookline.serving.replies.answers import StreamedAnswer, WholeAnswer
from hookline.serving.replies.choice import AnswerContext
from hookline.serving.replies.token_texts import TokenTexts
from hookline.serving.requests.validated import ToolUse, ValidatedCall, ValidatedRequest
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import ShoutTools, StarReasoning, delta, logprob, make_tokenizer

EOS = 258
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def context(tokenizer: Tokenizer) -> AnswerContext:
    return AnswerContext(TokenTexts(tokenizer), frozenset({EOS}))


def make_call(kind: Any = "chat", prompts: int = 1, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    request = ValidatedRequest((1, 2, 3), SamplingParams(max_tokens=8, **(params or {})), prompt="abc")
    return ValidatedCall(kind=kind, model="tiny", prompts=(request,) * prompts, **fields)


def whole(call: ValidatedCall, context: AnswerContext, *deltas: OutputDelta, number: int = 0) -> Any:
    answer = WholeAnswer(call, context)
    answer.take(number, deltas)
    return json.loads(answer.body())


def streamed(call: ValidatedCall, context: AnswerContext, *deltas: OutputDelta) -> list[Any]:
    answer = StreamedAnswer(call, context)
    text = b"".join(answer.take(0, [entry]) for entry in deltas) + answer.end()
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_a_whole_chat_answer_has_all_that_clients_read(context: AnswerContext) -> None:
    answer = whole(make_call(), context, delta("Hi"), delta("!", "stop", stop_reason=EOS, cached_tokens=2))
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi!", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_says_the_role_first_and_the_end_once_and_the_same_in_each_chunk(context: AnswerContext) -> None:
    chunks = streamed(make_call(), context, delta("Hi"), delta(""), delta("!"), delta("", "length"))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "Hi", "!", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_the_usage_comes_last_without_choices_and_is_null_before(context: AnswerContext) -> None:
    chunks = streamed(make_call(include_usage=True), context, delta("Hi"), delta("!", "stop"))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_continuous_usage_counts_up(context: AnswerContext) -> None:
    call = make_call("completions", include_usage=True, continuous_usage=True)
    chunks = streamed(call, context, delta("Hi"), delta("!", "stop"))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3, 3]


def test_continuous_usage_is_of_all_choices(context: AnswerContext) -> None:
    call = make_call("completions", params={"n": 2}, include_usage=True, continuous_usage=True)
    chunks = streamed(call, context, delta("Hi"), delta("abc", "stop", index=1), delta("!", "stop"))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 5, 6, 6]


def test_what_a_continuation_finds_of_its_sibling_was_not_cached_before(context: AnswerContext) -> None:
    deltas = [delta("a", "stop"), delta("b", "stop", index=1, cached_tokens=2)]
    answer = whole(make_call(params={"n": 2}), context, *deltas)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_prompts_and_continuations_have_their_index(context: AnswerContext) -> None:
    answer = WholeAnswer(make_call("completions", prompts=2, params={"n": 2}), context)
    answer.take(1, [delta("d", "stop", index=1), delta("c", "stop", index=0)])
    answer.take(0, [delta("a", "length", index=0, cached_tokens=1), delta("b", "stop", index=1, cached_tokens=1)])
    body = json.loads(answer.body())
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body["usage"]["prompt_tokens"] == 6  # each prompt once, however many continuations it has
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


@pytest.mark.parametrize("include", [True, False])
def test_the_stop_string_is_told_and_shown_only_if_wanted(context: AnswerContext, include: bool) -> None:
    call = make_call("completions", include_stop=include)
    last = delta("b", "stop", stop_reason="END")
    assert whole(call, context, delta("a"), last)["choices"][0]["text"] == ("abEND" if include else "ab")
    chunk = streamed(call, context, delta("a"), last)[-1]["choices"][0]
    assert (chunk["text"], chunk["stop_reason"]) == ("bEND" if include else "b", "END")


def test_chat_logprobs_name_tokens_with_their_bytes(context: AnswerContext, tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")  # two bytes, half a character each
    entries = [logprob(first, -0.25, (first, -0.25), (second, float("-inf"))), logprob(second, -1.0)]
    call = make_call(logprobs=True, params={"logprobs": 2})
    parts = [delta("", token_ids=[first], logprobs=entries[:1]), delta("é", token_ids=[second], logprobs=entries[1:])]
    parts.append(delta("", "stop", token_ids=[]))
    content = whole(call, context, *parts)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd"]
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.25, -9999.0]
    assert content[1]["top_logprobs"] == []
    chunks = streamed(call, context, *parts)
    found = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert found == content


def test_completions_logprobs_are_what_evaluation_reads(context: AnswerContext, tokenizer: Tokenizer) -> None:
    """As lm-eval scores: echo, one token more, and greedy is what has the highest value of `top_logprobs`."""
    ids = tokenizer.encode("aé!")
    a, e1, e2, mark = ids
    request = ValidatedRequest((a, e1, e2), SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1))
    call = ValidatedCall(kind="completions", model="tiny", prompts=(request,), logprobs=True, echo=True)
    of_prompt = [None, logprob(e1, -0.1, (e1, -0.1)), logprob(e2, -3.0, (mark, -0.2))]
    last = delta("!", "length", token_ids=[mark], logprobs=[logprob(mark, -0.3, (mark, -0.3))])
    last.prompt_logprobs = of_prompt
    choice = whole(call, context, last)["choices"][0]
    assert choice["text"] == "aé!"
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "\ufffd", "\ufffd", "!"]
    assert found["token_logprobs"] == [None, -0.1, -3.0, -0.3]
    assert found["top_logprobs"] == [None, {"\ufffd": -0.1}, {"!": -0.2, "\ufffd": -3.0}, {"!": -0.3}]
    assert found["text_offset"] == [0, 1, 2, 2]
    assert "prompt_logprobs" not in choice
    assert streamed(call, context, last)[0]["choices"][0]["logprobs"] == found


def test_text_offsets_go_on_from_chunk_to_chunk(context: AnswerContext, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("héllo")
    call = make_call("completions", logprobs=True, params={"logprobs": 0})
    parts = [delta("", token_ids=[i], logprobs=[logprob(i)]) for i in ids] + [delta("", "stop", token_ids=[])]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed(call, context, *parts)]
    assert offsets == [[0], [1], [2], [2], [3], [4], []]


def test_a_scored_prompt_has_nothing_of_the_token_that_the_engine_made(context: AnswerContext) -> None:
    call = make_call(
        "completions", echo=True, prompt_only=True, logprobs=True, params={"logprobs": 0, "prompt_logprobs": 0}
    )
    last = delta("X", "stop", token_ids=[7], logprobs=[logprob(7)])
    last.prompt_logprobs = [None, logprob(2), logprob(3)]
    answer = whole(call, context, last)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    (chunk,) = streamed(call, context, last)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["logprobs"]) == ("abc", choice["logprobs"])


def test_an_echoed_prompt_of_token_ids_is_decoded(context: AnswerContext, tokenizer: Tokenizer) -> None:
    request = ValidatedRequest(tuple(tokenizer.encode("hey ")), SamplingParams(max_tokens=8))
    call = ValidatedCall(kind="completions", model="tiny", prompts=(request,), echo=True)
    assert whole(call, context, delta("you", "stop"))["choices"][0]["text"] == "hey you"
    texts = [chunk["choices"][0]["text"] for chunk in streamed(call, context, delta("yo"), delta("u", "stop"))]
    assert texts == ["hey yo", "u"]


def test_token_ids_are_returned_if_wanted(context: AnswerContext) -> None:
    parts = [delta("", token_ids=[7]), delta("ab", "stop", token_ids=[8, 9])]
    chat = whole(make_call(return_token_ids=True), context, *parts)
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2, 3], [7, 8, 9])
    chunks = streamed(make_call(return_token_ids=True), context, *parts)
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3]
    assert [chunk["choices"][0].get("token_ids", []) for chunk in chunks] == [[], [7], [8, 9]]
    text = whole(make_call("completions", return_token_ids=True), context, *parts)["choices"][0]
    assert (text["prompt_token_ids"], text["token_ids"]) == ([1, 2, 3], [7, 8, 9])


def test_prompt_logprobs_without_echo_have_a_field_of_their_own(context: AnswerContext) -> None:
    last = delta("a", "stop")
    last.prompt_logprobs = [None, logprob(2, -1.0, (9, -0.5)), logprob(3)]
    found = whole(make_call(params={"prompt_logprobs": 1}), context, last)["prompt_logprobs"]
    assert found[0] is None
    assert {token_id: entry["logprob"] for token_id, entry in found[1].items()} == {"9": -0.5, "2": -1.0}


# -- reasoning and tools -----------------------------------------------------------------------------------------------


@pytest.fixture
def thinking(tokenizer: Tokenizer) -> AnswerContext:
    return AnswerContext(TokenTexts(tokenizer), frozenset({EOS}), ShoutTools(), StarReasoning())


def reasoned(tokenizer: Tokenizer, *texts: str) -> list[OutputDelta]:
    parts = [delta(text, token_ids=tokenizer.encode(text)) for text in texts]
    return [*parts, delta("", "stop", token_ids=[])]


def test_reasoning_stands_under_both_names_and_is_counted(thinking: AnswerContext, tokenizer: Tokenizer) -> None:
    parts = reasoned(tokenizer, "hm", "m*a", "b")
    answer = whole(make_call(starts_in_reasoning=True), thinking, *parts)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hmm", "hmm", "ab")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}  # the marker is one of them
    chunks = streamed(make_call(starts_in_reasoning=True, include_usage=True), thinking, *parts)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert [entry.get("reasoning") for entry in deltas] == [None, "hm", "m", None, None, None]
    assert [entry.get("reasoning_content") for entry in deltas] == [None, "hm", "m", None, None, None]
    assert [entry.get("content") for entry in deltas] == ["", None, None, "a", "b", None]
    assert chunks[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_stands_under_the_operators_name_alone(
    thinking: AnswerContext, tokenizer: Tokenizer, name: str
) -> None:
    parts = reasoned(tokenizer, "hm*", "ab")
    call = make_call(starts_in_reasoning=True, reasoning_fields=(name,))
    message = whole(call, thinking, *parts)["choices"][0]["message"]
    assert {key: message[key] for key in message if key.startswith("reasoning")} == {name: "hm"}
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(call, thinking, *parts)]
    assert [entry for entry in deltas if any(key.startswith("reasoning") for key in entry)] == [{name: "hm"}]


@pytest.mark.parametrize("pieces", [["hm</think>ok"], ["h", "m</th", "ink>o", "k"], ["hm", "</think>", "ok"]])
def test_reasoning_that_no_single_token_ends_is_counted_too(tokenizer: Tokenizer, pieces: list[str]) -> None:
    context = AnswerContext(TokenTexts(tokenizer), frozenset({EOS}), None, ThinkFormat())
    end: dict[str, Any] = {"finish": "stop", "stop_reason": EOS}
    parts = [delta(text, token_ids=tokenizer.encode(text)) for text in pieces] + [delta(token_ids=[EOS], **end)]
    joined = [delta("".join(pieces), token_ids=[*tokenizer.encode("".join(pieces)), EOS], **end)]
    for deltas in (parts, joined):
        usage = whole(make_call(starts_in_reasoning=True), context, *deltas)["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("hm</think>")}


@pytest.mark.parametrize(("mode", "content"), [("drop", "ab"), ("content", "hm*ab")])
def test_reasoning_is_left_out_or_left_in(
    thinking: AnswerContext, tokenizer: Tokenizer, mode: str, content: str
) -> None:
    parts = reasoned(tokenizer, "hm*", "ab")
    call = make_call(starts_in_reasoning=True, reasoning=mode)
    assert whole(call, thinking, *parts)["choices"][0]["message"] == {
        "role": "assistant",
        "content": content,
        "refusal": None,
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(call, thinking, *parts)]
    assert not any("reasoning" in entry for entry in deltas)
    assert "".join(entry.get("content", "") for entry in deltas) == content


CALLS = ('*sure CALL weather {"a": 1};', 'CALL weather {"b": 2};')


def test_tool_calls_have_ids_names_and_arguments(thinking: AnswerContext) -> None:
    call = make_call(tools=ToolUse((WEATHER,), "auto"), starts_in_reasoning=True)
    choice = whole(call, thinking, *map(delta, CALLS), delta("", "stop"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "sure "
    assert [entry["function"] for entry in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"a": 1}'},
        {"name": "weather", "arguments": '{"b": 2}'},
    ]
    ids = [entry["id"] for entry in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(entry.startswith("call_") for entry in ids)


def test_streamed_tool_calls_join_to_the_same(thinking: AnswerContext) -> None:
    call = make_call(tools=ToolUse((WEATHER,), "auto"), starts_in_reasoning=True)
    letters = [delta(letter) for letter in "".join(CALLS)]
    chunks = streamed(call, thinking, *letters, delta("", "stop"))
    joined: dict[int, list[str]] = {}
    for chunk in chunks:
        for entry in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in entry:
                assert entry["type"] == "function"
                joined[entry["index"]] = [entry["function"]["name"], ""]
            joined[entry["index"]][1] += entry["function"]["arguments"]
    assert joined == {0: ["weather", '{"a": 1}'], 1: ["weather", '{"b": 2}']}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]


@pytest.mark.parametrize(
    ("choice", "finish", "told"),
    [
        ("auto", "stop", "tool_calls"),
        ("required", "stop", "tool_calls"),
        ("weather", "stop", "stop"),
        ("auto", "length", "length"),
    ],
)
def test_the_end_with_a_call_is_told_as_openai_does(
    thinking: AnswerContext, choice: str, finish: str, told: str
) -> None:
    call = make_call(tools=ToolUse((WEATHER,), choice), starts_in_reasoning=True)
    answer = whole(call, thinking, delta("*CALL weather {};", finish))
    assert answer["choices"][0]["finish_reason"] == told
    assert answer["choices"][0]["message"]["content"] is None


def test_only_one_call_is_made_where_several_are_not_allowed(thinking: AnswerContext) -> None:
    call = make_call(tools=ToolUse((WEATHER,), "auto", parallel=False), starts_in_reasoning=True)
    message = whole(call, thinking, *map(delta, CALLS), delta("", "stop"))["choices"][0]["message"]
    assert [entry["function"]["arguments"] for entry in message["tool_calls"]] == ['{"a": 1}']


def test_what_the_parsers_hold_back_comes_at_the_end(thinking: AnswerContext) -> None:
    call = make_call(tools=ToolUse((WEATHER,), "auto"), starts_in_reasoning=True)
    chunks = streamed(call, thinking, delta("*a CALL"), delta(" b", "stop"))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "a CALL b"


def test_without_a_tokenizer_tokens_are_shown_by_their_ids() -> None:
    context = AnswerContext(TokenTexts(None), frozenset())
    call = make_call("completions", logprobs=True, params={"logprobs": 0})
    found = whole(call, context, delta("", "stop", token_ids=[7], logprobs=[logprob(7)]))["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:7"]
