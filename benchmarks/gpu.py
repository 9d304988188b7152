"""Decode, prefill and throughput on one GPU, each beside the best peer's figure, what must be and what is aimed at.

    python benchmarks/gpu.py [--seconds 600] [--only b1,b32] [--json FILE] [--profile DIR]

One engine with random weights of a reference shape serves every run, prefix caching off. A line comes as each figure is
there, and FILE is written again after each run. A run that fails is reported, and the others go on; one that would
not end within `--seconds` is left out. The exit code is 1 if a run failed.

Peer: vLLM 0.22.0 on one H200, torch 2.11, CUDA graphs and torch.compile, greedy, the same shape and token budget.
Must: what this engine promises. Aim: about 90 % of what the hardware allows, which no peer reaches throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.benchmark.figures import concurrent_requests, latency_figures, throughput_figures
from hookline.benchmark.measure import Choice, measure_latency, measure_throughput
from hookline.benchmark.report import Report, number, percent
from hookline.benchmark.setup import Bench, Subject, early_limits, make_bench
from hookline.benchmark.shapes import find_shape, read_config_file
from hookline.benchmark.step_profile import profile_decode
from hookline.benchmark.workload import Lengths, fixed_lengths, lognormal_lengths
from hookline.config import EngineConfig, PluginOptions, parse_bytes
from hookline.engine import Engine
from hookline.errors import HooklineError

GREEDY = Choice()
SCHEMA = "hookline.gpu-benchmark/1"
LEFT_OUT = "left out: it would not end in time"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure of a run, in the figure's unit; None where there is no such number."""

    figure: str
    peer: float | None
    must: float | None
    aim: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One measure.

    Attributes:
        count: requests: of the batch that starts together, or of the whole workload.
        length: of each request; None draws lognormal lengths.
        together: whether it is a latency; else it is a throughput.
        seconds: what the peer would take for it, from above.
        divisor: lengths are divided by it, to try the script.
    """

    name: str
    count: int
    length: Lengths | None
    together: bool
    seconds: float
    targets: tuple[Target, ...]
    choice: Choice = GREEDY
    divisor: int = 1

    def divided(self, by: int) -> Run:
        """The same, smaller."""
        return dataclasses.replace(self, count=max(2, self.count // by), seconds=0.0, divisor=by)

    def without_targets(self) -> Run:
        """The same for a shape whose figures nobody knows."""
        return dataclasses.replace(self, targets=tuple(Target(t.figure, None, None, None) for t in self.targets))

    def work(self) -> list[Lengths]:
        """The lengths of every request."""
        count, length = self.count, self.length
        drawn = lognormal_lengths(count) if length is None else fixed_lengths(count, length.prompt, length.output)
        return [Lengths(max(2, one.prompt // self.divisor), max(4, one.output // self.divisor)) for one in drawn]


SHORT, LONG = Lengths(1024, 128), Lengths(8192, 64)
LLAMA = (
    Run("b1", 1, SHORT, True, 3, (Target("tpot", 4.81, 4.6, 4.0),)),
    Run("b32", 32, SHORT, True, 8, (Target("tpot", 6.27, 6.0, 5.4), Target("prefill_batch", 0.762, 0.8, 0.65))),
    Run("b128", 128, SHORT, True, 20, (Target("tpot", 11.0, 10.6, 9.3),)),
    Run("b256", 256, SHORT, True, 40, (Target("tpot", 18.1, 17.6, 15.0),)),
    Run("b1-8k", 1, LONG, True, 3, (Target("tpot", 5.13, 4.9, 4.3), Target("prefill_batch", 0.207, 0.22, 0.18))),
    Run(
        *("sampled-b256", 256, SHORT, True, 40, (Target("tpot", None, None, None),)),
        choice=Choice(temperature=0.8, top_p=0.95),
    ),
    Run(
        "chat",
        2000,
        None,
        False,
        40,
        (Target("request_rate", 59.5, 62.0, 78.0), Target("output_rate", 10813, 10813, None)),
    ),
    Run("offline", 1000, Lengths(1000, 1000), False, 120, (Target("output_rate", 9738, 9800, 10500),)),
)
MIXTRAL = (
    Run("b1", 1, SHORT, True, 3, (Target("tpot", 7.93, 7.9, 6.6), Target("prefill_batch", 0.061, None, None))),
    Run("b32", 32, SHORT, True, 10, (Target("tpot", 25.0, 25.0, 24.0), Target("prefill_batch", 1.61, 1.6, None))),
    Run("b128", 128, SHORT, True, 30, (Target("tpot", 29.4, 29.4, 27.5), Target("prefill_batch", 6.46, None, None))),
)
# What is measured of a shape; of one that is not here, the first, without its targets.
RUNS = {"llama-8b": LLAMA, "mixtral-8x7b": MIXTRAL}
HEADER = ("run", "figure", "value", "unit", "peer", "must", "aim", "floor", "% of floor", "")
WIDTHS = (13, 14, 9, 11, 8, 8, 8, 9, 10, 0)


def measure(bench: Bench, run: Run, repeats: int) -> Report:
    """Runs one measure. Raises what the engine raises."""
    engine, work = bench.engine, run.work()
    bench.check_fits(work)
    workload: dict[str, Any] = {"temperature": run.choice.temperature, "top_p": run.choice.top_p}
    if run.together:
        length = work[0]
        found = measure_latency(engine, engine.vocab_size, len(work), length, repeats, run.choice)
        workload |= {"batch": len(work), "input_len": length.prompt, "output_len": length.output, "repeats": repeats}
        figures = latency_figures(found, length.prompt, bench.costs, bench.limits)
        return bench.report("latency", workload, figures)
    result = measure_throughput(engine, engine.vocab_size, work, run.choice)
    workload |= {"requests": len(work), "lengths": "lognormal" if run.length is None else "fixed"}
    running = concurrent_requests(work, engine.config.max_running, bench.cache_tokens)
    figures = throughput_figures(result, work, running, bench.costs, bench.limits)
    return bench.report("throughput", workload, figures)


def rows(run: Run, report: Report) -> Iterator[dict[str, Any]]:
    """One row for each target: the figure and what it is compared with."""
    figures = {figure.name: figure for figure in report.figures}
    for target in run.targets:
        figure = figures[target.figure]

        def reaches(wanted: float | None, value: float = figure.value, rate: bool = figure.is_rate) -> bool | None:
            if wanted is None or value <= 0:  # less than the clock's noise is no result
                return None
            return value >= wanted if rate else value <= wanted

        yield {
            "run": run.name,
            "figure": figure.name,
            **figure.to_dict(),
            "peer": target.peer,
            "must": target.must,
            "aim": target.aim,
            "reaches_must": reaches(target.must),
            "reaches_aim": reaches(target.aim),
        }


def line(cells: Sequence[str]) -> str:
    """One line of the table, whose columns are known before the rows are."""
    left = [f"{cell:<{width}}" for cell, width in zip(cells[:2], WIDTHS[:2], strict=True)]
    right = [f"{cell:>{width}}" for cell, width in zip(cells[2:], WIDTHS[2:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def row_line(row: dict[str, Any]) -> str:
    """A row of `rows` as a line."""
    verdict = "aim" if row["reaches_aim"] else {True: "must", False: "MISSED", None: ""}[row["reaches_must"]]
    numbers = [number(row[name]) for name in ("peer", "must", "aim", "floor")]
    return line(
        [
            *(row["run"], row["figure"], number(row["value"]), row["unit"], *numbers),
            *(percent(row["percent_of_floor"]), verdict),
        ]
    )


def recover(engine: Engine) -> None:
    """Leaves an engine empty after a failure, as far as it can be."""
    try:
        engine.abort_all()
        while engine.has_work:
            engine.step()
    except Exception as error:
        print(f"  the engine does not recover: {describe(error)}", flush=True)


def describe(error: Exception) -> str:
    """What went wrong, in one line."""
    text = error.message if isinstance(error, HooklineError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def run_all(bench: Bench, runs: Sequence[Run], options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Every run in turn: prints its lines, and keeps the record and its file up to date."""
    record: dict[str, Any] = {"schema": SCHEMA, "rows": [], "failed": {}, "reports": {}}
    print(line(HEADER), flush=True)
    for run in runs:
        write(record, options.json)
        if time.monotonic() + run.seconds > until:
            record["failed"][run.name] = LEFT_OUT
            print(f"{run.name:<{WIDTHS[0]}}  {LEFT_OUT}", flush=True)
            continue
        try:
            report = measure(bench, run, options.repeats)
            record["reports"][run.name] = report.to_dict()
            for row in rows(run, report):
                record["rows"].append(row)
                print(row_line(row), flush=True)
            if options.profile and run.together:
                options.profile.mkdir(parents=True, exist_ok=True)
                file = options.profile / f"{run.name}.json"
                steps = profile_decode(bench.engine, run.count, run.work()[0], run.choice, 8, file)
                record["reports"][run.name]["profile"] = steps.to_dict()
                print("\n".join(f"    {text}" for text in steps.lines()), flush=True)
        except Exception as error:
            record["failed"][run.name] = describe(error)
            print(f"{run.name:<{WIDTHS[0]}}  FAILED: {describe(error)}", flush=True)
            recover(bench.engine)
    write(record, options.json)
    return record


def write(record: dict[str, Any], file: Path | None) -> None:
    """The record so far, where a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1, default=str) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked as far as argparse can."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="by default all that the shape has")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all, loading included")
    parser.add_argument("--repeats", type=int, default=2, help="runs of a latency, of which the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace decode steps of each latency into DIR too")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json in place of the shape")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-memory", type=parse_bytes, metavar="SIZE")
    parser.add_argument("--measure-roofline", action="store_true", help="in place of what is known of the GPU")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="counts and lengths, to try the script")
    options = parser.parse_args(arguments)
    known = RUNS.get(options.shape) if options.config is None else None
    runs = known or tuple(run.without_targets() for run in LLAMA)
    names = [run.name for run in runs]
    only = options.only.split(",") if options.only else names
    if unknown := set(only) - set(names):
        parser.error(f"--only names {', '.join(sorted(unknown))}; runs are {', '.join(names)}")
    options.runs = [run.divided(options.divide) if options.divide > 1 else run for run in runs if run.name in only]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Loads once and runs all; 1 if a run failed."""
    options = parse(arguments)
    start = time.monotonic()
    fields = ("dtype", "device", "max_running", "max_batch_tokens", "max_model_len", "kv_cache_memory")
    settings = {name: getattr(options, name) for name in fields}
    try:
        if options.config is None:
            subject = Subject(options.shape, "shape", find_shape(options.shape, PluginOptions()))
        else:
            subject = Subject(str(options.config), "config", read_config_file(options.config))
        config = EngineConfig(subject.name, load_format="random", prefix_caching=False, **settings)
        limits = early_limits(config, options.measure_roofline)
        with Engine(config, reader=subject.reader()) as engine:
            bench = make_bench(subject, engine, limits)
            print(f"loaded in {time.monotonic() - start:.1f} s\n{engine.memory_plan.table()}\n", flush=True)
            record = run_all(bench, options.runs, options, start + options.seconds)
    except HooklineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
