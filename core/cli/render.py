"""What commands show on stderr: how far a long piece of work has come, and the figures of a run."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from hookline.memory_planner import MemoryPlan
    from hookline.scheduling.output import RequestOutput

SECONDS_BETWEEN_LINES = 10.0

Unit = Literal["bytes", "prompts", "graphs"]


def tell(text: str, newline: bool = True) -> None:
    """Writes on stderr. Where that cannot be written (a full disk, a terminal that has gone) the work goes on."""
    with suppress(OSError):
        click.echo(text, err=True, nl=newline)


class ProgressDisplay:
    """Shows how far a stage has come, and is called as the engine calls a `Progress`.

    A terminal gets a bar that goes away at the end. Anything else gets a line every few seconds, also while nothing
    moves, and none for a stage that is over before the first.

    Args:
        stage: what is done, such as `Loading`.
        unit: what is counted.
        seconds: between two lines.
    """

    def __init__(self, stage: str, unit: Unit = "bytes", seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._stage = stage
        self._unit = unit
        self._seconds = seconds
        self._start = time.monotonic()
        self._done, self._total = 0, 0
        self._bar: RichProgress | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if sys.stderr.isatty():
            self._show_bar()
        else:
            self._thread = threading.Thread(target=self._print_lines, daemon=True)
            self._thread.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def begin(self, stage: str, unit: Unit) -> None:
        """Goes on to another stage of the same work."""
        self._stage, self._unit, self._start = stage, unit, time.monotonic()
        self._done, self._total = 0, 0
        if self._bar is not None:
            self._bar.stop()
            self._show_bar()

    def _show_bar(self) -> None:
        self._bar = _make_bar(self._unit)
        self._task = self._bar.add_task(self._stage, total=None)
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._thread is not None:
            self._thread.join()

    def _print_lines(self) -> None:
        while not self._over.wait(self._seconds):
            tell(self.line())

    def line(self) -> str:
        """How far it is, such as `Loading: 12 of 40 MB, 30 %, 20 s`."""
        seconds = f"{time.monotonic() - self._start:.0f} s"
        if not self._total:
            return f"{self._stage}: {seconds}"
        scale, unit = (1e6, "MB") if self._unit == "bytes" else (1, self._unit)
        share = 100 * self._done / self._total
        return f"{self._stage}: {self._done / scale:.0f} of {self._total / scale:.0f} {unit}, {share:.0f} %, {seconds}"


def _make_bar(unit: Unit) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def peak_memory() -> int:
    """Most bytes of memory that this process had at a time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_figures(outputs: Sequence[RequestOutput], load_seconds: float, run_seconds: float, plan: MemoryPlan) -> str:
    """The figures of `--stats` as lines of text.

    Args:
        outputs: the finished requests.
        load_seconds: from the start of the command until the engine was ready.
        run_seconds: from then until the last request ended.
        plan: where the memory went.
    """
    from hookline.memory_planner import format_bytes

    prompt_tokens = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    new_tokens = sum(output.usage.completion_tokens for output in outputs)
    rows = [
        ("load", f"{load_seconds:.2f} s"),
        ("requests", f"{len(outputs)} in {run_seconds:.2f} s"),
        ("prompt", f"{prompt_tokens} tokens, {cached} of them from the prefix cache"),
        ("output", f"{new_tokens} tokens"),
        *_rates(outputs, new_tokens, run_seconds),
        *_speculation(outputs),
        ("peak memory", format_bytes(peak_memory())),
    ]
    return "\n".join([*(f"{name:<12} {value}" for name, value in rows), plan.table()])


def _rates(outputs: Sequence[RequestOutput], new_tokens: int, run_seconds: float) -> list[tuple[str, str]]:
    waits = [o.timing.time_to_first_token for o in outputs if o.timing.time_to_first_token is not None]
    if not waits:
        return []
    if len(outputs) > 1:
        mean = sum(waits) / len(waits)
        return [
            ("first token", f"after {mean:.3f} s on average, {max(waits):.3f} s at most"),
            ("together", f"{new_tokens / run_seconds:.1f} tokens/s"),
        ]
    usage, timing = outputs[0].usage, outputs[0].timing
    rates = [("first token", f"after {waits[0]:.3f} s")]
    prefill_seconds = waits[0] - (timing.queued or 0.0)
    if prefill_seconds > 0:
        rates.append(("prefill", f"{(usage.prompt_tokens - usage.cached_tokens) / prefill_seconds:.1f} tokens/s"))
    decode_seconds = timing.total - waits[0]
    decoded = usage.completion_tokens - len(outputs[0].outputs)
    if decode_seconds > 0 and decoded > 0:
        rates.append(("decode", f"{decoded / decode_seconds:.1f} tokens/s"))
    return rates


def _speculation(outputs: Sequence[RequestOutput]) -> list[tuple[str, str]]:
    """What became of drafts; steps without any, such as prefills, only count among the steps."""
    every = [(one, one.speculative) for output in outputs for one in output.outputs if one.speculative is not None]
    if not every:
        return []
    steps = [step for _, own in every for step in own]
    verified = [step for step in steps if step.num_drafts]
    proposed, accepted = sum(step.num_drafts for step in verified), sum(step.num_accepted for step in verified)
    tokens = sum(len(one.token_ids) for one, _ in every)
    rows = [("drafts", f"{proposed} proposed, {accepted} accepted")]
    if verified:
        most = max(step.num_drafts for step in verified)
        places = [sum(step.num_accepted > place for step in verified) / len(verified) for place in range(most)]
        share = f"{accepted / len(verified):.2f} a step that had drafts"
        rows.append(("accepted", f"{share}; by position {', '.join(f'{100 * place:.0f} %' for place in places)}"))
    return [*rows, ("steps", f"{len(steps)}, {tokens / len(steps):.2f} tokens each")]
