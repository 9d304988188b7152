"""A real server of any ASGI application on a free port, and a client that sends bytes as they are."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from hookline.serving.limits import Limits
from hookline.serving.protocol import BoundedProtocol
from hookline.serving.supervisor import HttpServer, http_server

PATIENCE = 10.0  # seconds after which a test that waits has failed
HEAD = b"Host: localhost\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def free_listener() -> socket.socket:
    """A socket that listens on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


@dataclass
class Wire:
    """A server that runs."""

    port: int
    server: HttpServer

    async def exchange(self, *parts: bytes | float) -> Answer:
        """Sends parts, waiting where a number of seconds stands, and reads until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(read_all(reader))
        try:
            for part in parts:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            return Answer(await asyncio.wait_for(reading, PATIENCE))
        except ConnectionError:
            return Answer(await asyncio.wait_for(reading, PATIENCE))
        finally:
            reading.cancel()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def get(self, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> Answer:
        """An ordinary request, after which the connection closes."""
        lines = [f"{method} {path} HTTP/1.1", *headers, "Connection: close"]
        if not any(line.lower().startswith("host:") for line in headers):
            lines.append("Host: localhost")
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return await self.exchange("\r\n".join([*lines, "", ""]).encode() + body)


@dataclass
class Answer:
    """All that a connection gave."""

    raw: bytes
    status: int = field(init=False, default=0)
    headers: dict[str, str] = field(init=False, default_factory=dict)
    body: bytes = field(init=False, default=b"")

    def __post_init__(self) -> None:
        head, _, self.body = self.raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if first.startswith("HTTP/1.1 "):
            self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def statuses(self) -> list[int]:
        """Of all answers of the connection."""
        return [int(found[1]) for found in _STATUS.finditer(self.raw)]

    @property
    def last(self) -> Answer:
        """The last answer of the connection."""
        return Answer(self.raw[[found.start() for found in _STATUS.finditer(self.raw)][-1] :])


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the connection ends, however it does."""
    found = bytearray()
    while True:
        try:
            part = await reader.read(2**16)
        except ConnectionError:
            return bytes(found)
        if not part:
            return bytes(found)
        found += part


@asynccontextmanager
async def serving(
    app: ASGIApp,
    limits: Limits | None = None,
    most_connections: int = 100,
    refused: Callable[[int], None] = BoundedProtocol.refused,
) -> AsyncIterator[Wire]:
    """`app` behind our protocol."""
    listener = free_listener()
    server = http_server(app, limits or Limits(), most_connections, refused)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Wire(listener.getsockname()[1], server)
    finally:
        server.should_exit = server.force_exit = True
        await task


def memory() -> int:
    """Bytes that this process has in memory now."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
