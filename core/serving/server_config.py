"""How to serve a model over HTTP: frozen options, validated when made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hookline.config import EngineConfig
from hookline.errors import UsageError
from hookline.serving.limits import Limits

# Under which names reasoning is sent, by what the operator says.
REASONING_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "both": ("reasoning", "reasoning_content"),
        "reasoning": ("reasoning",),
        "reasoning_content": ("reasoning_content",),
    }
)
# Of a name or an address as the header `Host` has it, with or without a port.
_HOST = re.compile(r"[a-zA-Z0-9._-]+(:[0-9]{1,5})?|\[?[0-9a-fA-F:.]+\]?(:[0-9]{1,5})?")
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `engine serve`.

    Attributes:
        engine: how to load and run the model.
        host, port: where to listen; port 0 takes a free one.
        api_keys: any of them opens every route; without one all routes are open.
        served_model_names: by which clients may name the model; the first is shown. Empty for the model's own name.
        allowed_hosts: values of the header `Host` that are served beside the address; empty allows, on a loopback
            address, loopback names alone, and any elsewhere.
        metrics_prefix: of the names on `/metrics`, followed by a colon.
        open_metrics: serve `/metrics` without a key.
        tool_parser, reasoning_parser: names of the parsers; None takes those of the model's record, "" none.
        reasoning_fields: one of `REASONING_FIELDS`: under which names reasoning is sent. All of them are read in a
            conversation's history.
        strict_api: refuse fields that are not known in place of leaving them aside.
        limits: what a client may ask for.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    metrics_prefix: str = "hookline"
    open_metrics: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_fields: str = "both"
    strict_api: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port < 2**16:
            raise UsageError(f"port is {self.port!r:.80}", hint="Give a port from 0 to 65535; 0 takes a free one.")
        if not _PREFIX.fullmatch(self.metrics_prefix):
            raise UsageError(
                f"metrics_prefix is {self.metrics_prefix!r:.80}", hint="Give letters, digits and underscores."
            )
        if self.reasoning_fields not in REASONING_FIELDS:
            raise UsageError(
                f"reasoning_fields is {self.reasoning_fields!r:.80}", hint=f"Give {', '.join(REASONING_FIELDS)}."
            )
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    "an API key is too short or has characters that a header cannot carry",
                    hint="Give at least 8 printable ASCII characters without spaces.",
                )
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise UsageError(
                    f"an allowed host is {name!r:.80}", hint="Give a name or an address, such as chat.example.com."
                )
        for name in self.served_model_names:
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise UsageError(f"a served model name is {name!r:.80}", hint="Give 1 to 256 printable characters.")
