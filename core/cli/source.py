"""MODEL, --shape or --config: a command's three ways to say which model, two of which need no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hookline.cli.options import engine_config
from hookline.config import EngineConfig, PluginOptions, expand_home
from hookline.errors import UsageError

if TYPE_CHECKING:
    from hookline.benchmark.setup import Subject

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F) -> F:
    """Adds the argument and the two options that `read_subject` reads."""
    command = click.option("--config", "config_file", metavar="FILE", help="A config.json, with random weights.")(
        command
    )
    command = click.option("--shape", metavar="NAME", help="A reference shape of a plugin's, with random weights.")(
        command
    )
    return click.argument("model", required=False)(command)


def read_subject(values: Mapping[str, Any], plugins: PluginOptions) -> Subject:
    """What MODEL, --shape or --config says.

    Raises:
        UsageError: if not just one of them is given, or there is no such shape.
        ModelNotFoundError: if there is no such file.
    """
    from hookline.benchmark.setup import Subject
    from hookline.benchmark.shapes import find_shape, read_config_file

    model, shape, file = values["model"], values["shape"], values["config_file"]
    given = [name for name, value in (("MODEL", model), ("--shape", shape), ("--config", file)) if value is not None]
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given) or 'neither MODEL nor --shape nor --config'} {'are' if given else 'is'} given",
            hint="Give one of MODEL, --shape NAME and --config FILE.",
        )
    if shape is not None:
        return Subject(shape, "shape", find_shape(shape, plugins))
    if file is not None:
        return Subject(file, "config", read_config_file(expand_home(file)))
    return Subject(model, "checkpoint")


def subject_config(subject: Subject, values: Mapping[str, Any], plugins: PluginOptions) -> EngineConfig:
    """The engine's options for `subject`, which gets random weights where it is no checkpoint."""
    options = dict(values)
    if subject.hf_config is not None:
        options["load_format"] = "random"
    return engine_config(subject.name, options, plugins)
