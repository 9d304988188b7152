"""`engine snapshot`: writes a model's final weights to a folder that loads without conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookline.cli.options import engine_config, engine_options
from hookline.cli.render import ProgressDisplay
from hookline.cli.speculation import speculative_options
from hookline.cli.starting import find_model


@click.command("snapshot")
@click.argument("model")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@engine_options
@speculative_options
@click.pass_context
def snapshot(ctx: click.Context, /, model: str, folder: Path, **values: Any) -> None:
    """Write MODEL's weights to DIR as the engine holds them, with config and tokenizer.

    DIR is then a model that loads faster: nothing is renamed, joined or converted any more. It fits the engine's and
    the plugin's version, the dtype and the device that it was written with, and says so where they differ. DIR appears
    when all is written; an older snapshot there is replaced, anything else is refused. The model's own draft is written
    where options of speculation ask for it, and such a snapshot serves without it too.

    \b
      engine snapshot smollm2-135m-instruct ./smollm2
      engine generate -m ./smollm2 "Hello"
    """
    from hookline.checkpoint.snapshot_writer import check_target
    from hookline.loading import load_model, save_snapshot

    config = engine_config(model, values, ctx.obj)
    check_target(folder.absolute())
    find_model(config)
    with ProgressDisplay(f"Loading {Path(model).name}") as progress:
        loaded = load_model(config, progress=progress)
    with ProgressDisplay(f"Writing {folder.name}") as progress:
        save_snapshot(loaded, folder, progress)
    click.echo(str(folder))
