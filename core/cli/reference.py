"""Writes docs/cli.md from the commands' own help: `python -m hookline.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from hookline.cli.main import engine

_WIDTH = 100
_HEAD = """\
# Command line

Written by `python -m hookline.cli.reference > docs/cli.md` from the commands' own help; a test compares the two.
Results go to stdout, progress and messages to stderr.
"""


def render() -> str:
    """All of docs/cli.md."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    top = click.Context(
        engine, info_name="engine", terminal_width=_WIDTH, max_content_width=_WIDTH, **engine.context_settings
    )
    yield _section("engine", engine.get_help(top))
    yield from _commands(engine, top)


def _commands(group: click.Group, above: click.Context) -> Iterator[str]:
    """The sections of a group's commands, and of theirs where one is a group itself."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        if command is None:
            raise LookupError(f"{above.command_path} lists the command {name}, and has none")
        context = click.Context(command, above, info_name=name, **command.context_settings)
        yield _section(context.command_path, command.get_help(context))
        if isinstance(command, click.Group):
            yield from _commands(command, context)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    click.echo(render(), nl=False)
