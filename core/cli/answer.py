"""An answer on its way to stdout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

if TYPE_CHECKING:
    from hookline.sampling_params import SamplingParams
    from hookline.scheduling.output import RequestOutput

P = TypeVar("P", contravariant=True)


class Answerer(Protocol[P]):
    """What answers prompts of type P: an engine, or a server."""

    def stream(self, prompt: P, params: SamplingParams, /) -> Generator[RequestOutput, None, None]: ...


def stream_answer(engine: Answerer[P], prompt: P, params: SamplingParams) -> Generator[RequestOutput, None, None]:
    """Gives each report and prints the first continuation as it grows; ends the line, also where it is interrupted.

    Closing it aborts the request.
    """
    shown = ""
    try:
        with closing(engine.stream(prompt, params)) as reports:
            for output in reports:
                yield output  # first: who is interrupted has all that was printed
                new, shown = output.outputs[0].text[len(shown) :], output.outputs[0].text
                click.echo(new, nl=False)
    finally:
        if shown:
            click.echo()
