"""The application as a whole: routes, errors of one form, the client's id, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

import pytest

from hookline.scheduling.output import OutputDelta
from hookline.serving.app import make_app
from hookline.serving.requests.validated import ValidatedRequest
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import PATIENCE, Reply, Rig, delta, make_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def hello(request: ValidatedRequest) -> list[OutputDelta]:
    return [delta("Hello", "stop", stop_reason=258)]


def get(rig: Rig, path: str, method: str = "GET", **options: Any) -> Reply:
    return asyncio.run(rig.get(path, method, **options))


def post(rig: Rig, path: str, body: Any, **options: Any) -> Reply:
    return asyncio.run(rig.post(path, body, **options))


def test_models_are_listed_with_what_clients_look_for(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    listed = get(rig, "/v1/models").json
    assert listed["object"] == "list"
    (row,) = listed["data"]
    expected = {"id": "tiny", "object": "model", "max_model_len": 256, "context_length": 256, "root": "tiny"}
    assert expected.items() <= row.items()
    assert {"created", "owned_by", "parent", "architecture", "plugin"} <= row.keys()
    assert get(rig, "/v1/models/tiny").json == row
    missing = get(rig, "/v1/models/org/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_tokens_go_forth_and_back(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    made = post(rig, "/tokenize", {"prompt": "hey"}).json
    assert (made["count"], made["max_model_len"]) == (3, 256)
    assert post(rig, "/detokenize", {"tokens": made["tokens"]}).json == {"prompt": "hey"}
    assert get(rig, "/tokenizer_info").json["eos_token"] == "<|endoftext|>"
    assert post(rig, "/detokenize", {"tokens": [-1]}).status == 400


@pytest.mark.parametrize("path", ["/version", "/plugins", "/health", "/livez", "/readyz", "/startup", "/load"])
def test_small_routes_answer_in_json(path: str) -> None:
    reply = get(Rig(), path)
    assert reply.status == 200
    assert isinstance(reply.json, dict)


def test_metrics_and_the_page_are_there() -> None:
    rig = Rig()
    assert b"startup_stage_seconds" in get(rig, "/metrics").body
    assert get(rig, "/").headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/nothing", "GET", 404),
        ("/v1/models/", "GET", 404),
        ("/docs", "GET", 404),
        ("/redoc", "GET", 404),
        ("//v1/models", "GET", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/v1/models", "DELETE", 405),
        ("/v1/models", "FOO", 405),
    ],
)
def test_what_is_no_route_is_an_error_object(path: str, method: str, status: int) -> None:
    rig = Rig()
    reply = get(rig, path, method)
    assert reply.status == status
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert ("allow" in reply.headers) == (status == 405)
    assert rig.metrics.answered[-1][1:] == (method, status)


def test_routes_are_counted_by_their_template(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    post(rig, "/v1/chat/completions", CHAT)
    get(rig, "/v1/models/tiny")
    get(rig, "/nowhere/at/all")
    assert [entry[0] for entry in rig.metrics.answered] == ["/v1/chat/completions", "/v1/models/{model_id:path}", None]


def test_the_clients_id_is_given_back_and_is_not_ours(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    replies = [post(rig, "/v1/chat/completions", CHAT, headers=[("x-request-id", "a")]) for _ in range(2)]
    assert [reply.headers["x-request-id"] for reply in replies] == ["a", "a"]
    assert len({reply.json["id"] for reply in replies}) == 2
    assert get(rig, "/nowhere", headers=[("x-request-id", "b")]).headers["x-request-id"] == "b"


def test_an_empty_id_is_none(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, hello)
    reply = post(rig, "/v1/chat/completions", CHAT, headers=[("x-request-id", "")])
    assert reply.status == 200 and "x-request-id" not in reply.headers


@pytest.mark.parametrize("label", ["x" * 257, "caf\xe9", "a\tb"])
def test_a_clients_id_that_is_no_label_is_refused(tokenizer: Tokenizer, label: str) -> None:
    rig = Rig(tokenizer, hello)
    reply = post(rig, "/v1/chat/completions", CHAT, headers=[("x-request-id", label)])
    assert (reply.status, reply.error["param"]) == (400, "x-request-id")
    assert "x-request-id" not in reply.headers
    assert rig.engine.answers == []


KEY = "a-key-of-the-test"
JSON = ("content-type", "application/json")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"headers": [("authorization", "Bearer of-none")]}, 401),
        ({"headers": [("authorization", f"Bearer {KEY}"), ("host", "evil.example")]}, 400),
        ({"headers": [("authorization", f"Bearer {KEY}"), JSON], "method": "POST"}, 415),  # it has that header twice
        ({"headers": [("authorization", f"Bearer {KEY}")], "method": "POST"}, 405),
        ({"headers": [("authorization", f"Bearer {KEY}")]}, 200),
    ],
)
def test_what_the_guards_refuse_is_counted_and_carries_the_clients_id(options: dict[str, Any], status: int) -> None:
    rig = Rig()
    rig.front.config = dataclasses.replace(rig.config, api_keys=(KEY,))
    rig.app = make_app(rig.front)
    options["headers"] = [*options["headers"], ("x-request-id", "mine")]
    reply = get(rig, "/v1/models", **options)
    assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")
    route = "/v1/models" if status in (200, 405) else None  # the others have not reached any
    assert rig.metrics.answered == [(route, options.get("method", "GET"), status)]


def test_a_wrong_id_is_no_way_past_the_key() -> None:
    rig = Rig()
    rig.front.config = dataclasses.replace(rig.config, api_keys=(KEY,))
    rig.app = make_app(rig.front)
    reply = get(rig, "/v1/models", headers=[("x-request-id", "x" * 1000)])
    assert reply.status == 401 and "x-request-id" not in reply.headers


def test_a_fault_of_ours_tells_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tokenizer, hello)

    def fail() -> None:
        raise RuntimeError("secret at /some/place")

    monkeypatch.setattr(rig.metrics, "render", fail)
    reply = get(rig, "/metrics")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert b"secret" not in reply.body


def test_large_bodies_are_checked_too(tokenizer: Tokenizer) -> None:
    """They take another way: through a thread."""
    rig = Rig(tokenizer, hello)
    reply = post(rig, "/v1/completions", {"prompt": "x" * 100_000})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_nobody_waits_for_a_large_text_of_another(
    tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, encode = threading.Event(), threading.Event(), tokenizer.encode

    def slow(text: str, *options: Any, **others: Any) -> list[int]:
        begun.set()
        assert go_on.wait(PATIENCE / 2), "nothing else was served meanwhile"
        return encode(text, *options, **others)

    async def run() -> Reply:
        rig = Rig(tokenizer, hello)
        monkeypatch.setattr(tokenizer, "encode", slow)
        async with rig.call(path, {"prompt": "x" * 50_000}) as reply:
            await asyncio.to_thread(begun.wait, PATIENCE)
            assert (await rig.get("/livez")).status == 200
            go_on.set()
            await reply.done()
        return reply

    assert asyncio.run(run()).status == (200 if path == "/tokenize" else 400)


def test_the_openapi_document_describes_bodies_answers_and_errors(tokenizer: Tokenizer) -> None:
    document = get(Rig(tokenizer), "/openapi.json").json
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()
    assert "HTTPValidationError" not in text
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        route = document["paths"][path]["post"]
        assert route["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1] in schemas
        assert "422" not in route["responses"]
        assert {"200", "400", "401", "413", "503"} <= route["responses"].keys()
    assert "messages" in schemas["ChatBody"]["properties"]
