"""The group `engine`: options that hold for all commands, commands imported when called, errors turned into exit codes.

Nothing heavy is imported here: `engine --help` must answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import click

from hookline.cli.render import tell
from hookline.config import PluginOptions
from hookline.errors import HooklineError

INTERRUPTED = 130
# Seconds between looks at whether an import has ended.
_LOOK_AGAIN = 0.02


class _Command(NamedTuple):
    """Where a command is, and its line in the help of the group."""

    target: str
    help: str


_COMMANDS: Mapping[str, _Command] = MappingProxyType(
    {
        "generate": _Command("hookline.cli.generate:generate", "Answer one prompt, or a file of prompts."),
        "chat": _Command("hookline.cli.chat:chat", "Talk with a model in the terminal."),
        "serve": _Command("hookline.cli.serve:serve", "Serve a model over HTTP, as OpenAI's API does."),
        "show": _Command("hookline.cli.show:show", "Say what a checkpoint is, who serves it, and whether it fits."),
        "pull": _Command("hookline.cli.pull:pull", "Download a model into the cache folder."),
        "snapshot": _Command("hookline.cli.snapshot:snapshot", "Write a model's final weights to a folder."),
        "bench": _Command("hookline.cli.bench:bench", "Measure latency, throughput, or serving under load."),
        "tune": _Command("hookline.cli.warm:tune", "Measure a model's products on this GPU, and keep the fastest way."),
        "warm-cache": _Command("hookline.cli.warm:warm_cache", "Compile what a model needs before its first start."),
        "list-models": _Command("hookline.cli.plugins_commands:list_models", "List the architectures served."),
        "plugins": _Command("hookline.cli.plugins_commands:plugins", "List the plugins, their states and reasons."),
        "doctor": _Command("hookline.cli.doctor:doctor", "Check this machine and the installation."),
    }
)


class EngineGroup(click.Group):
    """A group that imports a command when it is called, and ends with the exit code of our errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Commands are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=command.help) for name, command in _COMMANDS.items()]
        return [item for item in names if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            tell("Interrupted.")
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if ctx.params["debug"]:
                tell(traceback.format_exc(), newline=False)
            if not isinstance(error, HooklineError):
                error = HooklineError(_describe(error), hint="This is unexpected. See where: engine --debug ...")
            tell(f"Error: {error}")
            ctx.exit(error.exit_code)


def _describe(error: Exception) -> str:
    """What went wrong, for errors that are not ours."""
    if isinstance(error, OSError) and error.strerror:
        where = "stdout, or another file in use" if error.filename is None else error.filename
        return f"{where}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _read_prefer(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    prefer: dict[str, str] = {}
    for value in values:
        architecture, _, distribution = (part.strip() for part in value.partition("="))
        if not architecture or not distribution:
            raise click.BadParameter(f"{value!r}; expected ARCH=DISTRIBUTION", ctx, param)
        if prefer.setdefault(architecture, distribution) != distribution:
            raise click.BadParameter(f"{architecture} is given to two plugins", ctx, param)
    return prefer


def _read_disabled(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> frozenset[str]:
    for value in values:
        if not value.startswith("no:") or value == "no:":
            raise click.BadParameter(f"{value!r}; expected no:ID, which leaves the plugin ID out", ctx, param)
    return frozenset(value.removeprefix("no:") for value in values)


@click.group(cls=EngineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="hookline", message="hookline %(version)s")
@click.option(
    "--plugin",
    "prefer",
    metavar="ARCH=DISTRIBUTION",
    multiple=True,
    callback=_read_prefer,
    help="Which plugin serves ARCH where several claim it.",
)
@click.option(
    "-p", "disabled", metavar="no:ID", multiple=True, callback=_read_disabled, help="Leave the plugin ID out."
)
@click.option("--no-plugins", is_flag=True, help="Leave every plugin out.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def engine(ctx: click.Context, prefer: dict[str, str], disabled: frozenset[str], no_plugins: bool, debug: bool) -> None:
    """Run large language models whose architectures are plugins.

    Exit codes: 0 done, 1 failed during work, 2 usage, 3 model or file not found, 4 no plugin for the architecture,
    5 plugin broken, incompatible, disabled or in conflict, 6 not enough memory, 7 device or driver, 8 port or server,
    130 interrupted.
    """
    ctx.obj = PluginOptions(enabled=not no_plugins, disabled=disabled, prefer=prefer)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: raises KeyboardInterrupt, but inside an import only when that has ended, or at a second Ctrl-C.

    Extension modules such as torch's swallow an exception while they are imported, and an import that was cut in the
    middle fails again later: the command would go on as if nothing had been pressed.
    """
    again = number == signal.SIGINT and signal.getitimer(signal.ITIMER_REAL)[0] > 0
    if _importing(frame) and not again:
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN)
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Entry point of the console script.

    A standard stream that the caller closed becomes one that is empty and takes everything: without it the next file
    that is opened would stand in its place. A caller that ignores Ctrl-C, as a shell does for what runs in the
    background, is obeyed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    hears = hasattr(signal, "setitimer") and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
    try:
        engine(prog_name="engine")
    finally:
        if hears:
            # What is left is Python's own end, and a traceback from there helps nobody.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
