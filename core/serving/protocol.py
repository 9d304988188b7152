"""One connection's HTTP/1.1, over uvicorn's protocol: bounds on what a stranger may send and for how long.

uvicorn parses with httptools and runs the application. Added here: bounds on a head's bytes and headers, deadlines of
head and body, refusal of what could be read in two ways, a bound on pipelined requests and on connections, errors as
OpenAI's objects, and an end of a connection that lets the client read why.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hookline.serving.accounting import LABEL_HEADER, REFUSED, find_label, is_label
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import RETRY_SECONDS, Limits
from hookline.serving.replies.event_stream import DROP_CONNECTION

# Requests of one connection that may wait for the answers before them.
_MOST_PIPELINED = 8
# Seconds for which what a refused client still sends is thrown away: closed at once, it might never see the answer.
_LINGER_SECONDS = 2.0
# httptools hands out a header when it is whole: so it is fed in pieces, and looked at between them.
_PIECE = 16 * 2**10
_VERSIONS = frozenset({"1.0", "1.1"})
_ALLOW = "GET, HEAD, POST"


class _Refused(Exception):
    """Raised inside the parser's callbacks: this message is not served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.error = ApiError(status, message)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounded_protocol` gives the class its limits.

    Attributes:
        limits: `header_bytes`, `header_count`, `header_seconds`, `body_seconds`, `reader_seconds` and `label_chars`
            count.
        most_connections: at a time; one more is answered with 503.
    """

    limits = Limits()
    most_connections = 1024

    @staticmethod
    def refused(status: int) -> None:
        """Is told of each answer that is given here and that no application knows of."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._body_expected = False
        self._closes_behind_body = False
        self._head_bytes = 0  # of the head that is being read, as far as it is parsed
        self._fed_bytes = 0  # since the head began, or since a piece of the body came
        self._running: Any = None  # the cycle whose answer is being made, while `cycle` is the last that came
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._closer: asyncio.TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            # Closed at once: what lingers would be one connection more.
            self._is_over = True
            what = "The server has too many connections."
            self._answer(ApiError(503, what, code="overloaded", retry_after=RETRY_SECONDS))
            transport.close()
        else:
            self._set_timer(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        if self._running is not None and self._running is not self.cycle:
            _disconnect(self._running)
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PIECE):
            if self._is_over:
                return
            piece = data[start : start + _PIECE]
            if self._timer is None and not self._body_expected:
                self._set_timer(self.limits.header_seconds)  # since its first byte, be it an empty line
            self._fed_bytes += len(piece)
            self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._last_of_all()  # the parser is done; what was asked is answered as if nothing else had been
        except httptools.HttpParserInvalidMethodError:
            # A method that nobody knows is refused before anything could count it by its name.
            known = re.match(rb"[!-~]", piece) is not None
            self._refuse(ApiError(405, "Unknown method.") if known else ApiError(400, "This is no HTTP request."))
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.error if isinstance(cause, _Refused) else ApiError(400, "Invalid HTTP request."))
        else:
            # Headers are counted when they are whole; this is a line that does not end, of a head or of a chunk.
            if self._fed_bytes > self.limits.header_bytes + _PIECE and (self._in_head or self._body_expected):
                self._refuse(self._head_too_large())

    # -- the parser's callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Refused(400, "Too many requests were sent before their answers.")
        super().on_message_begin()
        extensions = {DROP_CONNECTION: self._drop}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        self._in_head = True
        self._head_bytes = self._fed_bytes = 0
        if self._timer is None:
            self._set_timer(self.limits.header_seconds)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self._in_head:
            return  # behind a chunked body: nothing reads these
        if len(self.headers) >= self.limits.header_count:
            raise _Refused(431, f"The request has more than {self.limits.header_count} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        expects = self._expects_body()
        if expects and self.parser.should_upgrade():
            # The parser would lose the body.
            raise _Refused(400, "A request with a body cannot ask for an upgrade. Turn HTTP/2 (h2c) off in the client.")
        self._in_head = False
        self._stop_timers()
        super().on_headers_complete()
        if expects:
            self._body_expected = True
            self._set_timer(self.limits.body_seconds)
            # A connection that is to close waits for the rest of the body, or `on_response_complete` throws it away.
            self._closes_behind_body = not self.cycle.keep_alive
            self.cycle.keep_alive = True

    def on_body(self, body: bytes) -> None:
        self._fed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_expected = False
        self._stop_timers()
        if self._closes_behind_body and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        self._closes_behind_body = False
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.header_bytes:
            raise _Refused(431, self._head_too_large().message)

    def _head_too_large(self) -> ApiError:
        return ApiError(431, f"The request's head has more than {self.limits.header_bytes} bytes.")

    def _check_head(self) -> None:
        """Refuses what another server on the way might read in another way."""
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise _Refused(400, "The server speaks HTTP/1.1 and HTTP/1.0.")
        if not self.url.startswith(b"/"):
            raise _Refused(400, "The request's target must be a path.")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version != "1.1"):
            raise _Refused(400, "The only Transfer-Encoding is chunked, of HTTP/1.1.")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise _Refused(400, "A request has one header Host.")

    def _expects_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t"))
            for name, value in self.headers
        )

    # -- the answers ---------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._running is self.cycle and self._body_expected and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._linger()  # it was answered before its body was there, of which nothing is wanted
            return
        super().on_response_complete()
        if self.transport.is_closing():  # it still has to be read
            self._close_in(self.limits.reader_seconds)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._drop()  # the last answer is not taken
        else:
            super().timeout_keep_alive_handler()

    def _last_of_all(self) -> None:
        """Nothing more is read; the connection ends behind the last answer that is being made."""
        self._is_over = True
        self._stop_timers()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection with an error, behind the answers that are being made."""
        self._is_over = True
        self._stop_timers()
        last, broken = self.cycle, self._body_expected
        if broken and self.pipeline:
            self.pipeline.popleft()  # that one has not begun
            last, broken = (self.pipeline[0][0] if self.pipeline else self._running), False
        if last is not None and not last.response_complete:
            if not broken:
                last.keep_alive = False
                return
            started = last.response_started
            _disconnect(last)
            if started:
                self.transport.close()
                return
            last.scope["state"][REFUSED] = error.status  # the application counts it
            self.transport.write(self._error_bytes(error))
        else:
            self._answer(error)
        self._linger()

    def _answer(self, error: ApiError) -> None:
        """Answers in an application's place."""
        self.refused(error.status)
        self.transport.write(self._error_bytes(error))

    def _error_bytes(self, error: ApiError) -> bytes:
        body = orjson.dumps(error.body())
        own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        if error.status == 405:
            own["allow"] = _ALLOW
        label = find_label(self.headers) if self._in_head or self._body_expected else b""
        if is_label(label, self.limits.label_chars):
            own[LABEL_HEADER] = label.decode()
        lines = [b"%s: %s\r\n" % pair for pair in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in (own | error.headers).items()]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])

    def _linger(self) -> None:
        """Closes for the client's reading, and throws away what it still sends until it closes, or time is up."""
        self._is_over = True
        self._stop_timers()
        if self._running is not None:
            self._running.waiting_for_100_continue = False  # which it would write behind the end
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._close_in(_LINGER_SECONDS)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_timer(self, seconds: float) -> None:
        self._stop_timers()
        self._timer = self.loop.call_later(seconds, self._be_late)

    def _be_late(self) -> None:
        self._timer = None
        if self._body_expected:
            self._refuse(ApiError(408, f"The request's body did not come within {self.limits.body_seconds:g} s."))
        elif self._in_head:
            self._refuse(ApiError(408, f"The request's head did not come within {self.limits.header_seconds:g} s."))
        else:
            self._last_of_all()

    def _drop(self) -> None:
        """Ends the connection by a RST: the kernel would hold for minutes what the client does not take."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _close_in(self, seconds: float) -> None:
        self._closer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._closer):
            if timer is not None:
                timer.cancel()
        self._timer = self._closer = None


def _disconnect(cycle: Any) -> None:
    """Tells the application that the client has gone."""
    cycle.disconnected = True
    cycle.message_event.set()


def bounded_protocol(
    limits: Limits, most_connections: int, refused: Callable[[int], None] = BoundedProtocol.refused
) -> type[BoundedProtocol]:
    """The protocol with these bounds, as uvicorn takes it: a class."""
    own = {"limits": limits, "most_connections": most_connections, "refused": staticmethod(refused)}
    return type("Protocol", (BoundedProtocol,), own)
