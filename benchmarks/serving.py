"""What serving over HTTP costs: tokens a second and time to the first token, beside the engine's own in the same run.

    python benchmarks/serving.py [MODEL] [--streams 64] [--requests 192] [--output 64] [--json FILE]

The same requests (random token ids, greedy, exact lengths) go through `Engine.generate` in a process of its own, with
the environment that a server gives its engine, and then, as that many concurrent streams, through a real `engine serve`
on a free port, turn by turn. The client runs on the same machine, in this process, and its processor time is reported:
on two cores it competes with what it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hookline.benchmark.http_load import Target, send_load
from hookline.benchmark.machine import describe_machine
from hookline.benchmark.measure import Choice
from hookline.benchmark.workload import Lengths, make_prompts
from hookline.config import engine_environment

ROOT = Path(__file__).parent.parent
_READY = re.compile(r"Serving on http://([\d.]+):(\d+)")


def main() -> None:
    arguments = _arguments()
    work = [Lengths(arguments.prompt, arguments.output)] * arguments.requests
    single = [Lengths(arguments.prompt, 8)] * arguments.singles
    engine, served = list[dict[str, float]](), list[dict[str, float]]()
    for turn in range(arguments.turns):
        engine.append(_ask_engine(arguments, turn))
        served.append(_ask_server(arguments, work, single, turn))
        print(f"turn {turn + 1}: engine {engine[-1]}, served {served[-1]}", file=sys.stderr)
    rates = [s["tokens_per_second"] / e["tokens_per_second"] for s, e in zip(served, engine, strict=True)]
    beyond = [s["ttft_ms"] - e["ttft_ms"] for s, e in zip(served, engine, strict=True)]
    report = {
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "model": Path(arguments.model).name,
        "streams": arguments.streams,
        "requests": arguments.requests,
        "prompt": arguments.prompt,
        "output": arguments.output,
        "engine": engine,
        "served": served,
        "rate_ratio": round(median(rates), 3),
        "ttft_beyond_engine_ms": round(median(beyond), 2),
    }
    print(f"served / engine tokens a second: {report['rate_ratio']:.2f} (the bound is 0.70)")
    print(f"time to the first token beyond the engine's: {report['ttft_beyond_engine_ms']:.1f} ms (the bound is 15)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests" / "data" / "tiny-glm5.2-mtp"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--singles", type=int, default=20, help="requests, one after the other, for the first token")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--load-format", default="auto", help="`random` for a folder with a config alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine-alone", type=int, metavar="TURN", help=argparse.SUPPRESS)
    return parser.parse_args()


def _ask_engine(arguments: argparse.Namespace, turn: int) -> dict[str, float]:
    """The engine's own figures, from a process that ends before the server starts."""
    names = ("streams", "requests", "prompt", "output", "singles", "load_format")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    command = [sys.executable, __file__, arguments.model, *options, "--engine-alone", str(turn)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=engine_environment())
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_engine(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of `generate`, and the median time to the first token of one request alone, in ms."""
    from hookline import Engine, EngineConfig

    options = {"max_running": arguments.streams, "load_format": arguments.load_format}
    engine = Engine(EngineConfig(model=arguments.model, **options))
    choice, turn = Choice(), arguments.engine_alone
    work = [Lengths(arguments.prompt, arguments.output)] * arguments.requests
    prompts = make_prompts(work, engine.vocab_size, 2 * turn)
    engine.generate(prompts[: arguments.streams], choice.params(4))
    start = time.perf_counter()
    engine.generate(prompts, choice.params(arguments.output))
    seconds = time.perf_counter() - start
    firsts = []
    for prompt in make_prompts([Lengths(arguments.prompt, 8)] * arguments.singles, engine.vocab_size, 2 * turn + 1):
        start, stream = time.perf_counter(), engine.stream(prompt, choice.params(8))
        next(stream)
        firsts.append(time.perf_counter() - start)
        for _ in stream:
            continue
    return {
        "tokens_per_second": round(arguments.requests * arguments.output / seconds, 1),
        "ttft_ms": round(1e3 * median(firsts), 2),
    }


def _ask_server(
    arguments: argparse.Namespace, work: Sequence[Lengths], single: Sequence[Lengths], turn: int
) -> dict[str, float]:
    """The same over HTTP."""
    with _server(arguments) as (target, vocab_size):
        send_load(
            target, work[: arguments.streams], Choice(), vocab_size=vocab_size, concurrency=arguments.streams, seed=99
        )
        start = time.perf_counter()
        outcome = send_load(target, work, Choice(), vocab_size=vocab_size, concurrency=arguments.streams, seed=2 * turn)
        seconds = time.perf_counter() - start
        alone = send_load(target, single, Choice(), vocab_size=vocab_size, concurrency=1, seed=2 * turn + 1)
    if outcome.failures or alone.failures:
        raise SystemExit(f"requests failed: {outcome.failures + alone.failures}")
    return {
        "tokens_per_second": round(sum(trace.tokens for trace in outcome.traces) / seconds, 1),
        "ttft_ms": round(1e3 * median(trace.ttft for trace in alone.traces), 2),
        "tokens_per_chunk": round(sum(trace.tokens for trace in outcome.traces) / outcome.chunks, 2),
        "client_us_per_chunk": round(outcome.client_us_per_chunk, 1),
    }


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[Target, int]]:
    """`engine serve` on a free port, until it is left; gives the target and the vocabulary's width."""
    model = arguments.model
    command = [str(Path(sys.executable).with_name("engine")), "serve", model, "--port", "0"]
    command += ["--max-running", str(arguments.streams), "--load-format", arguments.load_format]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        name, vocab_size = Path(model).name, _vocab_size(model)
        if process.stderr is None:
            raise SystemExit("the server's stderr is not there")
        said = list[str]()
        for line in process.stderr:
            said.append(line)
            found = _READY.search(line)
            if found is not None:
                break
        else:
            raise SystemExit(f"{''.join(said)}the server did not start: exit code {process.wait()}")
        yield Target(found[1], int(found[2]), "", name), vocab_size
    finally:
        process.terminate()
        process.wait()


def _vocab_size(model: str) -> int:
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


if __name__ == "__main__":
    if "--engine-alone" in sys.argv:
        print(json.dumps(measure_engine(_arguments())))
    else:
        main()
