"""Keys, hosts and bodies (suite F5): every route there is, against every way of coming without a key."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hookline.config import EngineConfig
from hookline.scheduling.output import Load
from hookline.serving import probes
from hookline.serving.api_errors import ApiError
from hookline.serving.app import make_app
from hookline.serving.guards import OPEN_PATHS, Guards, parse_object, read_json
from hookline.serving.limits import Limits
from hookline.serving.server_config import ServerConfig
from hookline.serving.web import make_web_router
from tests.serving.fakes import Rig
from tests.serving.wire import Answer, Wire, memory, serving

KEY, OTHER = "sk-first-key-123", "sk-other-key-456"
BEARER = f"Authorization: Bearer {KEY}"
JSON = "Content-Type: application/json"
# Ways of having no key, as headers.
WITHOUT: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "empty": ("Authorization: ",),
    "empty bearer": ("Authorization: Bearer ",),
    "wrong": ("Authorization: Bearer sk-wrong-key-999",),
    "prefix": (f"Authorization: Bearer {KEY[:-1]}",),
    "a byte more": (f"Authorization: Bearer {KEY}x",),
    "other scheme": (f"Authorization: Basic {KEY}",),
    "no scheme": (f"Authorization: {KEY}",),
    "two": (BEARER, BEARER),
    "in another header": (f"X-Api-Key: {KEY}", f"Cookie: {KEY}"),
    "odd host": ("Host: evil.example",),
}
# Ways of writing a path that some servers take for the same.
ODD_PATHS: Mapping[str, Callable[[str], str]] = {
    "two slashes": lambda path: "/" + path,
    "detour": lambda path: "/v1/.." + path,
    "encoded": lambda path: path[0] + f"%{ord(path[1]):02x}" + path[2:] if len(path) > 1 else "/%2e",
    "encoded slash": lambda path: "/%2f" + path[1:],
    "upper case": lambda path: path.upper() if len(path) > 1 else "//",
    "trailing dot": lambda path: path + ".",
    "trailing slash": lambda path: path + "/",
    "parameter": lambda path: path + ";x",
}


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model="tiny"), **fields)


def front_routes(app: Any) -> Any:
    """The routes of the innermost application."""
    while not hasattr(app, "routes"):
        app = app._app
    return app.routes


def leaves(routes: Any) -> Iterator[BaseRoute]:
    """All routes, those of routers within included."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from leaves(inner.routes)
        else:
            yield route


def make_guarded(settings: ServerConfig) -> tuple[ASGIApp, list[tuple[str, str]]]:
    """The real application behind its guards, and its routes as method and path."""
    front = Rig().front
    app: Any = make_app(front, [probes.make_router(front.lifecycle, Load), make_web_router()])
    found = [
        (method, route.path.replace("{model_id:path}", "tiny"))
        for route in leaves(front_routes(app))
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    ]
    return Guards(app, settings), sorted(set(found))


async def ask(wire: Wire, method: str, path: str, *headers: str) -> Answer:
    body = b"{}" if method == "POST" else b""
    return await wire.get(path, JSON, *headers, method=method, body=body)


def test_every_route_needs_a_key_in_every_way() -> None:
    async def run() -> None:
        guarded, routes = make_guarded(config(api_keys=(KEY, OTHER)))
        assert len(routes) >= 15
        assert {"/v1/chat/completions", "/metrics", "/openapi.json", "/plugins"} <= {path for _, path in routes}
        bodies, count = set[bytes](), 0
        async with serving(guarded) as wire:
            for method, path in routes:
                for name, headers in WITHOUT.items():
                    answer = await ask(wire, method, path, *headers)
                    if path.encode() in OPEN_PATHS:
                        assert answer.status == (400 if name == "odd host" else 200), (path, name)
                        continue
                    assert answer.status == 401, (path, name)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    bodies.add(answer.body)
                    count += 1
                for name, change in ODD_PATHS.items():
                    if change(path).encode() not in OPEN_PATHS:
                        assert (await ask(wire, method, change(path))).status == 401, (path, name)
                answer = await ask(wire, method, path, BEARER)
                assert answer.status not in (401, 403), path
                for name, change in ODD_PATHS.items():
                    if "{" not in path and not path.startswith("/v1/models/") and name != "encoded":
                        assert (await ask(wire, method, change(path), BEARER)).status in (404, 405), (path, name)
        assert count > 100
        assert len(bodies) == 1
        assert KEY.encode() not in bodies.pop()

    asyncio.run(run())


def test_only_what_is_meant_to_be_open_is_open() -> None:
    async def run() -> None:
        guarded, routes = make_guarded(config(api_keys=(KEY,)))
        async with serving(guarded) as wire:
            open_now = {path for method, path in routes if (await ask(wire, method, path)).status != 401}
            assert open_now == {"/", "/health", "/livez", "/readyz", "/startup"}
            assert (await wire.get("/no/such/route")).status == 401
        guarded, _ = make_guarded(config(api_keys=(KEY,), open_metrics=True))
        async with serving(guarded) as wire:
            assert (await wire.get("/metrics")).status == 200
            assert (await wire.get("/metrics/")).status == 401

    asyncio.run(run())


class Probe:
    """An application that remembers what reached it."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.salts.append(scope["state"]["cache_salt"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def call(guards: Guards, *headers: tuple[str, str], method: str = "GET", path: str = "/v1/models") -> int:
    """The status of a call without a socket."""
    status = 0

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = headers if any(name == "host" for name, _ in headers) else (("host", "localhost:8000"), *headers)
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given],
    }
    await guards(scope, receive, send)
    return status


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


def test_a_refusal_takes_the_same_time_however_near_the_key_is() -> None:
    """A permutation test over 10,000 pairs of a key whose last byte is wrong and one that is wrong in all.

    By chance alone one try in a hundred fails; what is no chance fails all three.
    """
    near, far = KEY[:-1] + "x", "x" * len(KEY)
    guards = Guards(Probe(), config(api_keys=(KEY, OTHER)))
    source = random.Random(0)

    async def differences(count: int) -> list[int]:
        found = []
        for _ in range(count):
            times = dict[str, int]()
            for key in source.sample([near, far], 2):
                begin = time.perf_counter_ns()
                await call(guards, ("authorization", f"Bearer {key}"))
                times[key] = time.perf_counter_ns() - begin
            found.append(times[near] - times[far])
        return found

    def chance() -> float:
        ordered = sorted(asyncio.run(differences(3334)))
        middle = ordered[len(ordered) // 10 : -len(ordered) // 10]  # without what other processes did
        seen = abs(sum(middle))
        shuffled = [abs(sum(value * source.choice((-1, 1)) for value in middle)) for _ in range(200)]
        return sum(total >= seen for total in shuffled) / len(shuffled)

    assert any(chance() > 0.01 for _ in range(3))


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
    ],
)
def test_hosts(host: str, allowed: tuple[str, ...], name: str, status: int) -> None:
    guards = Guards(Probe(), config(host=host, allowed_hosts=allowed))
    assert asyncio.run(call(guards, ("host", name))) == status


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
        return asyncio.run(read_json(Request({"type": "http", "headers": headers}, receive), limits))

    assert len(read(100_000)["a"]) == 100_000 - 8
    with pytest.raises(ApiError) as error:
        read(100_001)
    assert error.value.status == 413
