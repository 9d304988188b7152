"""OpenAI's own client, asking for plain text: whole, streamed, from several, and in vain."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from tests.clients.server import KEY, Server

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def chat(server: Server, **fields: Any) -> Any:
    return server.client().chat.completions.create(**{"messages": MESSAGES, **GREEDY, **fields})


def complete(server: Server, **fields: Any) -> Any:
    return server.client().completions.create(**{"prompt": "The sea", **GREEDY, **fields})


def test_models_are_listed_and_found_by_name(tiny_server: Server) -> None:
    client = tiny_server.client()
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "hookline")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == model.model_extra["context_length"] == 512
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_is_answered(tiny_server: Server) -> None:
    answer = chat(tiny_server)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert abs(answer.created - time.time()) < 60


def test_max_completion_tokens_wins(tiny_server: Server) -> None:
    assert chat(tiny_server, max_tokens=24, max_completion_tokens=5).usage.completion_tokens == 5


def test_a_stream_is_the_whole_answer_in_pieces(tiny_server: Server) -> None:
    whole = chat(tiny_server, max_tokens=60)
    chunks = list(chat(tiny_server, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (last.id, last.created, "tiny", "chat.completion.chunk")
    }
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[0].choices[0].delta.content == ""
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["length"]
    assert {part.usage for part in parts} == {None}
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 60
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_several_answers_interleave_by_index(tiny_server: Server) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 5}
    whole = [choice.message.content for choice in chat(tiny_server, **options).choices]
    assert len(set(whole)) == 3
    streamed, ends = ["", "", ""], []
    for chunk in chat(tiny_server, stream=True, **options):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert streamed == whole
    assert sorted(ends) == [0, 1, 2]


def test_completions_take_texts_and_token_ids(tiny_server: Server) -> None:
    both = complete(tiny_server, prompt=["The sea", "A ship"])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.object == "text_completion"
    alone = [complete(tiny_server, prompt=prompt).choices[0].text for prompt in ("The sea", "A ship")]
    assert [choice.text for choice in both.choices] == alone
    assert alone[0] != alone[1]
    ids = tiny_server.tokenize("A ship")
    assert complete(tiny_server, prompt=ids).choices[0].text == alone[1]
    assert complete(tiny_server, prompt=[ids]).choices[0].text == alone[1]


def test_a_completions_stream_is_the_whole_answer_in_pieces(tiny_server: Server) -> None:
    whole = complete(tiny_server, prompt=["The sea", "A ship"], n=2, temperature=1, seed=1)
    streamed, stream = ["", "", "", ""], complete(
        tiny_server, prompt=["The sea", "A ship"], n=2, temperature=1, seed=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens == 4 * 24


def test_echo_repeats_the_prompt(tiny_server: Server) -> None:
    assert complete(tiny_server, echo=True).choices[0].text == "The sea" + complete(tiny_server).choices[0].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_text_ends_before_a_stop_string(smollm2_server: Server, stream: bool) -> None:
    client = smollm2_server.client()
    asked: dict[str, Any] = {"model": "smollm2", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[9:14]
    assert len(stop) == 5
    if stream:
        chunks = list(client.completions.create(**asked, stop=[stop, "never there"], stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.completions.create(**asked, stop=[stop, "never there"]).choices
        text, reason = choice.text, choice.finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_chat_logprobs_are_of_the_texts_tokens(tiny_server: Server) -> None:
    bytes_alone = {"allowed_token_ids": list(range(256))}  # special tokens are spelled here, and left out of the text
    answer = chat(tiny_server, logprobs=True, top_logprobs=3, extra_body=bytes_alone)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode(errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # They are of the model's own logits: a token that is not allowed may be likelier.
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert all(top.logprob == entry.logprob for top in entry.top_logprobs if top.token == entry.token != "\ufffd")
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )


def test_completions_logprobs_with_echo_score_the_prompt(tiny_server: Server) -> None:
    (choice,) = complete(tiny_server, prompt="The sea", echo=True, logprobs=2, max_tokens=3).choices
    found = choice.logprobs
    assert found.tokens[:7] == list("The sea")
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 10
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset[:8] == list(range(8))
    assert all(found.token_logprobs[i] == max(found.top_logprobs[i].values()) for i in range(7, 10))
    (scored,) = complete(tiny_server, prompt="The sea", echo=True, logprobs=2, max_tokens=0).choices
    assert scored.text == "The sea"
    assert scored.logprobs.token_logprobs == found.token_logprobs[:7]


def test_a_seed_repeats_the_answer(tiny_server: Server) -> None:
    first, again, other = (chat(tiny_server, temperature=1, seed=seed).choices[0].message.content for seed in (3, 3, 4))
    assert first == again != other


def test_a_bias_chooses_the_token(tiny_server: Server) -> None:
    (token_id,) = tiny_server.tokenize("x")
    assert chat(tiny_server, logit_bias={str(token_id): 100}).choices[0].message.content == "x" * 24


def test_extra_fields_go_by_extra_body(tiny_server: Server) -> None:
    answer = chat(tiny_server, max_tokens=9, extra_body={"min_tokens": 9, "ignore_eos": True, "return_token_ids": True})
    assert len(answer.choices[0].model_extra["token_ids"]) == 9
    assert len(answer.model_extra["prompt_token_ids"]) == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 9999}, "temperature", "invalid_type"),
        ({"n": 0}, "n", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, "messages", "context_length_exceeded"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "unsupported_field"),
    ],
)
def test_a_bad_request_names_its_field(
    tiny_server: Server, fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(tiny_server, **fields)
    assert caught.value.param == param
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert caught.value.message


def test_errors_have_the_clients_own_classes(tiny_server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(tiny_server, model="other")
    assert missing.value.code == "model_not_found"
    assert "tiny" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        tiny_server.client().embeddings.create(model="tiny", input="text")
    for key in ("wrong-key-of-tests", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError):
            tiny_server.client(key).models.list()


def test_many_at_once_get_what_each_gets_alone(tiny_server: Server) -> None:
    prompts = [f"Story {number} of the sea" for number in range(16)]
    alone = [complete(tiny_server, prompt=prompt, temperature=1, seed=2).choices[0].text for prompt in prompts]

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            prompt=prompt, model="tiny", temperature=1, seed=2, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with tiny_server.async_client() as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == alone
    assert len(set(alone)) == len(prompts)


def test_a_cancelled_stream_ends_in_the_engine(tiny_server: Server) -> None:
    before = tiny_server.metric("request_success_total", finished_reason="client_gone")

    async def leave() -> None:
        async with tiny_server.async_client() as client:
            stream = await client.chat.completions.create(
                messages=MESSAGES, model="tiny", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while tiny_server.metric("request_success_total", finished_reason="client_gone") == before:
        assert time.monotonic() < deadline
    assert tiny_server.metric("num_requests_running") == 0
    assert chat(tiny_server).usage.completion_tokens == 24


def test_an_error_inside_a_stream_is_raised(tiny_server: Server) -> None:
    """Behind its first token there is none that both the grammar and the list allow."""
    (token_id,) = tiny_server.tokenize("a")
    impossible = {"allowed_token_ids": [token_id], "structured_outputs": {"regex": "ab"}}
    stream = complete(tiny_server, stream=True, extra_body=impossible)
    assert next(iter(stream)).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="leave no token to choose"):
        list(stream)


def test_where_a_server_stands(tiny_server: Server) -> None:
    assert httpx.get(f"{tiny_server.url}/health").status_code == 200
    shown = httpx.get(f"{tiny_server.url}/startup").json()
    assert shown["status"] == "ready" and shown["stages"]["loading"] > 0
