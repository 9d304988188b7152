"""What F4 sends: bytes that break servers, each with the status of the answer that it must get."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.serving.wire import HEAD, chunk

CL, TE = b"Content-Length: ", b"Transfer-Encoding: "
POST = b"POST /json HTTP/1.1\r\n" + HEAD
CHUNKED = POST + TE + b"chunked\r\n\r\n"
FULL = POST + CL + b"7\r\n\r\n" + b'{"a":1}'
GET = b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n"
BYE = b"GET / HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"
# What stands in their place where a model is served.
_SERVER_POST = b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Type: application/json\r\n"
SERVER_CHUNKED = _SERVER_POST + TE + b"chunked\r\n\r\n"
_BODY, _SERVER_BODY = b'{"a":1}', b'{"prompt":"a","max_tokens":1}'
# Of a case, what is changed: the rest of a megabyte would be sent for nothing.
MOST_BYTES = 2**16
# Put between the bytes of a sound or unsound request.
_PIECES = (
    b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b": ", b"\xff", b"\xc3", b"%00", b"/../", b"//", b"?",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999999\r\n", b"0\r\n\r\n",
    b"Host: a\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"HTTP/1.0",
    b"Content-Encoding: gzip\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"a" * 40_000, b"{", b'"', b"[[[[",
)  # fmt: skip


class Case(NamedTuple):
    """What is sent, and the status of the last answer; 0 where the connection is closed without one."""

    name: str
    parts: tuple[bytes | float, ...]
    status: int

    @property
    def whole(self) -> bytes:
        """All that is sent."""
        return b"".join(part for part in self.parts if isinstance(part, bytes))


def _head(*lines: bytes, path: bytes = b"/") -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""])


_BAD_LINES = {
    "no version": b"GET /\r\n\r\n",
    "0.9": b"GET / HTTP/0.9\r\n" + HEAD + b"\r\n",
    "2.0": b"GET / HTTP/2.0\r\n" + HEAD + b"\r\n",
    "9.9": b"GET / HTTP/9.9\r\n" + HEAD + b"\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "NUL in the path": b"GET /a\0b HTTP/1.1\r\n" + HEAD + b"\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HEAD + b"\r\n",
    "NUL in a header": _head(b"A: b\0c"),
    "NUL first": b"\0\0\0\0\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 40,
    "folded header": _head(b"A: b\r\n c"),
    "bare line feeds": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "space before the colon": _head(b"A : b"),
    "empty header name": _head(b": b"),
    "header without colon": _head(b"nothing"),
    "control in a header": _head(b"A: \x01"),
    "no target": b"GET HTTP/1.1\r\n" + HEAD + b"\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n",
    "absolute target": b"GET http://localhost/ HTTP/1.1\r\n" + HEAD + b"\r\n",
    "tunnel": b"CONNECT localhost:80 HTTP/1.1\r\n" + HEAD + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": _head(b"Host: localhost"),
}
_BAD_BODIES = {
    "broken chunk, to be continued": POST + TE + b"chunked\r\nExpect: 100-continue\r\n\r\nxyz\r\nabc\r\n",
    "length and chunks": POST + CL + b"3\r\n" + TE + b"chunked\r\n\r\n" + chunk(b"abc"),
    "chunks and length": POST + TE + b"chunked\r\n" + CL + b"3\r\n\r\n" + chunk(b"abc"),
    "two lengths": POST + CL + b"3\r\n" + CL + b"4\r\n\r\nabc",
    "two equal lengths": POST + CL + b"3\r\n" + CL + b"3\r\n\r\nabc",
    "negative length": POST + CL + b"-1\r\n\r\n",
    "signed length": POST + CL + b"+7\r\n\r\n",
    "hexadecimal length": POST + CL + b"0x7\r\n\r\n",
    "list of lengths": POST + CL + b"7, 7\r\n\r\n",
    "length beyond all": POST + CL + b"9" * 30 + b"\r\n\r\n",
    "text as length": POST + CL + b"seven\r\n\r\n",
    "gzip": POST + TE + b"gzip\r\n\r\n",
    "gzip and chunked": POST + TE + b"gzip, chunked\r\n\r\n" + chunk(b"abc"),
    "chunked twice": POST + TE + b"chunked, chunked\r\n\r\n" + chunk(b"abc"),
    "chunked in two headers": POST + TE + b"chunked\r\n" + TE + b"chunked\r\n\r\n" + chunk(b"abc"),
    "unknown coding": POST + TE + b"xchunked\r\n\r\n" + chunk(b"abc"),
    "chunks of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + chunk(b"abc"),
    "chunk size of letters": CHUNKED + b"xyz\r\nabc\r\n",
    "negative chunk size": CHUNKED + b"-3\r\nabc\r\n",
    "chunk size beyond all": CHUNKED + b"f" * 20 + b"\r\nabc\r\n",
    "empty chunk size": CHUNKED + b"\r\nabc\r\n",
    "chunk too long": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "chunk without line end": CHUNKED + b"3\r\nabcdef",
    "upgrade with a body": POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CL + b"7\r\n\r\n" + b'{"a":1}',
}
_LARGE_HEADS = {
    "100,000 headers": b"GET / HTTP/1.1\r\n" + HEAD + b"".join(b"X%d: y\r\n" % number for number in range(100_000)),
    "101 headers": _head(*(b"X%d: y" % number for number in range(100))),
    "header of 1 MB": _head(b"X-Request-Id: " + b"a" * 2**20),
    "header name of 1 MB": _head(b"a" * 2**20 + b": b"),
    "path of 1 MB": _head(path=b"/" + b"a" * 2**20),
    "header of 1 MB without end": b"GET / HTTP/1.1\r\nA: " + b"a" * 2**20,
    "one byte over": _head(b"A: " + b"b" * (32 * 2**10 - 4 - 1 - len("Host") - len("localhost") - 4)),
    "chunk extension of 1 MB": CHUNKED + b"3;" + b"a" * 2**20,
    "trailer of 1 MB": CHUNKED + b"0\r\nA: " + b"a" * 2**20,
    "trailers of 1 MB": CHUNKED + b"0\r\n" + b"Abc: d\r\n" * 2**17,
}
_SLOW = {
    "head without end": ((b"GET / HTTP/1.1\r\nA: b", 1.0), 408),
    "half a request line": ((b"GE", 1.0), 408),
    "a byte at a time": (tuple(part for byte in b"GET / HTTP/1.1" for part in (bytes([byte]), 0.1)), 408),
    "empty lines": ((b"\r\n", 0.2, b"\r\n", 0.2, b"\r\n", 0.2), 0),
    "nothing": ((1.0,), 0),
    "body without end": ((POST + CL + b"7\r\n\r\n{", 1.0), 408),
    "body a byte at a time": ((POST + CL + b"70\r\n\r\n", *(part for _ in range(8) for part in (b" ", 0.1))), 408),
    "chunks without end": ((CHUNKED, *(part for _ in range(8) for part in (chunk(b" "), 0.1))), 408),
}
_REFUSED_BODIES = {
    "length over the limit": (POST + CL + b"%d\r\n\r\n" % (2**20 + 1) + b" " * (2**20 + 1), 413),
    "chunks over the limit": (CHUNKED + chunk(b" " * 2**16) * 17, 413),
    "body of 5 MB": (POST + CL + b"%d\r\n\r\n" % (5 * 2**20) + b" " * 5 * 2**20, 413),
    "100,000 deep": (POST + b"Connection: close\r\n" + CL + b"100000\r\n\r\n" + b"[" * 100_000, 400),
    "not answered for": (b"POST /refuse HTTP/1.1\r\n" + HEAD + CL + b"5000000\r\n\r\n" + b" " * 5_000_000, 401),
}
CASES = [
    *(Case(name, (sent,), 400) for name, sent in (_BAD_LINES | _BAD_BODIES).items()),
    *(Case(name, (sent,), 431) for name, sent in _LARGE_HEADS.items()),
    *(Case(name, parts, status) for name, (parts, status) in _SLOW.items()),
    *(Case(name, (sent,), status) for name, (sent, status) in _REFUSED_BODIES.items()),
    Case("unknown method", (b"BREW / HTTP/1.1\r\n" + HEAD + b"\r\n",), 405),
    Case("method in small letters", (b"get / HTTP/1.1\r\n" + HEAD + b"\r\n",), 405),
    Case("method of 100,000 letters", (b"A" * 100_000,), 405),
    Case("pipelined", (GET + FULL + BYE,), 200),
    Case("text", (b"hello, is anybody there?\r\n\r\n",), 405),
    Case("nonsense behind a request", (GET + b"BREW /",), 200),
    Case("served after empty lines", (b"\r\n\r\n" + BYE,), 200),
    Case("upgrade without a body", (_head(b"Connection: Upgrade", b"Upgrade: h2c"),), 200),
    Case("HTTP/1.0", (b"GET / HTTP/1.0\r\n\r\n",), 200),
    Case("trailers", (CHUNKED + chunk(b'{"a":1}') + b"0\r\nAuthorization: x\r\n\r\n" + BYE,), 200),
]
# Where a server differs from the small application: it wants a Host at any version, and JSON before it looks further.
_SERVER_STATUSES = {"HTTP/1.0": 400, "not answered for": 415}


def server_cases() -> list[Case]:
    """The cases, for a server of a model: what has a sound body asks for a completion."""
    return [
        Case(
            case.name,
            tuple(_for_server(part) if isinstance(part, bytes) else part for part in case.parts),
            _SERVER_STATUSES.get(case.name, case.status),
        )
        for case in CASES
    ]


def _for_server(sent: bytes) -> bytes:
    found = sent.replace(POST, _SERVER_POST)
    for form in (b"%d\r\n\r\n%b", b"%x\r\n%b"):  # with a length, and as a chunk
        found = found.replace(form % (len(_BODY), _BODY), form % (len(_SERVER_BODY), _SERVER_BODY))
    return found


def mutations(rng: random.Random, cases: Sequence[Case], count: int) -> Iterator[bytes]:
    """The cases' bytes, half of them of sound ones, each changed in up to four places."""
    sound = [case.whole for case in cases if case.status == 200]
    known = [case.whole[:MOST_BYTES] for case in cases if case.whole]
    for _ in range(count):
        sent = bytearray(rng.choice(rng.choice((sound, known))))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(min(len(sent), 200) + 1)  # a head is short; what lies behind it is all alike
            end = place + rng.randint(1, 12)
            match rng.randrange(6):
                case 0:
                    sent[place:place] = rng.choice(_PIECES)
                case 1:
                    sent[place:end] = b""
                case 2:
                    sent[place:place] = sent[place:end]
                case 3:
                    sent[place:end] = rng.choice(_PIECES)
                case 4:
                    sent[place:end] = rng.randbytes(end - place)
                case 5:
                    sent[place:] = rng.choice(known)[place:]
        yield bytes(sent)
