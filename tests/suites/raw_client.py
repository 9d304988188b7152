"""A client of HTTP/1.1 that can misbehave: it sends bytes as they are, and leaves when and how it likes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

PATIENCE = 30.0  # seconds without a byte after which a server counts as hung
_DONE = b"[DONE]"


@dataclass(slots=True)
class Reply:
    """An answer that has been read."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def text(self) -> str:
        """Of a completion with one choice."""
        return str(self.json["choices"][0]["text"])


@dataclass(slots=True)
class Told:
    """What a stream has told so far.

    Attributes:
        status: 0 before its head.
        pieces: the texts of each choice, by index.
        finish: the finish reason of each choice.
        error: of an error event, or of an answer that is no stream.
        done: whether `[DONE]` has come.
        broken: how the connection ended before that; "" where it did not.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    broken: str = ""
    events: int = 0

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces.get(index, ()))

    @property
    def ended(self) -> bool:
        """Whether the client knows how its request ended: by finish reasons or by an error."""
        return self.error is not None or (self.done and bool(self.finish))

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event."""
        self.events += 1
        if "error" in event:
            self.error = dict(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                self.pieces.setdefault(choice["index"], []).append(text)
            if choice["finish_reason"] is not None:
                if choice["index"] in self.finish:
                    raise ValueError(f"the choice {choice['index']} has two finish reasons")
                self.finish[choice["index"]] = choice["finish_reason"]


def request_bytes(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A request as it goes over the wire; `body` is bytes, or what is to be JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


class Connection:
    """One connection. `async with Connection(port)`; it is used again for one request after the other."""

    def __init__(self, port: int, key: str = "") -> None:
        self._port = port
        self._own = {"Authorization": f"Bearer {key}"} if key else {}
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Connection:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        """Leaves politely."""
        self._writer.close()

    def reset(self) -> None:
        """Leaves with a RST, as a client does that has died."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def half_close(self) -> None:
        """Sends nothing more, and still reads."""
        self._writer.write_eof()

    async def drain(self, seconds: float) -> bytes:
        """Whatever comes until the server closes.

        Raises:
            TimeoutError: if it does not in time.
        """
        found = bytearray()
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):
                while part := await self._reader.read(2**16):
                    found += part
        return bytes(found)

    def send(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> None:
        """A request; `body` is bytes, or what is to be JSON."""
        self._writer.write(request_bytes(self._port, method, path, body, {**self._own, **(headers or {})}))

    async def reply(self) -> Reply:
        """Reads one answer to its end.

        Raises:
            TimeoutError: if the server sends nothing for `PATIENCE` seconds.
            ConnectionError, EOFError: if it closes before.
        """
        reply = await self._head()
        async for part in self._body(reply.headers):
            reply.body += part
        return reply

    async def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """`send`, then `reply`."""
        self.send(method, path, body, headers)
        return await self.reply()

    async def follow(self, told: Told, events: int | None = None) -> Told:
        """Reads a stream, to its end or until so many of its events have come.

        Never raises for what the server or the connection does: `told.broken` has it.
        """
        try:
            reply = await self._head()
            told.status, told.headers = reply.status, reply.headers
            if reply.status != 200:
                async for part in self._body(reply.headers):
                    reply.body += part
                told.error = reply.json["error"]
                return told
            rest = b""
            async for part in self._body(reply.headers):
                *whole, rest = (rest + part).split(b"\n\n")
                for event in whole:
                    _take_event(told, event)
                if events is not None and told.events >= events:
                    return told
        except (OSError, EOFError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
            told.broken = type(error).__name__
        return told

    async def _head(self) -> Reply:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), PATIENCE)
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Reply(int(first.split(" ")[1]), headers)

    async def _body(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            yield await asyncio.wait_for(self._reader.readexactly(int(headers.get("content-length", "0"))), PATIENCE)
            return
        while size := int(await asyncio.wait_for(self._reader.readuntil(b"\r\n"), PATIENCE), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)


def _take_event(told: Told, event: bytes) -> None:
    if event.startswith(b":"):
        return  # a comment
    data = event.removeprefix(b"data: ")
    if told.done:
        raise ValueError(f"{event!r} came behind [DONE]")
    if data == _DONE:
        told.done = True
    else:
        told.take(orjson.loads(data))


async def ask(port: int, path: str, body: object = None, key: str = "") -> Reply:
    """One request on a connection of its own: GET without a body, POST with one."""
    async with Connection(port, key) as connection:
        return await connection.call("GET" if body is None else "POST", path, body)


async def stream(port: int, body: Mapping[str, Any], path: str = "/v1/completions", key: str = "") -> Told:
    """A stream on a connection of its own, read to its end."""
    told = Told()
    connection = Connection(port, key)
    with suppress(ConnectionError):
        await connection.open()
        connection.send("POST", path, {**body, "stream": True})
        await connection.follow(told)
        connection.close()
        return told
    told.broken = told.broken or "refused"
    return told
