"""`engine chat`: a conversation in the terminal, or from a pipe."""

from __future__ import annotations

import difflib
import importlib
import io
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import click

from hookline.cli.answer import Answerer, stream_answer
from hookline.cli.conversation import Conversation, Message, load_conversation, save_conversation
from hookline.cli.options import engine_config, engine_options, model_option, sampling_options, sampling_params
from hookline.cli.prompts import has_chat_template
from hookline.cli.remote import RemoteServer, check_local_options, read_key, url_options
from hookline.cli.render import run_figures, tell
from hookline.cli.speculation import speculative_options
from hookline.cli.starting import start_engine
from hookline.config import EngineConfig
from hookline.errors import HooklineError, InvalidRequestError, UsageError
from hookline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hookline.engine import Engine
    from hookline.scheduling.output import RequestOutput

_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/system": "/system TEXT   set the system message, or show it",
        "/reset": "/reset         forget the conversation, but not the system message",
        "/stats": "/stats         figures of the last answer, and how full the context is",
        "/save": "/save FILE     write the conversation as JSON",
        "/load": "/load FILE     go on with a conversation that was saved",
        "/help": "/help          this list",
        "/quit": "/quit          leave; so does Ctrl-D. Ctrl-C stops an answer",
    }
)


_REMOTE_OPTIONS = frozenset({"model", "system", *(entry.name for entry in fields(SamplingParams))})


class Partner(Answerer[list[Message]], Protocol):
    """Who answers.

    Attributes:
        model: its name.
        max_model_len: most tokens of a conversation; None where that is not known.
    """

    @property
    def model(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    def figures(self, output: RequestOutput, seconds: float, /) -> str:
        """The figures of an answer, which took so many seconds, as lines of text."""


@click.command("chat")
@model_option
@url_options
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@sampling_options(max_tokens=1024)
@engine_options
@speculative_options
@click.pass_context
def chat(
    ctx: click.Context, /, model: str, url: str | None, api_key_file: str | None, system: str | None, **values: Any
) -> None:
    """Talk with a model. The whole conversation is its context.

    \b
      engine chat
      engine chat -m ./my-model --temperature 0.7 --system "Answer in one sentence."
      engine chat --url http://127.0.0.1:8000

    Lines that begin with / are commands: /system, /reset, /stats, /save, /load, /help, /quit. Ctrl-C stops an answer,
    Ctrl-D quits. Answers go to stdout, all else to stderr. Lines may also come from a pipe. With --url a server
    answers, and what its model thinks goes to stderr.
    """
    params = sampling_params(values)
    if url is None:
        with _local_partner(engine_config(model, values, ctx.obj)) as partner:
            _talk(partner, params, system)
        return
    check_local_options(ctx, _REMOTE_OPTIONS)
    named = ctx.get_parameter_source("model") is not click.core.ParameterSource.DEFAULT
    _talk(RemoteServer(url, model if named else None, read_key(api_key_file)), params, system)


def _talk(partner: Partner, params: SamplingParams, system: str | None) -> None:
    """Takes lines until the end."""
    session = _Session(partner, params, Conversation(system))
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")  # line editing in `input`
        context = f", {partner.max_model_len} tokens of context" if partner.max_model_len is not None else ""
        tell(f"{partner.model}{context}. /help lists commands.")
    for line in _lines():
        if not session.take(line):
            break


@contextmanager
def _local_partner(config: EngineConfig) -> Iterator[Partner]:
    """A model in this process.

    Raises:
        UsageError: if it has no chat template.
    """
    start = time.monotonic()
    with start_engine(config) as engine:
        if not has_chat_template(engine):
            raise UsageError(
                f"{config.model} has no chat template, so it cannot chat",
                hint="Use engine generate --raw, or choose an instruct model.",
            )
        yield _LocalPartner(engine, time.monotonic() - start)


@dataclass(frozen=True, slots=True)
class _LocalPartner:
    """An engine that took `load_seconds` to start."""

    engine: Engine
    load_seconds: float

    @property
    def model(self) -> str:
        return self.engine.config.model

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def stream(self, prompt: list[Message], params: SamplingParams, /) -> Generator[RequestOutput, None, None]:
        return self.engine.stream(prompt, params)

    def figures(self, output: RequestOutput, seconds: float, /) -> str:
        return run_figures([output], self.load_seconds, seconds, self.engine.memory_plan)


def _lines() -> Iterator[str]:
    """What the user writes, without blank lines, until the end of the input."""
    prompt = ">>> " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is refused as any other bad line
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            tell("\nCtrl-D or /quit quits.")
            continue
        if line:
            yield line


class _Session:
    """The conversation with what serves it."""

    def __init__(self, partner: Partner, params: SamplingParams, conversation: Conversation) -> None:
        self._partner = partner
        self._params = params
        self._conversation = conversation
        self._last: tuple[RequestOutput, float] | None = None

    def take(self, line: str) -> bool:
        """Does what a line asks for; false if it asks to quit. Errors are said, and change nothing."""
        name, _, rest = line.partition(" ")
        try:
            if not line.startswith("/"):
                self._answer(line)
            elif name == "/quit":
                return False
            else:
                self._command(name, rest.strip())
        except HooklineError as error:
            tell(f"Error: {error}")
            if isinstance(error, InvalidRequestError) and self._conversation.turns:
                tell("The conversation is as it was before; /reset begins anew.")
        return True

    def _command(self, name: str, argument: str) -> None:
        if name in ("/save", "/load") and not argument:
            raise UsageError(f"{name} needs a file", hint=_COMMANDS[name])
        if name == "/system":
            if argument:
                self._conversation.system = argument
            tell(f"System message: {self._conversation.system or 'none'}")
        elif name == "/reset":
            self._conversation = Conversation(self._conversation.system)
            self._last = None
            tell("The conversation is forgotten.")
        elif name == "/stats":
            self._print_stats()
        elif name == "/save":
            save_conversation(self._conversation, argument)
            tell(f"Written to {argument}.")
        elif name == "/load":
            self._conversation = load_conversation(argument)
            tell(f"{len(self._conversation.turns)} messages are loaded.")
        elif name == "/help":
            tell("\n".join(_COMMANDS.values()))
        else:
            near = difflib.get_close_matches(name, _COMMANDS, n=3)
            raise UsageError(
                f"no command {name!r}", hint=f"Did you mean {' or '.join(near)}?" if near else "Try /help."
            )

    def _answer(self, text: str) -> None:
        """Streams the answer to `text` and keeps both, what came of a stopped answer too."""
        start = time.monotonic()
        reports: deque[RequestOutput] = deque(maxlen=1)
        stopped = False
        try:
            with closing(stream_answer(self._partner, self._conversation.asked(text), self._params)) as answer:
                reports.extend(answer)
        except KeyboardInterrupt:
            tell("(stopped)")
            stopped = True
        if not reports:
            return
        output = reports.pop()
        self._conversation.add(text, output.outputs[0].text)
        self._last = output, time.monotonic() - start
        if not stopped:
            self._say_why_it_ended(output)

    def _say_why_it_ended(self, output: RequestOutput) -> None:
        reason = output.outputs[0].finish_reason
        if reason == "error":
            tell("(the answer could not be computed)")
        if reason != "length":
            return
        most = self._partner.max_model_len
        if most is not None and self._context_used(output) >= most:
            full = f"the context of {most} tokens is full"
            tell(f"({full}: /reset begins anew, --max-model-len sets it)")
        else:
            tell(f"(cut at --max-tokens {self._params.max_tokens})")

    def _context_used(self, output: RequestOutput) -> int:
        return output.usage.prompt_tokens + output.usage.completion_tokens

    def _print_stats(self) -> None:
        if self._last is None:
            tell("No answer yet.")
            return
        output, seconds = self._last
        tell(self._partner.figures(output, seconds))
        if used := self._context_used(output):
            most = "" if self._partner.max_model_len is None else f" of {self._partner.max_model_len}"
            tell(f"context      {used}{most} tokens")
