"""What serving over HTTP costs: tokens a second and time to the first token, beside the engine's own in the same run.

    python benchmarks/serving.py [MODEL] [--streams 64] [--requests 64] [--output 64] [--json FILE]

The same requests (random token ids, greedy, exact lengths) go through `Engine.generate` in a process of its own and,
as that many concurrent streams, through a real `engine serve` on a free port. Both are up all the time, one idle while
the other works: turn by turn for the rate, request by request for the first token, so that a machine whose speed
changes slows both alike. The client runs on the same machine, in this process, and its processor time is reported: on
two cores it competes with what it measures.
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
from typing import Any, Protocol

import torch

from hookline.benchmark.http_load import Outcome, Target, send_load
from hookline.benchmark.machine import describe_machine
from hookline.benchmark.measure import Choice
from hookline.benchmark.workload import Lengths, make_prompts

ROOT = Path(__file__).parent.parent
# Tokens of a request that is sent alone.
_SINGLE = 8
_READY = re.compile(r"Serving on http://([\d.]+):(\d+)")


def main() -> None:
    arguments = _arguments()
    work = [Lengths(arguments.prompt, arguments.output)] * arguments.requests
    engine, served = list[float](), list[float]()
    with _engine(arguments) as alone, _server(arguments) as client:
        ways = (alone, client)
        for way in ways:  # what is made at the first use is made now
            way.rate(work[: arguments.streams], seed=-1)
        for turn in range(arguments.turns):
            rates = {way: way.rate(work, seed=turn) for way in (ways if turn % 2 else ways[::-1])}
            engine.append(round(rates[alone], 1))
            served.append(round(rates[client], 1))
            print(f"turn {turn + 1}: engine {engine[-1]:.1f}, served {served[-1]:.1f} tokens/s", file=sys.stderr)
        firsts = [[way.first_ms(arguments.prompt, 1000 + seed) for way in ways] for seed in range(arguments.singles)]
        chunks = client.chunk_figures()
    report = {
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "model": Path(arguments.model).name,
        "streams": arguments.streams,
        "requests": arguments.requests,
        "prompt": arguments.prompt,
        "output": arguments.output,
        "engine_tokens_per_second": engine,
        "served_tokens_per_second": served,
        **chunks,
        "engine_ttft_ms": round(median(first for first, _ in firsts), 2),
        "served_ttft_ms": round(median(first for _, first in firsts), 2),
        "rate_ratio": round(median(s / e for s, e in zip(served, engine, strict=True)), 3),
        "ttft_beyond_engine_ms": round(median(there - here for here, there in firsts), 2),
    }
    print(f"served / engine tokens a second: {report['rate_ratio']:.2f} (the bound is 0.70)")
    print(f"time to the first token: {report['engine_ttft_ms']:.1f} ms, served {report['served_ttft_ms']:.1f} ms;")
    print(f"beyond the engine's, pair by pair: {report['ttft_beyond_engine_ms']:.1f} ms (the bound is 15)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests" / "data" / "tiny-glm5.2-mtp"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--singles", type=int, default=100, help="requests, one after the other, for the first token")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--load-format", default="auto", help="`random` for a folder with a config alone")
    parser.add_argument("--memory", default="45%" if torch.cuda.is_available() else None, help="for each of the two")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine-alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Way(Protocol):
    """Either of the two that are measured."""

    def rate(self, work: Sequence[Lengths], seed: int) -> float:
        """Tokens a second of `work`."""

    def first_ms(self, prompt: int, seed: int) -> float:
        """Milliseconds to the first token of one request alone, of so many tokens."""


class EngineAlone:
    """An engine in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from hookline import Engine, EngineConfig

        names = {"load_format": arguments.load_format, "memory": arguments.memory}
        options = {"max_running": arguments.streams, **{name: value for name, value in names.items() if value}}
        self._engine = Engine(EngineConfig(model=arguments.model, **options))

    def rate(self, work: Sequence[Lengths], seed: int) -> float:
        prompts = make_prompts(work, self._engine.vocab_size, seed)
        start = time.perf_counter()
        self._engine.generate(prompts, [Choice().params(lengths.output) for lengths in work])
        return sum(lengths.output for lengths in work) / (time.perf_counter() - start)

    def first_ms(self, prompt: int, seed: int) -> float:
        (token_ids,) = make_prompts([Lengths(prompt, _SINGLE)], self._engine.vocab_size, seed)
        start = time.perf_counter()
        stream = self._engine.stream(token_ids, Choice().params(_SINGLE))
        next(stream)
        seconds = time.perf_counter() - start
        for _ in stream:
            continue
        return 1e3 * seconds


def serve_lines(way: Way) -> None:
    """Measures what each line on standard input asks for, until it ends."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "rate":
            arguments["work"] = [Lengths(*lengths) for lengths in arguments["work"]]
        print(json.dumps(getattr(way, name)(**arguments)), flush=True)


class Asked:
    """The engine in a process of its own, asked by lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, work: Sequence[Lengths], seed: int) -> float:
        return self._ask("rate", work=[(lengths.prompt, lengths.output) for lengths in work], seed=seed)

    def first_ms(self, prompt: int, seed: int) -> float:
        return self._ask("first_ms", prompt=prompt, seed=seed)

    def _ask(self, name: str, **arguments: object) -> float:
        if self._process.stdin is None or self._process.stdout is None:
            raise SystemExit("the engine's process has no pipes")
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        found: float = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def _engine(arguments: argparse.Namespace) -> Iterator[Asked]:
    """The engine's process, until it is left."""
    command = [sys.executable, __file__, arguments.model, "--engine-alone", "--streams", str(arguments.streams)]
    command += _options(arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Asked(process)
        finally:
            process.kill()


def _options(arguments: argparse.Namespace) -> list[str]:
    memory = [] if arguments.memory is None else ["--memory", arguments.memory]
    return ["--load-format", arguments.load_format, *memory]


class Client:
    """A server, by HTTP."""

    def __init__(self, target: Target, vocab_size: int, streams: int) -> None:
        self._target = target
        self._streams = streams
        self._vocab_size = vocab_size
        self._tokens = self._chunks = 0
        self._seconds = 0.0

    def rate(self, work: Sequence[Lengths], seed: int) -> float:
        start = time.perf_counter()
        outcome = self._send(work, seed)
        seconds = time.perf_counter() - start
        tokens = sum(trace.tokens for trace in outcome.traces)
        self._tokens += tokens
        self._chunks += outcome.chunks
        self._seconds += outcome.client_seconds
        return tokens / seconds

    def first_ms(self, prompt: int, seed: int) -> float:
        return 1e3 * self._send([Lengths(prompt, _SINGLE)], seed).traces[0].ttft

    def _send(self, work: Sequence[Lengths], seed: int) -> Outcome:
        outcome = send_load(
            self._target, work, Choice(), vocab_size=self._vocab_size, concurrency=self._streams, seed=seed
        )
        if outcome.failures:
            raise SystemExit(f"requests failed: {outcome.failures}")
        return outcome

    def chunk_figures(self) -> dict[str, float]:
        """Of all rates: tokens a chunk, and what a chunk costs this client."""
        return {
            "tokens_per_chunk": round(self._tokens / self._chunks, 2),
            "client_us_per_chunk": round(1e6 * self._seconds / self._chunks, 1),
        }


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Client]:
    """`engine serve` on a free port, until it is left."""
    model = arguments.model
    command = [str(Path(sys.executable).with_name("engine")), "serve", model, "--port", "0"]
    command += ["--max-running", str(arguments.streams), *_options(arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
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
        yield Client(Target(found[1], int(found[2]), "", Path(model).name), _vocab_size(model), arguments.streams)
    finally:
        process.terminate()
        process.wait()


def _vocab_size(model: str) -> int:
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


if __name__ == "__main__":
    if "--engine-alone" in sys.argv:
        serve_lines(EngineAlone(_arguments()))
    else:
        main()
