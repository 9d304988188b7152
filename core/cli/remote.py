"""A server of OpenAI's API, as commands with `--url` use it: found, asked, and its answers read as they come."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import click

from hookline.cli.render import tell
from hookline.config import expand_home, read_environment
from hookline.errors import HooklineError, InvalidRequestError, ModelNotFoundError, ServerError, UsageError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import CompletionOutput, RequestOutput, Timing, Usage

F = TypeVar("F", bound=Callable[..., Any])

# Seconds for a connection, and between two signs of life of an answer: servers send comments while nothing comes.
_CONNECT_SECONDS, _SILENT_SECONDS = 10.0, 300.0
# Ports of addresses that name none.
PORTS: Mapping[str, int] = MappingProxyType({"http": 80, "https": 443})


def url_options(command: F) -> F:
    """Adds `--url` and `--api-key-file`."""
    command = click.option(
        "--api-key-file",
        metavar="FILE",
        help="With --url: a file with the API key, as for engine serve.  [default: the first of HOOKLINE_API_KEYS]",
    )(command)
    return click.option(
        "--url",
        metavar="URL",
        help="Ask the server there, such as http://127.0.0.1:8000, in place of a model in this process; --model is "
        "the name that it serves.  [default: none]",
    )(command)


def check_local_options(ctx: click.Context, also: frozenset[str]) -> None:
    """Refuses options that cannot reach a server, when they were given beside `--url`.

    Args:
        also: names of the options that can, beside `url` and `api_key_file`.

    Raises:
        UsageError: naming them.
    """
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.name not in also | {"url", "api_key_file"}
        and ctx.get_parameter_source(str(param.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be given with --url", hint="The server has its own: give them to engine serve."
        )


def read_key(name: str | None) -> str | None:
    """The first key in the file called `name`, or of the environment's; None if there is none.

    Raises:
        ModelNotFoundError: if the file cannot be read.
        UsageError: if it has no key.
    """
    if name is None:
        return next(iter(read_environment().api_keys), None)
    try:
        lines = [line.strip() for line in expand_home(name).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"the file of --api-key-file, {name}, cannot be read: {error}") from None
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"the file of --api-key-file, {name}, has no key", hint="Write one on a line of its own.")
    return key


def split_url(url: str) -> SplitResult:
    """The address of a server, without `/v1` and what follows.

    Raises:
        UsageError: if it is none.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in PORTS and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise UsageError(f"--url is {url!r:.120}", hint="Give an address such as http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return parts._replace(path=path, query="", fragment="")


class RemoteServer:
    """One model of a server, for one request at a time.

    Args:
        url: where it is, such as `http://127.0.0.1:8000`.
        model: by which name it serves the model; None takes its first.
        key: the API key.

    Attributes:
        model: as the server names it.
        max_model_len: None where the server does not tell.

    Raises:
        ServerError: if it cannot be reached, or wants another key.
        ModelNotFoundError: if it has no such model.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self._parts = split_url(url)
        self._url = self._parts.geturl()
        self._key = key
        served = self._read_models()
        if not served or (model is not None and model not in served):
            names = ", ".join(served) or "none"
            raise ModelNotFoundError(f"{self._url} serves no model {model or ''}", hint=f"Its models: {names}.")
        self.model = model if model is not None else next(iter(served))
        length = served[self.model].get("max_model_len")
        self.max_model_len: int | None = length if isinstance(length, int) else None

    def stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        """Reports of the answer to `messages` as it grows; what the model thinks goes to stderr. Closing it aborts.

        Counts of tokens stand in the last report alone, if the server tells them.

        Raises:
            InvalidRequestError: the server does not take the request.
            ServerError: the server cannot be reached, or failed.
        """
        start, first, text, thought = time.monotonic(), None, "", False
        body = _chat_body(self.model, messages, params)
        with self._call("POST", "/v1/chat/completions", body) as response:
            reason, usage = None, Usage(0, 0)
            for chunk in _events(response):
                usage = _read_usage(chunk.get("usage")) or usage
                piece, thinking, reason = _read_choice(chunk, reason)
                if thinking:
                    tell(thinking, newline=False)
                    thought = True
                elif piece and thought:
                    tell("\n")
                    thought = False
                if first is None and (piece or thinking):
                    first = time.monotonic() - start
                if piece:
                    text += piece
                    yield _report(text, None, Usage(0, 0), Timing(None, first, time.monotonic() - start))
        if reason is None:
            raise ServerError(f"the answer of {self._url} broke off", hint="Look at the server's log.")
        yield _report(text, reason, usage, Timing(None, first, time.monotonic() - start))

    def figures(self, output: RequestOutput, seconds: float) -> str:
        """The figures of an answer as lines of text."""
        usage, first = output.usage, output.timing.time_to_first_token
        rows = [("server", f"{self._url}, {self.model}"), ("requests", f"1 in {seconds:.2f} s")]
        if usage.prompt_tokens:
            rows.append(
                ("prompt", f"{usage.prompt_tokens} tokens, {usage.cached_tokens} of them from the prefix cache")
            )
            rows.append(("output", f"{usage.completion_tokens} tokens"))
        if first is not None:
            rows.append(("first token", f"after {first:.3f} s"))
        if first is not None and usage.completion_tokens > 1 and output.timing.total > first:
            rows.append(("decode", f"{(usage.completion_tokens - 1) / (output.timing.total - first):.1f} tokens/s"))
        return "\n".join(f"{name:<12} {value}" for name, value in rows)

    def _read_models(self) -> dict[str, Mapping[str, Any]]:
        """What is served, by name."""
        with self._call("GET", "/v1/models") as response:
            try:
                return {str(entry["id"]): entry for entry in json.loads(response.read())["data"]}
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._no_api() from None

    @contextmanager
    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200; the connection is closed behind it, whatever was read."""
        parts = self._parts
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Accept": "application/json, text/event-stream"}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        headers |= {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            port = parts.port or PORTS[parts.scheme]
            with closing(make(str(parts.hostname), port, timeout=_CONNECT_SECONDS)) as connection:
                connection.connect()
                connection.sock.settimeout(_SILENT_SECONDS)
                connection.request(method, parts.path + path, data, headers)
                with closing(connection.getresponse()) as response:
                    if response.status != 200:
                        raise self._error(response, path)
                    yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "Is it running? Start one with: engine serve MODEL"
            raise ServerError(f"the server {self._url} cannot be reached: {reason}", hint=hint) from None

    def _error(self, response: http.client.HTTPResponse, path: str) -> HooklineError:
        """What a status other than 200 means."""
        try:
            told = json.loads(response.read(1 << 20))["error"]
            message, param = str(told["message"]), str(told.get("param") or "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message, param = f"status {response.status} {response.reason}", ""
            if path == "/v1/models" and response.status != 401:
                return self._no_api()
        if response.status == 401:
            given = "does not take this API key" if self._key else "wants an API key"
            return ServerError(f"the server {self._url} {given}", hint="Give --api-key-file FILE.")
        if response.status == 404 and path != "/v1/models":
            return ModelNotFoundError(f"the server says: {message}")
        if 400 <= response.status < 500 and response.status not in (408, 429):
            return InvalidRequestError(f"the server says: {message}", field=param)
        return ServerError(f"the server {self._url} says: {message}")

    def _no_api(self) -> ServerError:
        return ServerError(
            f"{self._url} is no server of OpenAI's API: it has no sound /v1/models", hint="Check the address and port."
        )


def _chat_body(model: str, messages: list[dict[str, str]], params: SamplingParams) -> dict[str, Any]:
    """What is asked: the options that differ from their defaults, and temperature, whose default servers differ in."""
    usual = SamplingParams()
    names = [entry.name for entry in dataclasses.fields(params)]
    options = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(usual, name)}
    if "logit_bias" in options:
        options["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    options |= {"temperature": params.temperature, "stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": messages, **options}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of server-sent events; comments and other fields are left out.

    Raises:
        ServerError: if one is an error, or no JSON object.
    """
    for line in response:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        try:
            chunk = json.loads(line[5:])
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerError(f"the server sent an event that is no JSON object: {line!r:.80}")
        if isinstance(error := chunk.get("error"), dict):
            raise ServerError(f"the server failed: {error.get('message')}")
        yield chunk


def _read_choice(chunk: Mapping[str, Any], reason: str | None) -> tuple[str, str, str | None]:
    """More of the text, of what the model thinks, and why it ended, `reason` if that is known already."""
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    thinking = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return delta.get("content") or "", thinking, choices[0].get("finish_reason") or reason


def _read_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached)


def _report(text: str, reason: str | None, usage: Usage, timing: Timing) -> RequestOutput:
    """An answer so far, as `Engine.stream` reports it; its tokens stay with the server."""
    output = CompletionOutput(0, text, (), finish_reason=reason)
    return RequestOutput("", None, (), (output,), reason is not None, usage, timing)
