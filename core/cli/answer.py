"""An answer on its way to stdout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hookline.engine import Engine
    from hookline.prompt_encoder import Prompt
    from hookline.sampling_params import SamplingParams
    from hookline.scheduling.output import RequestOutput


def stream_answer(engine: Engine, prompt: Prompt, params: SamplingParams) -> Generator[RequestOutput, None, None]:
    """Prints the first continuation as it grows and gives each report; ends the line, also where it is interrupted.

    Closing it aborts the request.
    """
    shown = ""
    try:
        with closing(engine.stream(prompt, params)) as reports:
            for output in reports:
                new, shown = output.outputs[0].text[len(shown) :], output.outputs[0].text
                click.echo(new, nl=False)
                yield output
    finally:
        if shown:
            click.echo()
