"""A file of prompts in one continuous batch: rows in, results out in the rows' order, whatever order they end in."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from hookline.cli.output_file import is_stream
from hookline.cli.render import ProgressDisplay, run_figures, tell
from hookline.errors import HooklineError, ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from hookline.cli.prompts import RowReader
    from hookline.engine import Engine
    from hookline.scheduling.output import RequestOutput

# Requests that wait in the engine for each that runs: enough that a step always finds one, and few enough that a large
# file's prompts are not all in memory as tokens.
_WAITING_PER_RUNNING = 4


def read_lines(name: str) -> list[tuple[int, bytes]]:
    """The lines of a file, or of stdin for `-`, that are not blank, each with its number from 1.

    Raises:
        ModelNotFoundError: if there is no such file, or it cannot be read.
        UsageError: if it has no line that is not blank.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"the file of --input, {name}, cannot be read: {error.strerror}") from None
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"the file of --input, {name}, has no rows", hint='A row is such as {"prompt": "Hello"}.')
    return lines


def json_line(value: object) -> str:
    """`value` as JSON on one line, with letters as they are; halves of a character, which no file takes, escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def generate_file(
    engine: Engine,
    rows: RowReader,
    lines: Sequence[tuple[int, bytes]],
    target: Path | None,
    stats_since: float | None = None,
) -> int:
    """Serves all rows and writes a result for each.

    Args:
        target: where results go; None for stdout.
        stats_since: when the command began, where its figures are wanted.

    Returns:
        how many rows failed.
    """
    ready = time.monotonic()
    run = _Run(engine, rows, lines)
    with _opened(target) as file, ProgressDisplay("Generating", "prompts") as progress:
        for result in run.results(progress):
            click.echo(json_line(result), file=file)
    if run.failed:
        tell(f"{run.failed} of {len(lines)} rows failed; their results have an error.")
    if stats_since is not None:
        run_seconds = time.monotonic() - ready
        tell(run_figures(run.outputs, ready - stats_since, run_seconds, engine.memory_plan))
    return run.failed


class _Run:
    """One pass over the rows.

    Attributes:
        failed: rows that gave an error so far.
        outputs: of the rows that gave none.
    """

    def __init__(self, engine: Engine, rows: RowReader, lines: Sequence[tuple[int, bytes]]) -> None:
        self._engine = engine
        self._rows = rows
        self._lines = lines
        self._pending: dict[str, int] = {}
        self._done: dict[int, dict[str, Any]] = {}
        self._added = 0
        self.failed = 0
        self.outputs: list[RequestOutput] = []

    def results(self, progress: ProgressDisplay) -> Iterator[dict[str, Any]]:
        """The results in the rows' order, each as soon as it and all before it are there."""
        given = 0
        while given < len(self._lines):
            self._add_rows()
            if self._pending:
                for output in self._engine.step():
                    self._take(output)
            while given in self._done:
                yield self._done.pop(given)
                given += 1
            progress(given + len(self._done), len(self._lines))

    def _add_rows(self) -> None:
        most = self._engine.config.max_running * (1 + _WAITING_PER_RUNNING)
        while self._added < len(self._lines) and len(self._pending) < most:
            number, line = self._lines[self._added]
            where = None
            try:
                where, prompt, params = self._rows.read(line, number)
                self._pending[self._engine.add_request(prompt, params)] = self._added
            except HooklineError as error:
                field = getattr(error, "field", "") or None
                self._fail(self._added, str(error), where if where is not None and field == "prompt" else field)
            self._added += 1

    def _take(self, output: RequestOutput) -> None:
        if not output.finished:
            return
        index = self._pending.pop(output.request_id)
        if any(one.finish_reason == "error" for one in output.outputs):
            self._fail(index, output.error or "the row could not be computed", None)
            return
        self.outputs.append(output)
        self._done[index] = output.to_dict()

    def _fail(self, index: int, message: str, field: str | None) -> None:
        self.failed += 1
        self._done[index] = {"error": {"message": message, "field": field}, "index": index}


@contextmanager
def _opened(target: Path | None) -> Iterator[TextIO | None]:
    """A file that gets its name when all is written; what is there before stays under the name with `.partial`.

    None stands for stdout. A device or a pipe, such as `/dev/null`, is written to and never replaced.
    """
    if target is None:
        yield None
        return
    partial = target if is_stream(target) else target.with_name(f"{target.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise HooklineError(f"{target} cannot be written: {error}") from error
    except BaseException:
        if partial != target:
            tell(f"The results so far are in {partial}.")
        raise
