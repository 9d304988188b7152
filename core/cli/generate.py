"""`engine generate`: one prompt streamed to the terminal, or a file of prompts in one continuous batch."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.answer import stream_answer
from hookline.cli.options import (
    engine_config,
    engine_options,
    model_option,
    report_options,
    sampling_options,
    sampling_params,
)
from hookline.cli.output_file import check_output
from hookline.cli.prompt_file import generate_file, json_line, read_lines
from hookline.cli.prompts import RowReader, as_prompt
from hookline.cli.render import run_figures, tell
from hookline.cli.speculation import speculative_options
from hookline.cli.starting import start_engine
from hookline.errors import HooklineError, InvalidRequestError, UsageError

if TYPE_CHECKING:
    from hookline.engine import Engine
    from hookline.prompt_encoder import Prompt
    from hookline.sampling_params import SamplingParams
    from hookline.scheduling.output import RequestOutput


@click.command("generate")
@click.argument("prompt", required=False)
@model_option
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without its chat template.")
@click.option("--input", "input_file", metavar="FILE", help="A prompt a line, as JSON (see above); - is stdin.")
@click.option("--output", "output_file", metavar="FILE", help="Where the results of --input go.  [default: stdout]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt when it is done.")
@click.option("--stats", is_flag=True, help="Print times, rates and the memory plan on stderr.")
@sampling_options(max_tokens=256)
@report_options
@engine_options
@speculative_options
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    prompt: str | None,
    model: str,
    system: str | None,
    raw: bool,
    input_file: str | None,
    output_file: str | None,
    as_json: bool,
    stats: bool,
    **values: Any,
) -> None:
    """Answer PROMPT, or every prompt of a file.

    The answer is streamed to stdout, and all else goes to stderr. PROMPT - reads stdin, less one line end. The
    checkpoint's chat template is used where it has one.

    \b
      engine generate "What is the capital of France?"
      engine generate -m ./my-model --raw --temperature 0.8 --seed 7 "Once upon a time"
      git diff | engine generate --system "Write a commit message." --stats -
      engine generate --input prompts.jsonl --output answers.jsonl

    Each line of an --input file is a JSON object with one of `prompt` (a text), `messages` (a list of objects with
    `role` and `content`) or `prompt_token_ids`, and may have sampling options of its own, named as here with
    underscores: {"prompt": "Hi", "max_tokens": 8}. Results come in the order of the lines, each the object of --json;
    a line that cannot be served gives {"error": {"message": ..., "field": ...}, "index": ...}, the others go on, and
    the exit code is 1. FILE of --output appears when all is done; after an interruption, what was done is in
    FILE.partial.

    The object of --json has `prompt_token_ids`, `token_ids`, `text`, `finish_reason` (stop, length, abort or error),
    `stop_reason`, `usage` and `timing` (seconds); with -n above 1, `outputs` is a list of the continuations. Where
    tokens are proposed, `speculative.steps` has each step's `num_accepted`, `next_token` and the `drafts` for the next.
    """
    start = time.monotonic()
    params = sampling_params(values)
    config = engine_config(model, values, ctx.obj)
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out", hint="Give one of the two.")
    if input_file is not None:
        if prompt is not None:
            raise UsageError("both PROMPT and --input are given", hint="Give one of the two.")
        lines = read_lines(input_file)
        target = None if output_file is None else check_output(output_file, "--output")
        with start_engine(config) as engine:
            rows = RowReader(engine, params, system=system, raw=raw)
            failed = generate_file(engine, rows, lines, target, stats_since=start if stats else None)
        ctx.exit(1 if failed else 0)
    if output_file is not None:
        raise UsageError("--output goes with --input", hint="Redirect stdout to keep one answer in a file.")
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise UsageError("log probabilities are only shown with --json or --input", hint="Add --json.")
    text = _read_prompt(prompt, raw)
    with start_engine(config) as engine:
        ready = time.monotonic()
        output = _answer(engine, as_prompt(engine, text, system=system, raw=raw), params, as_json)
        if stats:
            run_seconds = time.monotonic() - ready
            tell(run_figures([output], ready - start, run_seconds, engine.memory_plan))
    if any(one.finish_reason == "error" for one in output.outputs):
        raise HooklineError(f"the answer could not be computed: {output.error or 'no reason is known'}")


def _read_prompt(prompt: str | None, raw: bool) -> str:
    """The prompt's text, from the command line or stdin.

    Raises:
        UsageError: if there is none.
        InvalidRequestError: if it is empty.
    """
    if prompt is None:
        raise UsageError("no PROMPT", hint='Give one, such as engine generate "Hello", or - to read it from stdin.')
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"stdin is not UTF-8: {error}", field="prompt") from None
    if not (prompt if raw else prompt.strip()):
        raise InvalidRequestError("the prompt is empty", field="prompt", hint="Give at least one word.")
    return prompt


def _answer(engine: Engine, prompt: Prompt, params: SamplingParams, as_json: bool) -> RequestOutput:
    """Prints the answer: as it comes, or when it is done where it is an object or one of several."""
    if as_json or params.n > 1:
        [output] = engine.generate([prompt], params)
        if as_json:
            click.echo(json_line(output.to_dict()))
        else:
            for one in output.outputs:
                click.echo(f"--- {one.index + 1} of {params.n} ---\n{one.text}")
        return output
    with closing(stream_answer(engine, prompt, params)) as reports:
        return deque(reports, maxlen=1).pop()
