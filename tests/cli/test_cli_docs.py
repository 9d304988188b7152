"""docs/cli.md is what the commands' own help says, and the help says enough."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from hookline.cli.main import engine
from hookline.cli.reference import render

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = engine.list_commands(click.Context(engine, **engine.context_settings))
WITH_EXAMPLES = ("generate", "chat", "show", "snapshot", "doctor")


def command(name: str) -> click.Command:
    found = engine.get_command(click.Context(engine, **engine.context_settings), name)
    assert found is not None
    return found


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m hookline.cli.reference > docs/cli.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    found = command(name)
    assert found.help
    for option in found.params:
        if isinstance(option, click.Option):
            assert option.help, option.name


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_help_has_examples_and_defaults(name: str) -> None:
    found = command(name)
    assert found.help is not None
    assert f"  engine {name}" in found.help
    for option in found.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.multiple:
            text = option.help or ""
            said = option.show_default or "[default:" in text
            optional = {"system", "input_file", "logprobs", "prompt_logprobs"}
            assert said or option.name in optional, option.name
