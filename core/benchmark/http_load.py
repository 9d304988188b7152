"""Load over HTTP: many streams of `/v1/completions` on one thread, which costs a few microseconds a chunk.

The client shares its machine with the server it measures more often than not, so it does no more than it must: plain
non-blocking sockets, one select for all of them, and JSON only where usage or an error may stand. Prompts are token
ids and outputs do not end early, so that lengths are exact; tokens are counted by the server's usage, not by chunks, of
which each may carry several.
"""

from __future__ import annotations

import json
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from hookline.benchmark.measure import Choice
from hookline.benchmark.open_loop import Trace, is_due, make_traces
from hookline.benchmark.workload import Lengths, make_prompts
from hookline.errors import ServerError

# Seconds without a byte from anyone after which the server counts as stuck.
_SILENT_SECONDS = 300.0
# A select may sleep so many seconds too long: the last of them are waited for awake.
_SLEEP_MARGIN = 0.0015
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask: an address, the path before `/v1`, the model by the name that it is served by, and a key.

    With `is_tls` the server must have a certificate for `host` from whom this machine trusts, or from those in the file
    that the environment's `SSL_CERT_FILE` names.
    """

    host: str
    port: int
    path: str
    model: str
    key: str | None = None
    is_tls: bool = False


@dataclass(slots=True)
class Outcome:
    """What a load gave.

    Attributes:
        traces: of requests that were answered in full, without the warm-up, in the order in which they came.
        failures: how often each error occurred, the warm-up's included.
        chunks: how many events with tokens came.
        client_seconds: processor time that this client used.
    """

    traces: list[Trace] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    client_seconds: float = 0.0

    @property
    def client_us_per_chunk(self) -> float:
        """Microseconds of the client's processor time for each chunk, with all that belongs to its request."""
        return 1e6 * self.client_seconds / max(1, self.chunks)


def send_load(
    target: Target,
    work: Sequence[Lengths],
    choice: Choice,
    *,
    vocab_size: int,
    rate: float | None = None,
    concurrency: int | None = None,
    warmup: int = 0,
    seed: int = 0,
) -> Outcome:
    """Sends `work`, at Poisson arrivals or `concurrency` at a time, and follows every chunk.

    Args:
        vocab_size: prompts are of random token ids below it.
        rate: requests a second on average; None for a closed loop.
        warmup: how many of the first requests are sent and not counted.

    Raises:
        ServerError: no request that counts was answered in full, or the server fell silent.
        UsageError: if the rate is no positive number, or both or none of rate and concurrency are given.
    """
    traces = make_traces(work, rate, concurrency, seed)
    prompts = make_prompts(work, vocab_size, seed)
    calls = [
        _call_bytes(target, prompt, length.output, choice, number)
        for number, (prompt, length) in enumerate(zip(prompts, work, strict=True))
    ]
    outcome, before = Outcome(), time.process_time()
    with closing(_Client(target)) as client:
        streams = client.follow(calls, traces, concurrency)
    outcome.client_seconds = time.process_time() - before
    for number, stream in enumerate(streams):
        outcome.chunks += len(stream.trace.reports)
        if stream.error:
            outcome.failures[stream.error] += 1
        elif number >= warmup:
            outcome.traces.append(stream.trace)
    if not outcome.traces:
        errors = "; ".join(outcome.failures) or "none was sent"
        raise ServerError(f"no request was answered in full: {errors}", hint="Try one with engine chat --url first.")
    return outcome


def _call_bytes(target: Target, prompt: list[int], tokens: int, choice: Choice, number: int) -> bytes:
    """The whole call of one request."""
    body: dict[str, Any] = {"model": target.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    body |= {"temperature": choice.temperature, "top_p": choice.top_p, "seed": number}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if choice.top_k > 0:
        body["top_k"] = choice.top_k
    data = json.dumps(body, separators=(",", ":")).encode()
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [f"POST {target.path}/v1/completions HTTP/1.1", f"Host: {host}:{target.port}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}", "Accept: text/event-stream"]
    if target.key is not None:
        lines.append(f"Authorization: Bearer {target.key}")
    return "\r\n".join([*lines, "", ""]).encode() + data


class _Client:
    """Connections to one server; one that is free is used again."""

    def __init__(self, target: Target) -> None:
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerError(f"the server {target.host} cannot be found: {error.strerror}") from None
        self._family: socket.AddressFamily = found[0][0]
        self._address: tuple[Any, ...] = found[0][4]
        self._host = target.host
        self._tls = ssl.create_default_context() if target.is_tls else None
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def follow(self, calls: Sequence[bytes], traces: Sequence[Trace], concurrency: int | None) -> list[_Stream]:
        """Sends each call when it is due, until all have ended."""
        start, streams, running = time.perf_counter(), list[_Stream](), 0
        while len(streams) < len(traces) or running:
            now = time.perf_counter() - start
            while len(streams) < len(traces) and is_due(traces[len(streams)], concurrency, running, now):
                stream = _Stream(calls[len(streams)], traces[len(streams)])
                streams.append(stream)
                running += 1
                self._send(stream)
            wait = _SILENT_SECONDS
            if concurrency is None and len(streams) < len(traces):
                wait = max(0.0, traces[len(streams)].due - now - _SLEEP_MARGIN)
            ready = self._selector.select(wait)
            if not ready and wait == _SILENT_SECONDS:
                raise ServerError(f"the server sent nothing for {wait:.0f} s; {running} requests have not ended")
            for key, _ in ready:
                if isinstance(key.fileobj, socket.socket):
                    running -= self._serve(key.fileobj, key.data, start)
        return streams

    def _send(self, stream: _Stream) -> None:
        """Begins a request, on a connection that is free if there is one."""
        stream.is_reused = bool(self._idle)
        if self._idle:
            self._selector.modify(self._idle.pop(), selectors.EVENT_WRITE, stream)
        else:
            self._connect(stream)

    def _connect(self, stream: _Stream) -> None:
        """Begins a request on a new connection."""
        connection = socket.socket(self._family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:  # the first bytes that are sent bring the handshake about
            connection = self._tls.wrap_socket(connection, server_hostname=self._host, do_handshake_on_connect=False)
        connection.connect_ex(self._address)  # what goes wrong shows when it is written to
        self._selector.register(connection, selectors.EVENT_WRITE, stream)

    def _serve(self, connection: socket.socket, stream: _Stream | None, start: float) -> bool:
        """Does what a connection is ready for; whether its request has ended."""
        if stream is None:  # nobody's: the server has closed it
            self._idle.remove(connection)
            self._drop(connection)
            return False
        try:
            if stream.unsent:
                stream.unsent = stream.unsent[connection.send(stream.unsent) :]
                wanted = selectors.EVENT_WRITE if stream.unsent else selectors.EVENT_READ
                self._selector.modify(connection, wanted, stream)
                return False
            data = connection.recv(_READ_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:  # TLS has something of its own to exchange
            reads = isinstance(want, ssl.SSLWantReadError)
            self._selector.modify(connection, selectors.EVENT_READ if reads else selectors.EVENT_WRITE, stream)
            return False
        except OSError as error:
            data, stream.broken = b"", f"the connection failed: {error.strerror}"
        if not data:
            self._drop(connection)
            if stream.is_reused and stream.is_silent:  # it was closed before it got the call
                stream.restart()
                self._connect(stream)
                return False
            stream.end_of_data()
            return True
        stream.take(data, time.perf_counter() - start)
        if not stream.ended:
            return False
        if stream.keeps_open:
            self._selector.modify(connection, selectors.EVENT_READ, None)
            self._idle.append(connection)
        else:
            self._drop(connection)
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


class _Stream:
    """One request: its call on the way out, and its answer on the way in.

    Attributes:
        trace: gets the time of every chunk with tokens, and their number by the usage.
        unsent: what is left of the call.
        error: what went wrong; "" where nothing did.
        ended: whether the answer is whole, or has failed.
        keeps_open: whether the connection can be used again.
        is_reused: whether it was used before.
    """

    __slots__ = (
        *("broken", "call", "ended", "error", "is_chunked", "is_reused", "keeps_open", "trace", "unsent"),
        *("_body_left", "_events", "_held", "_status"),
    )

    def __init__(self, call: bytes, trace: Trace) -> None:
        self.call = call
        self.trace = trace
        self.is_reused = False
        self.restart()

    def restart(self) -> None:
        """Begins anew, with nothing sent and nothing received."""
        self.unsent = self.call
        self.error = self.broken = ""
        self.ended = self.keeps_open = self.is_chunked = False
        self._status = 0
        self._body_left: int | None = None
        self._held = b""  # what came and is not whole
        self._events = b""

    @property
    def is_silent(self) -> bool:
        """Whether not a byte of the answer has come."""
        return not self._status and not self._held

    def take(self, data: bytes, now: float) -> None:
        """More of the answer, which came `now`."""
        self._held = self._held + data if self._held else data
        if not self._status and not self._take_head():
            return
        if self._status != 200:
            if self._is_whole():
                self._fail(self._refusal())
        elif self.is_chunked:
            self._take_chunks(now)
        else:
            self._take_events(self._held, now)
            if self._body_left is not None:
                self._body_left -= len(self._held)
                self.ended = self._body_left <= 0
            self._held = b""
        if self.ended and not self.error:
            self._check()

    def end_of_data(self) -> None:
        """The connection has been closed."""
        if self._status == 200 and not self.is_chunked and self._body_left is None and not self.broken:
            self._check()
        elif self._status not in (0, 200):
            self._fail(self._refusal())
        else:
            self._fail(self.broken or "the answer broke off")
        self.ended = True

    def _take_head(self) -> bool:
        """Reads the status and the headers; false while they are not whole."""
        head, found, rest = self._held.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            self._fail("the answer is not of HTTP/1.1")
            return False
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(":") for x in lines)}
        self._status, self._held = int(words[1]), rest
        self.is_chunked = headers.get("transfer-encoding") == "chunked"
        length = headers.get("content-length", "")
        self._body_left = int(length) if length.isdecimal() else None
        self.keeps_open = words[0] == "HTTP/1.1" and headers.get("connection") != "close"
        return True

    def _take_chunks(self, now: float) -> None:
        """All chunks that are whole; see RFC 9112, section 7.1. Extensions and trailers are not expected."""
        held, at = self._held, 0
        while (line_end := held.find(b"\r\n", at)) >= 0:
            try:
                size = int(held[at:line_end], 16)
            except ValueError:
                self._fail("the answer's chunks are not sound")
                return
            end = line_end + 2 + size
            if len(held) < end + 2:
                break
            if not size:
                self.ended = True
                break
            self._take_events(held[line_end + 2 : end], now)
            at = end + 2
        self._held = held[at:]

    def _take_events(self, data: bytes, now: float) -> None:
        """All lines of server-sent events that are whole."""
        *lines, self._events = (self._events + data if self._events else data).split(b"\n")
        for line in lines:
            if line[:5] != b"data:":
                continue
            # Within a text these words would have backslashes before their quotes.
            usage = line.rfind(b'"usage":')
            if (usage >= 0 and line[usage + 8 : usage + 10].lstrip()[:1] == b"{") or b'"error"' in line[:16]:
                self._take_object(line, now)
            elif line[5:13].strip() != b"[DONE]" and not _is_empty_end(line):
                self.trace.reports.append(now)

    def _take_object(self, line: bytes, now: float) -> None:
        """An event with the usage, or with an error."""
        try:
            event: Mapping[str, Any] = json.loads(line[5:])
            if "error" in event:
                self._fail(f"in the stream: {event['error']['message']}")
                return
            self.trace.tokens = int(event["usage"]["completion_tokens"])
            if event.get("choices"):
                self.trace.reports.append(now)
        except (ValueError, KeyError, TypeError, AttributeError):
            self._fail(f"an event cannot be read: {line!r:.80}")

    def _is_whole(self) -> bool:
        """Whether the body of an answer that is no stream has come."""
        if self.is_chunked:
            return self._held.endswith(b"0\r\n\r\n")
        return self._body_left is not None and len(self._held) >= self._body_left

    def _refusal(self) -> str:
        """What an answer with another status says."""
        body = self._held[self._held.find(b"{") : self._held.rfind(b"}") + 1]
        try:
            return f"status {self._status}: {json.loads(body)['error']['message']}"
        except (ValueError, KeyError, TypeError):
            return f"status {self._status}"

    def _check(self) -> None:
        """The answer is whole: it must have its tokens."""
        found, wanted = self.trace.tokens, self.trace.length.output
        if found != wanted or not self.trace.reports:
            self._fail(f"a request ended with {found} of {wanted} tokens")

    def _fail(self, error: str) -> None:
        self.error = self.error or error
        self.ended, self.keeps_open = True, False


def _is_empty_end(line: bytes) -> bool:
    """Whether an event tells only that the answer has ended."""
    return b'"text":""' in line and b'"finish_reason":null' not in line
