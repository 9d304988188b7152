"""`engine serve`, put together: the socket, the routes behind their guards, the engine, what the operator is told."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from hookline.errors import ServerError
from hookline.plugins import PluginRegistry
from hookline.serving import probes
from hookline.serving.app import make_app
from hookline.serving.front import Front, ServedModel
from hookline.serving.guards import is_loopback
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.metrics import Metrics
from hookline.serving.process.async_engine import AsyncEngine
from hookline.serving.process.messages import Facts, Report, Stage
from hookline.serving.requests.formats import Formats, peek_architecture
from hookline.serving.requests.grammars import GrammarCompiler
from hookline.serving.server_config import ServerConfig
from hookline.serving.supervisor import Stops, Supervisor, http_server
from hookline.serving.web import make_web_router

_BACKLOG = 1024
_MOST_CONNECTIONS = 4096
# File handles that are left for all but connections.
_OTHER_HANDLES = 128

EXPOSED = (
    "Warning: others than this machine may reach this server, and it asks for no key. "
    "Give --api-key-file, or listen on 127.0.0.1."
)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; clients may connect from now on, and are answered when the server runs.

    Raises:
        ServerError: if the port is taken, or the address is not this machine's.
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name with several addresses, such as localhost, the one that most clients try.
        family, kind, number, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServerError(
            f"cannot listen on {where}: {error.strerror or error}",
            hint="Give another --port, such as 0 for a free one, or an address of this machine as --host.",
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    config: ServerConfig,
    listener: socket.socket,
    *,
    model: Path,
    on_stage: Callable[[Stage], None],
    say: Callable[[str], None],
) -> int:
    """Serves until a signal or the engine's end.

    Args:
        listener: from `bind`.
        model: the folder or file that the engine is to load.
        on_stage: is told how far the start is.
        say: prints lines for the operator.

    Returns:
        The exit code: 0 after a signal, the engine's own if it died.

    Raises:
        UsageError: if nobody knows a parser's name; before the model is loaded, if its files tell what it is.
        HooklineError: if the engine does not start.
    """
    if not config.api_keys and not is_loopback(config.host):
        say(EXPOSED)
    url, server = url_of(listener), _Server(config, model, on_stage)
    with asyncio.Runner(loop_factory=server.http.config.get_loop_factory()) as runner:
        return runner.run(server.run(listener, url, say))


class _Server:
    """The parts of a server, which know each other."""

    def __init__(self, config: ServerConfig, model: Path, on_stage: Callable[[Stage], None]) -> None:
        self.config = config
        self.lifecycle = Lifecycle()
        self.registry = PluginRegistry(config.engine.plugins)
        architecture = peek_architecture(model)
        if architecture is not None:
            Formats.find(config, self.registry, architecture)  # tells a wrong name of a parser now; see `_prepare`
        self.metrics = Metrics(config.metrics_prefix, model_name=next(iter(config.served_model_names), ""))
        self.engine = AsyncEngine(config.engine, on_stage=self._take_stage, on_report=self._take_report)
        self.front = Front(config, self.engine, self.lifecycle, self.metrics, self.registry.plugins)
        self._on_stage = on_stage
        app = make_app(self.front, [probes.make_router(self.lifecycle, lambda: self.engine.load), make_web_router()])
        self.http = http_server(app, config.limits, _most_connections(), self.metrics.refused)

    async def run(self, listener: socket.socket, url: str, say: Callable[[str], None]) -> int:
        """Serves; see `serve`."""
        stops = Stops()
        supervisor = Supervisor(self.http, listener, self.engine, self.lifecycle, self.front.calls, say=say)
        try:
            with stops.listening():
                return await supervisor.run(stops, lambda facts: self._prepare(facts, url))
        finally:
            stops.ignore()
            if self.front.served is not None:
                await self.front.served.grammars.close()

    def _take_stage(self, stage: Stage) -> None:
        self.lifecycle.stage(stage.name, stage.done, stage.total)
        self._on_stage(stage)

    def _take_report(self, report: Report) -> None:
        self.lifecycle.heard()
        self.metrics.take_report(report)

    def _prepare(self, facts: Facts, url: str) -> str:
        """The engine is ready: opens the routes that need it."""
        formats = Formats.find(self.config, self.registry, facts.architecture)
        self.front.served = ServedModel.build(
            self.config,
            facts,
            self.engine.tokenizer,
            GrammarCompiler(facts, self.config.limits),
            formats.tools,
            formats.reasoning,
        )
        self.metrics.set_facts(facts)
        for name, seconds in self.lifecycle.stage_seconds.items():
            self.metrics.stage(name, seconds)
        return ready_text(facts, url, self.lifecycle.stage_seconds)


def ready_text(facts: Facts, url: str, stage_seconds: Mapping[str, float]) -> str:
    """What the operator is told when requests are served."""
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stage_seconds.items())
    tokens = facts.num_blocks * facts.block_size
    return (
        f"{facts.name} ({facts.architecture} by {facts.plugin}) on {facts.device} in {facts.dtype}, "
        f"ready after {sum(stage_seconds.values()):.1f} s ({stages}).\n"
        f"Context {facts.max_model_len:,} tokens; cache {facts.num_blocks:,} blocks of {facts.block_size}, "
        f"{tokens:,} tokens in all; {facts.max_running:,} requests and {facts.max_batch_tokens:,} tokens a step.\n"
        f"Serving on {url}"
    )


def _most_connections() -> int:
    """As many connections as there are file handles for; the soft limit is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_HANDLES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(min(_MOST_CONNECTIONS, soft - _OTHER_HANDLES), 1)
