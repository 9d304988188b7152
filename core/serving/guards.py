"""What stands before every route: API keys by default deny, the headers `Host` and `X-Request-Id`, bodies' shape.

No route is reached that this does not let through, known or not: it looks at the path as it came, before anything
decodes or routes it. There is no CORS: pages of other origins are not served.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from hookline.serving.accounting import LABEL_HEADER, error_response, find_label, is_label
from hookline.serving.api_errors import ApiError
from hookline.serving.server_config import ServerConfig

OPEN_PATHS = frozenset({b"/", b"/health", b"/livez", b"/ping", b"/readyz", b"/startup"})
METRICS_PATH = b"/metrics"

# Sent with every answer, the refusals of the wire included.
SECURITY_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Lists and objects of one body. No call needs so many, and each costs far more memory than its two bytes of text.
_MOST_CONTAINERS = 100_000
# A string with what may make it a key, or a bracket. The string's end may be missing: so no start is tried twice.
_TOKEN = re.compile(rb'("(?:[^"\\]++|\\.)*+"?)(?:[ \t\r\n]*+(:))?|([\[{])|([\]}])', re.DOTALL)


class Guards:
    """Lets through what may go on, and puts the key's `cache_salt` into the scope's state.

    Args:
        app: what is behind.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        keys = tuple(_digest(key.encode()) for key in config.api_keys)
        self._keys = tuple((digest, _salt(digest)) for digest in keys)
        self._open = OPEN_PATHS | ({METRICS_PATH} if config.open_metrics else frozenset())
        self._hosts = _allowed_hosts(config)
        self._most_chars = config.limits.label_chars

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            scope.setdefault("state", {})["cache_salt"] = self._admit(scope)
            self._check_host(scope)
            _check_kind(scope)
            self._check_label(scope)
        except ApiError as error:
            response = error_response(error)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> str:
        """The salt of the key that the request brings; "" where none is needed.

        Raises:
            ApiError: 401, always in the same words.
        """
        if not self._keys:
            return ""
        found = ""
        digest = _digest(_presented(scope))
        for key, salt in self._keys:  # all of them, so that the time says nothing
            if hmac.compare_digest(key, digest):
                found = salt
        if not found and scope.get("raw_path") not in self._open:
            raise ApiError(
                401, "No valid API key. Send the header `Authorization: Bearer KEY`.", code="invalid_api_key"
            )
        return found

    def _check_host(self, scope: Scope) -> None:
        """Against DNS rebinding: a page of another origin reaches a loopback address under a name of its own."""
        if self._hosts is None:
            return
        names = _values(scope, b"host")
        if len(names) != 1:
            raise ApiError(400, f"A request has one header Host; this one has {len(names)}.", code="invalid_host")
        if _without_port(names[0].decode("latin-1").lower()) not in self._hosts:
            raise ApiError(
                400, "The header Host names another server. Allow it with --allowed-host.", code="invalid_host"
            )

    def _check_label(self, scope: Scope) -> None:
        """The client's own id goes into answers and logs."""
        label = find_label(scope["headers"])
        if label and not is_label(label, self._most_chars):
            raise ApiError(
                400, f"X-Request-Id must be 1 to {self._most_chars} printable ASCII characters.",
                param=LABEL_HEADER, code="invalid_value",
            )  # fmt: skip


def _check_kind(scope: Scope) -> None:
    """A body must say that it is JSON: what browsers send to other origins without asking is none."""
    if scope["method"] != "POST":
        return
    kinds, encodings = _values(scope, b"content-type"), _values(scope, b"content-encoding")
    if len(kinds) != 1 or kinds[0].split(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "The body must be JSON. Send the header `Content-Type: application/json`.")
    if any(value.strip().lower() not in (b"", b"identity") for value in encodings):
        raise ApiError(415, "The body is compressed. Send it as it is, without Content-Encoding.")


def parse_object(body: bytes, depth: int) -> dict[str, Any]:
    """The JSON object that `body` is.

    Args:
        depth: how deep lists and objects may be nested, the outermost included.

    Raises:
        ApiError: 400, if it is anything else, or names a key twice.
    """
    _scan(body, depth)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"The body is not JSON: {error.msg} at {where}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _scan(body: bytes, depth: int) -> None:
    """Refuses, in linear time and before anything is built, what would be costly or could be read in two ways."""
    keys: list[set[bytes]] = []
    count = 0
    for match in _TOKEN.finditer(body):
        text, colon, opening, closing = match.groups()
        if opening:
            count += 1
            if len(keys) >= depth:
                raise ApiError(400, f"The body is nested deeper than {depth} levels.", code="invalid_json")
            if count > _MOST_CONTAINERS:
                raise ApiError(400, f"The body has over {_MOST_CONTAINERS} lists and objects.", code="invalid_json")
            keys.append(set())
        elif closing:
            if keys:
                keys.pop()
        elif colon and keys:
            key = _plain(text)
            if key in keys[-1]:
                raise ApiError(400, "The body names a key twice in one object.", code="invalid_json")
            keys[-1].add(key)


def _plain(key: bytes) -> bytes:
    """A key without escapes: the same key can be written in several ways."""
    if b"\\" not in key:
        return key
    try:
        return orjson.dumps(orjson.loads(key))
    except orjson.JSONDecodeError:
        return key  # the parser refuses it


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _salt(digest: bytes) -> str:
    """What keeps the cached prefixes of a key apart; the key cannot be found from it."""
    return hashlib.sha256(b"cache salt" + digest).hexdigest()[:32]


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _presented(scope: Scope) -> bytes:
    """The key that a request brings; b"", which is nobody's, if it brings none or several."""
    given = _values(scope, b"authorization")
    if len(given) != 1:
        return b""
    kind, _, key = given[0].partition(b" ")
    return key.strip(b" ") if kind.lower() == b"bearer" else b""


def _allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names under which this server may be called; None for any."""
    loopback = is_loopback(config.host)
    if not loopback and not config.allowed_hosts:
        return None
    names = {_bracketed(config.host), *(_bracketed(name) for name in config.allowed_hosts)}
    return frozenset(names | (_LOOPBACK_NAMES if loopback else set()))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    """As the header has it, without a port."""
    host = host.lower()
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else _without_port(host)


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]{0,5}\Z", "", host)
