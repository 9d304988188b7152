"""`engine serve`: a model over HTTP, for OpenAI's clients."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from hookline.cli.options import engine_config, engine_options
from hookline.cli.render import ProgressDisplay, Unit, tell
from hookline.cli.speculation import speculative_options
from hookline.cli.starting import find_model
from hookline.config import PluginOptions, expand_home, parse_bytes, read_environment
from hookline.errors import UsageError
from hookline.model_store import DEFAULT_MODEL
from hookline.serving.limits import Limits, check_limit
from hookline.serving.server_config import REASONING_FIELDS, ServerConfig

if TYPE_CHECKING:
    from hookline.serving.process.messages import Stage

F = TypeVar("F", bound=Callable[..., Any])

_SERVER_FIELDS = (
    *("host", "port", "allowed_hosts", "served_model_names", "metrics_prefix", "open_metrics"),
    *("tool_parser", "reasoning_parser", "reasoning_fields", "strict_api"),
)
_DEFAULTS: Mapping[str, Any] = MappingProxyType(dataclasses.asdict(Limits()))
_STAGES: Mapping[str, tuple[str, Unit]] = MappingProxyType(
    {
        "connected": ("Starting the engine process", "graphs"),
        "importing": ("Importing", "graphs"),
        "loading": ("Loading", "bytes"),
        "starting": ("Starting", "graphs"),
        "warming": ("Warming up", "graphs"),
    }
)


class _Limit(NamedTuple):
    """An option that sets one of `Limits`; its name says what it is measured in."""

    field: str
    option: str
    help: str


_LIMITS = (
    _Limit("waiting", "--max-waiting", "Answers that may wait for the engine; more are refused with 429."),
    _Limit("body_bytes", "--max-body", "The largest body of a request, such as 8MiB."),
    _Limit("n", "--max-n", "Most answers to one prompt."),
    _Limit("prompts", "--max-prompts", "Most prompts of one call to /v1/completions."),
    _Limit("messages", "--max-messages", "Most messages of one conversation."),
    _Limit("queue_seconds", "--queue-seconds", "A request that has not begun by then is refused with 503."),
    _Limit("request_seconds", "--request-seconds", "The most time for one request."),
    _Limit(
        "drain_seconds", "--drain-seconds", "What running requests get after SIGTERM or Ctrl-C; 0 ends them at once."
    ),
    _Limit("step_seconds", "--step-seconds", "An engine silent for so long counts as dead, and the server ends."),
    _Limit("reader_seconds", "--reader-seconds", "How long a client may leave a stream's bytes before it is let go."),
    _Limit("ping_seconds", "--ping-seconds", "Time between the comments that keep a silent stream alive."),
    _Limit("header_seconds", "--header-seconds", "Time for a request's head to come."),
    _Limit("body_seconds", "--body-seconds", "Time for a request's body to come."),
    _Limit("grammar_seconds", "--grammar-seconds", "Processor time for compiling one schema or grammar."),
)


def _limit_options(command: F) -> F:
    for limit in reversed(_LIMITS):
        kind, metavar, default = _kind(limit.field)
        command = click.option(
            limit.option, limit.field, type=kind, metavar=metavar, default=default, show_default=True, help=limit.help
        )(command)
    return command


def _kind(name: str) -> tuple[Any, str, Any]:
    """Type, unit and default of the limit `name`."""
    default = _DEFAULTS[name]
    if name.endswith("_seconds"):
        return float, "SECONDS", default
    return (str, "SIZE", f"{default // 2**20}MiB") if name.endswith("_bytes") else (int, "COUNT", default)


@click.command("serve")
@click.argument("model", required=False)
@click.option("-m", "--model", "--model-path", "model_option", metavar="MODEL", help="The same as MODEL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-key",
    "api_keys",
    metavar="KEY",
    multiple=True,
    help="A key that clients must bring. May be given several times. Others on this machine may see it in the list of "
    "processes: prefer --api-key-file, or HOOKLINE_API_KEYS with commas between.",
)
@click.option("--api-key-file", metavar="FILE", help="Keys, one a line; lines that begin with # are left out.")
@click.option(
    "--served-model-name",
    "served_model_names",
    metavar="NAME",
    multiple=True,
    help="What clients call the model. May be given several times; the first is shown.  [default: its own name]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="A value of the header Host to serve beside the address. May be given several times.  [default: on a loopback "
    "address its own names, elsewhere any]",
)
@click.option("--metrics-prefix", default="hookline", show_default=True, help="Of the names on /metrics, such as vllm.")
@click.option("--open-metrics", is_flag=True, help="Serve /metrics without a key.")
@click.option(
    "--tool-parser", metavar="NAME", help='How the model writes tool calls; "" for none.  [default: as its plugin says]'
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help='How the model marks its reasoning; "" for none.  [default: as its plugin says]',
)
@click.option(
    "--reasoning-fields",
    type=click.Choice(tuple(REASONING_FIELDS)),
    default="both",
    show_default=True,
    help="Under which names reasoning is sent. Both are read in a conversation's history.",
)
@click.option("--log-requests", is_flag=True, help="Tell the end of each request on stderr, with the client's own id.")
@click.option("--strict-api", is_flag=True, help="Refuse fields that are not known, in place of leaving them aside.")
@_limit_options
@engine_options
@speculative_options
@click.pass_context
def serve(ctx: click.Context, /, model: str | None, model_option: str | None, **values: Any) -> None:
    """Serve MODEL over HTTP, as OpenAI's API does.

    The routes are /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /metrics, the probes
    /health, /livez, /readyz and /startup, and a page to chat at /. The engine runs in a process of its own.

    \b
      engine serve ./my-model
      engine serve ./my-model --port 8080 --served-model-name chat --api-key-file keys.txt
      engine serve ./my-model --host 0.0.0.0 --api-key-file keys.txt --max-running 128

    The first SIGTERM or Ctrl-C lets running requests end, a second one ends them at once; both give exit code 0. If
    the engine dies, streams end with an error, and the exit code is not 0.
    """
    if model is not None and model_option is not None:
        raise UsageError("both MODEL and --model are given", hint="Give one of the two.")
    config = _server_config(model or model_option or DEFAULT_MODEL, values, ctx.obj)
    if values["log_requests"]:
        _log_requests()
    with _ended_by_signals():
        ctx.exit(_serve(config))


def _serve(config: ServerConfig) -> int:
    try:
        from hookline.serving import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "hookline":
            raise
        raise UsageError(
            f"the server needs {error.name}, which is not installed", hint='Install it: pip install "hookline[serve]"'
        ) from None
    listener = server.bind(config.host, config.port)
    console = _Console()
    try:
        found = find_model(config.engine)
        return server.serve(config, listener, model=found, on_stage=console.show, say=console.say)
    finally:
        console.close()
        listener.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Until the server takes signals itself they end the command, with the exit code that they have later."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("hookline.serving")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _server_config(model: str, values: Mapping[str, Any], plugins: PluginOptions | None) -> ServerConfig:
    keys = [*values["api_keys"], *read_environment().api_keys]
    if values["api_key_file"] is not None:
        keys += _read_keys(values["api_key_file"])
    return ServerConfig(
        engine=engine_config(model, values, plugins),
        api_keys=tuple(dict.fromkeys(keys)),
        limits=_limits(values),
        **{name: values[name] for name in _SERVER_FIELDS},
    )


def _limits(values: Mapping[str, Any]) -> Limits:
    """The limits; UsageError, naming the option, if one cannot be what it is."""
    given = {limit.field: values[limit.field] for limit in _LIMITS}
    given["body_bytes"] = parse_bytes(given["body_bytes"], "--max-body")
    for limit in _LIMITS:
        check_limit(limit.field, given[limit.field], limit.option)
    return Limits(**given)


def _read_keys(name: str) -> list[str]:
    """The keys in a file.

    Raises:
        UsageError: if it cannot be read, or has none: a server that was meant to be locked would be open.
    """
    try:
        text = expand_home(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--api-key-file {name} cannot be read: {reason}", hint="Give a file of text.") from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {name} has no key", hint="Write at least one, on a line of its own.")
    return keys


class _Console:
    """What the operator sees on stderr: how far the start is, then lines. A terminal that has gone ends no server."""

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None
        self._stage = ""

    def show(self, stage: Stage) -> None:
        """A stage of the start goes on."""
        with suppress(OSError):
            self._show(stage)

    def _show(self, stage: Stage) -> None:
        if stage.name != self._stage:
            self._stage = stage.name
            text, unit = _STAGES[stage.name]
            if self._display is None:
                self._display = ProgressDisplay(text, unit)
                self._display.__enter__()
            else:
                self._display.begin(text, unit)
        if self._display is not None:
            self._display(stage.done, stage.total)

    def say(self, text: str) -> None:
        """Prints lines, below all progress."""
        self.close()
        tell(text)

    def close(self) -> None:
        """Takes the progress away; it does not come again."""
        display, self._display = self._display, None
        if display is not None:
            with suppress(OSError):
                display.__exit__(None, None, None)
