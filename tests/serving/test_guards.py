"""Keys, hosts and bodies. Suite F5 tries every route in every way of coming without a key."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from hookline.serving.api_errors import ApiError
from hookline.serving.guards import Guards, parse_object
from hookline.serving.intake import Intake
from hookline.serving.limits import Limits
from tests.serving.wire import memory, serving
from tests.suites.keyless import KEY, OTHER, Probe, ask, call, config, make_guarded


def test_only_what_is_meant_to_be_open_is_open() -> None:
    async def run() -> None:
        guarded, routes = make_guarded(config(api_keys=(KEY,)))
        async with serving(guarded) as wire:
            open_now = {path for method, path in routes if (await ask(wire, method, path)).status != 401}
            assert open_now == {"/", "/health", "/livez", "/ping", "/readyz", "/startup"}
            assert (await wire.get("/no/such/route")).status == 401
        guarded, _ = make_guarded(config(api_keys=(KEY,), open_metrics=True))
        async with serving(guarded) as wire:
            assert (await wire.get("/metrics")).status == 200
            assert (await wire.get("/metrics/")).status == 401

    asyncio.run(run())


def test_keys_have_salts_of_their_own() -> None:
    app = Probe()
    guards = Guards(app, config(api_keys=(KEY, OTHER)))
    for key in (KEY, OTHER, KEY):
        assert asyncio.run(call(guards, ("authorization", f"bearer {key}"))) == 200
    first, other, again = app.salts
    assert first == again != other
    assert first and other and KEY not in first
    open_server = Guards(app, config())
    assert asyncio.run(call(open_server)) == 200
    assert app.salts[-1] == ""


@pytest.mark.parametrize(
    ("host", "allowed", "name", "status"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", 200),
        ("127.0.0.1", (), "localhost", 200),
        ("127.0.0.1", (), "LOCALHOST:1", 200),
        ("127.0.0.1", (), "[::1]:8000", 200),
        ("::1", (), "[::1]", 200),
        ("127.0.0.2", (), "127.0.0.2:80", 200),
        ("127.0.0.1", (), "evil.example", 400),
        ("127.0.0.1", (), "localhost.evil.example", 400),
        ("127.0.0.1", (), "localhost.", 400),
        ("127.0.0.1", (), "localhost:80:80", 400),
        ("127.0.0.1", (), "", 400),
        ("127.0.0.1", ("chat.example",), "chat.example", 200),
        ("127.0.0.1", ("chat.example",), "localhost", 200),
        ("0.0.0.0", (), "any.example", 200),
        ("0.0.0.0", ("chat.example",), "chat.example:443", 200),
        ("0.0.0.0", ("chat.example",), "any.example", 400),
        ("0.0.0.0", ("chat.example:443",), "chat.example:443", 200),
        ("0.0.0.0", ("[fd00::1]:443", "fd00::2"), "[fd00::1]", 200),
        ("0.0.0.0", ("[fd00::1]:443", "fd00::2"), "[fd00::2]:80", 200),
    ],
)
def test_hosts(host: str, allowed: tuple[str, ...], name: str, status: int) -> None:
    guards = Guards(Probe(), config(host=host, allowed_hosts=allowed))
    assert asyncio.run(call(guards, ("host", name))) == status


def test_a_request_has_one_host() -> None:
    async def run() -> None:
        guarded, _ = make_guarded(config(api_keys=()))
        async with serving(guarded) as wire:
            answer = await wire.exchange(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert answer.last.status == 400 and b"one header Host; this one has 0" in answer.raw

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 415),
        ((("content-type", "text/plain"),), 415),
        ((("content-type", "application/x-www-form-urlencoded"),), 415),
        ((("content-type", "application/json"), ("content-type", "text/plain")), 415),
        ((("content-type", "application/jsonp"),), 415),
        ((("content-type", "application/json"), ("content-encoding", "gzip")), 415),
        ((("content-type", "application/json"),), 200),
        ((("content-type", "Application/JSON; charset=utf-8"),), 200),
    ],
)
def test_bodies_say_that_they_are_json(headers: tuple[tuple[str, str], ...], status: int) -> None:
    assert asyncio.run(call(Guards(Probe(), config()), *headers, method="POST")) == status


BAD_BODIES = {
    "empty": b"",
    "spaces": b"  ",
    "list": b"[1]",
    "number": b"1",
    "null": b"null",
    "cut": b'{"a": ',
    "two": b"{} {}",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "too large a number": b'{"a": 1e999}',
    "single quotes": b"{'a': 1}",
    "comment": b'{"a": 1} // b',
    "last comma": b'{"a": 1,}',
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "mark before it": b'\xef\xbb\xbf{"a": 1}',
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "raw line feed in a string": b'{"a": "\n"}',
    "NUL behind it": b'{"a": 1}\0',
    "a key twice": b'{"a": 1, "b": 2, "a": 3}',
    "a key twice within": b'{"x": [{"a": 1, "a": 2}]}',
    "a key twice with an escape": b'{"a": 1, "\\u0061": 2}',
    "a key 100,000 times": b"{" + b'"a":1,' * 99_999 + b'"a":1}',
    "too deep": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "far too deep": b"[" * 100_000,
    "objects far too deep": b'{"a":' * 100_000,
    "many lists": b'{"a":[' + b"[]," * 200_000 + b"[]]}",
    "open string": b'{"' + b"a" * 100_000,
    "many quotes": b'"\\' * 100_000,
    "closed too often": b"}" * 100_000,
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_what_is_no_sound_object_is_refused_at_little_cost(body: bytes) -> None:
    before, begin = memory(), time.perf_counter()
    with pytest.raises(ApiError) as error:
        parse_object(body, 64)
    assert error.value.status == 400 and error.value.code == "invalid_json"
    assert len(error.value.message) < 200
    assert time.perf_counter() - begin < 1
    assert memory() - before < 50e6


GOOD_BODIES = [
    {},
    {"a": [{"a": 1}, {"a": 2}], "b": {"a": None}},
    {"text": 'quotes " and \\ and {"a": [[[', "a": "}]"},
    {"é": "👩‍👩‍👧", "e\u0301": True},
    {"deep": json.loads("[" * 63 + "]" * 63)},
]


@pytest.mark.parametrize("value", GOOD_BODIES)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_sound_objects_are_read(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode(), 64) == value


@pytest.mark.parametrize("told", [True, False])
def test_a_body_is_read_up_to_the_limit(told: bool) -> None:
    limits = Limits(body_bytes=100_000)

    def read(size: int) -> dict[str, Any]:
        body = b'{"a":"' + b"b" * (size - 8) + b'"}'
        parts = [body[start : start + 30_000] for start in range(0, size, 30_000)]

        async def receive() -> Any:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        headers = [(b"content-length", str(size).encode())] if told else []
        return asyncio.run(Intake(limits).read(Request({"type": "http", "headers": headers}, receive), dict))

    assert len(read(100_000)["a"]) == 100_000 - 8
    with pytest.raises(ApiError) as error:
        read(100_001)
    assert error.value.status == 413
