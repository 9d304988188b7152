"""Decode steps of GLM-5.2 on one GPU, plain and with its draft, each beside its bound, the aim, the peer and the floor.

    python benchmarks/glm.py [--seconds 600] [--only b1,mtp-b1] [--output FILE] [--profile DIR]

The shape is the cut to 6 layers, with random weights and forced routing; a prompt has 4,096 tokens. Plain runs have an
engine without the draft, so that they take what a user without speculation gets. Runs that differ in speculation or in
routing differ in what their graphs hold: each such group loads its weights anew, in one process, one after the other.
Speculative runs verify 3 drafts a request and step, of which a fixed share is accepted, whatever they are.

    tpot           (time for all tokens - time for one token) / (output tokens - 1), every request starting together
    step           a decode step in which all requests run; its floor reckons with the experts that are expected
    step_counted   the same beside the floor with the experts that were counted
    step_tokens    tokens a step
    step_drafts    drafts verified a step and request; step_accepted: those of them that were accepted
    step_tpot      ms of a step for each token that a request gets in it
    host           median microseconds of a step but for the waiting; all of it where a step is not launched ahead

Peer: vLLM 0.22.0 on one H200, of whose routing nothing is known but that it reads fewer experts at 32 requests; a
figure of it stands where they can hardly differ. Must: what this engine promises. Aim: about 90 % of the floor.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu import HEADER, LEFT_OUT, WIDTHS, Target, describe, line, recover, row_line, rows, write
from host import Stopwatch

from hookline.benchmark.experts import count_experts
from hookline.benchmark.figures import acceptance_note, expert_figures, latency_figures, step_figures
from hookline.benchmark.measure import Choice, measure_latency
from hookline.benchmark.report import Figure, Report
from hookline.benchmark.setup import Bench, Subject, early_limits, make_bench
from hookline.benchmark.shapes import find_shape, read_config_file
from hookline.benchmark.step_profile import profile_decode
from hookline.benchmark.workload import Lengths
from hookline.config import EngineConfig, PluginOptions, SpeculativeConfig, parse_bytes
from hookline.engine import Engine
from hookline.errors import HooklineError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import RequestOutput

SCHEMA = "hookline.glm-benchmark/1"
SHAPE = "glm-5.2-6l"
DRAFTS = 3
GREEDY = Choice()
# Seconds to load the weights and capture graphs, for which there must be time.
LOADING = 60


@dataclass(frozen=True, slots=True)
class Run:
    """One measure of requests that start together.

    Attributes:
        drafts: that a step verifies of each request; 0 without speculation.
        routing: see `EngineConfig.expert_routing`.
        must, aim, peer: milliseconds of the first figure; None where there is no such number.
    """

    name: str
    batch: int
    drafts: int
    routing: str
    must: float | None = None
    aim: float | None = None
    peer: float | None = None

    @property
    def group(self) -> tuple[int, str]:
        """Runs in which it is the same have one engine."""
        return self.drafts, self.routing

    @property
    def targets(self) -> tuple[Target, ...]:
        """Every figure that is shown, the one that is promised first."""
        names = ("step", "step_counted", "step_tokens", "step_drafts", "step_accepted", "step_tpot", "host")
        if not self.drafts:
            names = ("tpot", "step", "step_counted", "host")
        return Target(names[0], self.peer, self.must, self.aim), *(Target(each, None, None, None) for each in names[1:])


RUNS = (
    Run("b1", 1, 0, "uniform", must=2.8, aim=2.3, peer=2.81),
    Run("b32", 32, 0, "uniform", must=13.9),
    Run("mtp-b1", 1, DRAFTS, "uniform", must=8.1, aim=7.2, peer=8.10),
    Run("mtp-b32", 32, DRAFTS, "uniform", must=37.0),
    Run("mtp-b1-corr", 1, DRAFTS, "correlated", must=5.6, aim=4.8),
)


class Watched:
    """An engine of which every step is timed, but for the waiting."""

    def __init__(self, engine: Engine, watch: Stopwatch) -> None:
        self.engine = engine
        self.watch = watch
        self.host: list[float] = []  # microseconds

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add_request(self, prompt: list[int], params: SamplingParams, /, *, stream: bool = False) -> str:
        return self.engine.add_request(prompt, params, stream=stream)

    def abort(self, request_id: str, /) -> bool:
        return self.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        seconds = self.watch.seconds
        waited, begin = seconds["wait"], time.perf_counter()
        outputs = self.engine.step()
        self.host.append(1e6 * (time.perf_counter() - begin - (seconds["wait"] - waited)))
        return outputs


def measure(bench: Bench, watch: Stopwatch, run: Run, length: Lengths, repeats: int) -> Report:
    """Runs one measure. Raises what the engine raises."""
    engine, costs, limits = bench.engine, bench.costs, bench.limits
    bench.check_fits([length])
    workload: dict[str, Any] = {
        "batch": run.batch,
        "input_len": length.prompt,
        "repeats": repeats,
        "drafts": run.drafts,
    }
    figures, notes = list[Figure](), list[str]()
    if not run.drafts:
        found = measure_latency(engine, engine.vocab_size, run.batch, length, repeats, GREEDY)
        figures += latency_figures(found, length.prompt, costs, limits)
        workload["output_len"] = length.output
    server = Watched(engine, watch)
    steps = bench.time_steps(run.batch, length.prompt, repeats, GREEDY, server)
    experts = count_experts(engine, run.batch, length)
    figures += step_figures(steps, costs, limits, experts, run.routing)
    figures += [Figure("host", median(server.host), "us"), *expert_figures(experts)]
    if experts is not None:
        notes.append(experts.line(run.routing, costs))
    if engine.config.speculative is not None:
        notes.append(acceptance_note(engine.config.speculative))
        workload["synthetic_acceptance_rate"] = engine.config.speculative.synthetic_acceptance_rate
    return bench.report("steps", workload, figures, notes)


def run_group(bench: Bench, runs: Sequence[Run], options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Every run that one engine serves: prints its lines, and keeps the record and its file up to date."""
    watch = Stopwatch(bench.engine)
    for run in runs:
        if time.monotonic() > options.until:
            fail(record, run, LEFT_OUT)
            continue
        try:
            report = measure(bench, watch, run, options.length, options.repeats)
            record["reports"][run.name] = report.to_dict()
            for row in rows(run, report):
                record["rows"].append(row)
                print(row_line(row), flush=True)
            print("\n".join(f"    {note}" for note in report.notes), flush=True)
            if options.profile is not None:
                options.profile.mkdir(parents=True, exist_ok=True)
                file = options.profile / f"{run.name}.json"
                steps = profile_decode(bench.engine, run.batch, options.length, GREEDY, 8, file)
                record["reports"][run.name]["profile"] = steps.to_dict()
                print("\n".join(f"    {text}" for text in steps.lines()), flush=True)
        except Exception as error:
            fail(record, run, describe(error))
            recover(bench.engine)
        write(record, options.output)


def fail(record: dict[str, Any], run: Run, reason: str) -> None:
    """Takes note of a run without a result."""
    record["failed"][run.name] = reason
    print(f"{run.name:<{WIDTHS[0]}}  {reason if reason == LEFT_OUT else f'FAILED: {reason}'}", flush=True)


def groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs that share an engine; they stand beside each other."""
    for _, own in itertools.groupby(runs, key=lambda run: run.group):
        yield list(own)


def serve(subject: Subject, runs: Sequence[Run], options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Loads what these runs need, and runs them."""
    start, (drafts, routing) = time.monotonic(), runs[0].group
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            num_speculative_tokens=drafts, synthetic_acceptance_rate=options.acceptance_rate
        )
    fields = ("dtype", "device", "max_batch_tokens", "max_model_len", "kv_cache_memory")
    config = EngineConfig(
        subject.name,
        load_format="random",
        prefix_caching=False,
        max_running=max(run.batch for run in runs),
        expert_routing=routing,  # type: ignore[arg-type]
        speculative=speculative,
        **{name: getattr(options, name) for name in fields},
    )
    limits = early_limits(config, options.measure_roofline)
    with Engine(config, reader=subject.reader()) as engine:
        print(f"{routing}, {drafts} drafts: loaded in {time.monotonic() - start:.1f} s", flush=True)
        run_group(make_bench(subject, engine, limits), runs, options, record)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked as far as argparse can."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="by default all")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="no run begins later, and no loading shortly before"
    )
    parser.add_argument("--repeats", type=int, default=2, help="timings, of which the best counts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows there as JSON, after each run")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace decode steps of each run into DIR too")
    parser.add_argument("--acceptance-rate", type=float, default=0.6, help="share of the drafts that are accepted")
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--output-len", type=int, default=64, help="of the runs without drafts")
    parser.add_argument("--most", type=int, metavar="COUNT", help="requests at most, to try the script")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json in place of the shape")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-memory", type=parse_bytes, metavar="SIZE")
    parser.add_argument("--measure-roofline", action="store_true", help="in place of what is known of the GPU")
    options = parser.parse_args(arguments)
    names = [run.name for run in RUNS]
    only = options.only.split(",") if options.only else names
    if unknown := set(only) - set(names):
        parser.error(f"--only names {', '.join(sorted(unknown))}; runs are {', '.join(names)}")
    if options.most is not None and options.most < 1:
        parser.error(f"--most is {options.most}; give a whole number of at least 1")
    is_known = options.config is None and options.shape == SHAPE and options.most is None
    most = options.most or max(run.batch for run in RUNS)
    options.runs = [
        run if is_known else Run(run.name, min(most, run.batch), *run.group) for run in RUNS if run.name in only
    ]
    options.length = Lengths(options.input_len, options.output_len)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Loads once a group and runs all; 1 if a run failed."""
    options = parse(arguments)
    options.until = time.monotonic() + options.seconds
    record: dict[str, Any] = {"schema": SCHEMA, "rows": [], "failed": {}, "reports": {}}
    try:
        if options.config is None:
            subject = Subject(options.shape, "shape", find_shape(options.shape, PluginOptions()))
        else:
            subject = Subject(str(options.config), "config", read_config_file(options.config))
    except HooklineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(line(HEADER), flush=True)
    for number, own in enumerate(groups(options.runs)):
        try:
            if number and time.monotonic() + LOADING > options.until:
                raise HooklineError(LEFT_OUT)
            serve(subject, own, options, record)
        except Exception as error:
            for run in own:
                fail(record, run, describe(error))
        # The next engine needs the memory: what refers to this one in a circle is gone after that.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    write(record, options.output)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
