"""F5: every route there is, against every way of coming without a key; and how long a refusal takes tells nothing.

The real application is asked alone, behind its guards, and within a whole server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hookline.config import EngineConfig
from hookline.scheduling.output import Load
from hookline.serving import probes
from hookline.serving.app import make_app
from hookline.serving.guards import OPEN_PATHS, Guards
from hookline.serving.server_config import ServerConfig
from hookline.serving.web import make_web_router
from tests.serving.fakes import Rig, delta
from tests.serving.wire import Answer, Wire, serving
from tests.suites import served as real
from tests.suites.invariants import leak_faults, status_faults
from tests.suites.raw_client import Connection
from tests.suites.raw_sockets import Outside
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.watch import Watch

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
_PAIRS, _TRIES = 10_000, 3
_SHUFFLES, _CHANCE = 200, 0.01
_REFUSED = ("/v1/chat/completions", "/metrics", "/openapi.json", "/plugins")


def run(tier: Tier, seed: int) -> SuiteReport:
    guarded, routes = make_guarded(config(api_keys=(KEY, OTHER)))
    planned = 2 * len(routes) * (len(WITHOUT) + 2 * len(ODD_PATHS) + 1) + 4
    events = [*WITHOUT, *ODD_PATHS, *_REFUSED, "open routes", "with a key"]
    tally = Tally("F5", tier, seed, planned, [label + name for label in ("", "server: ") for name in events])
    asyncio.run(_run_front(tally, guarded, routes))
    asyncio.run(_run_server(tally, routes))
    with tally.case("the time of a refusal"):
        guards = Guards(Probe(), config(api_keys=(KEY, OTHER)))
        chances = [_chance(tally.random, guards, _PAIRS)]
        while chances[-1] <= _CHANCE and len(chances) < _TRIES:
            chances.append(_chance(tally.random, guards, _PAIRS))
        tally.expect(chances[-1] > _CHANCE, f"a refusal's time tells how near the key is: {chances}")
    return tally.report()


async def _run_front(tally: Tally, guarded: ASGIApp, routes: list[tuple[str, str]]) -> None:
    async with serving(guarded) as wire:
        await _Stranger(tally, wire, "").ask_all(routes)


async def _run_server(tally: Tally, known: list[tuple[str, str]]) -> None:
    keys = {"HOOKLINE_API_KEYS": f"{KEY},{OTHER}"}
    with tiny_model() as model:
        async with real.serving(model, environment=keys) as served:
            watch = Watch(tally, served, KEY)
            await watch.begin(grammars=False)
            routes = sorted({*known, *await _documented(served.port)})
            await _Stranger(tally, Outside(served.port), "server: ").ask_all(routes)
            for key in (KEY, OTHER):
                with tally.case("server: a completion with a key"):
                    async with Connection(served.port, key) as connection:
                        reply = await connection.call("POST", "/v1/completions", real.PROBE)
                    watch.reply("server: with a key", reply)
                    tally.expect(reply.status == 200, f"server: with a key a completion gets {reply.status}")
            with tally.case("server: after all"):
                await watch.check("after those without a key")
                tally.expect(KEY not in served.said and OTHER not in served.said, "a key is in the server's log")


async def _documented(port: int) -> set[tuple[str, str]]:
    """The routes in a server's own document."""
    async with Connection(port, KEY) as connection:
        paths = (await connection.call("GET", "/openapi.json")).json["paths"]
    return {
        (method.upper(), path.replace("{model_id}", "tiny")) for path, methods in paths.items() for method in methods
    }


class _Stranger:
    """Comes without a key and, where one is due, with it.

    Args:
        label: before the names of its cases and events.
    """

    def __init__(self, tally: Tally, wire: Wire, label: str) -> None:
        self._tally = tally
        self._wire = wire
        self._label = label
        self._bodies = set[bytes]()  # of the refusals

    async def ask_all(self, routes: list[tuple[str, str]]) -> None:
        """Asks in all ways; all refusals must be the same."""
        tally, label = self._tally, self._label
        for method, path in routes:
            for name, headers in WITHOUT.items():
                with tally.case(f"{label}{method} {path}, {name}"):
                    self._judge(await self._ask(method, path, *headers), method, path, name)
            for name, change in ODD_PATHS.items():
                with tally.case(f"{label}{method} {change(path)}"):
                    await self._ask_oddly(method, change(path), name)
                with tally.case(f"{label}{method} {change(path)} with a key"):
                    answer = await self._ask(method, change(path), BEARER)
                    # A model's name may be anything, and what is encoded is what it stands for.
                    free = path.startswith("/v1/models/") or name == "encoded"
                    told = f"{label}{method} {change(path)} with a key: {answer.status}"
                    tally.expect(free or answer.status in (404, 405), told)
            with tally.case(f"{label}{method} {path} with a key"):
                answer = await self._ask(method, path, BEARER)
                tally.expect(answer.status not in (401, 403), f"{label}{method} {path} with a key: {answer.status}")
                tally.event(f"{label}with a key")
        tally.expect(len(self._bodies) == 1, f"{label}refusals differ: {sorted(self._bodies)[:3]}")

    async def _ask(self, method: str, path: str, *headers: str) -> Answer:
        answer = await ask(self._wire, method, path, *headers)
        body = answer.body.decode("utf-8", "replace")
        faults = leak_faults(body, answer.headers, (KEY, OTHER)) + status_faults(answer.status, answer.headers)
        for fault in faults:
            self._tally.fail(f"{self._label}{method} {path}: {fault}: {body[:200]}")
        return answer

    def _judge(self, answer: Answer, method: str, path: str, name: str) -> None:
        told = f"{self._label}{method} {path}, {name}: {answer.status}"
        tally = self._tally
        tally.event(self._label + name)
        if path.encode() in OPEN_PATHS:
            tally.expect(answer.status == (400 if name == "odd host" else 200), told)
            tally.event(f"{self._label}open routes")
            return
        tally.expect(answer.status == 401, told)
        tally.expect(answer.headers.get("www-authenticate") == "Bearer", f"{told}: its headers are {answer.headers}")
        self._bodies.add(answer.body)
        if path in _REFUSED:
            tally.event(self._label + path)

    async def _ask_oddly(self, method: str, changed: str, name: str) -> None:
        if changed.encode() not in OPEN_PATHS:
            answer = await self._ask(method, changed)
            told = f"{self._label}{method} {changed} without a key: {answer.status}"
            self._tally.expect(answer.status == 401, told)
            self._bodies.add(answer.body)
            self._tally.event(self._label + name)


def _chance(rng: random.Random, guards: Guards, pairs: int) -> float:
    """A permutation test over `pairs` of a key whose last byte is wrong and one that is wrong in all.

    By chance alone one in a hundred is as low as 0.01; what is no chance is so every time.
    """
    near, far = KEY[:-1] + "x", "x" * len(KEY)

    async def differences() -> list[int]:
        found = []
        for _ in range(pairs):
            times = dict[str, int]()
            for key in rng.sample([near, far], 2):
                begin = time.perf_counter_ns()
                await call(guards, ("authorization", f"Bearer {key}"))
                times[key] = time.perf_counter_ns() - begin
            found.append(times[near] - times[far])
        return found

    ordered = sorted(asyncio.run(differences()))
    middle = ordered[len(ordered) // 10 : -len(ordered) // 10]  # without what other processes did
    seen = abs(sum(middle))
    shuffled = [abs(sum(value * rng.choice((-1, 1)) for value in middle)) for _ in range(_SHUFFLES)]
    return sum(total >= seen for total in shuffled) / len(shuffled)


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
    front = Rig(script=lambda request: [delta("a", "length")]).front
    front.config = settings
    app: Any = make_app(front, [probes.make_router(front.lifecycle, Load), make_web_router()])
    found = [
        (method, route.path.replace("{model_id:path}", "tiny"))
        for route in leaves(front_routes(app))
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    ]
    return app, sorted(set(found))


async def ask(wire: Wire, method: str, path: str, *headers: str) -> Answer:
    body = b"{}" if method == "POST" else b""
    return await wire.get(path, JSON, *headers, method=method, body=body)


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
