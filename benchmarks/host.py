"""Host time of a decode step by verb, with almost nothing for the device to do: what the loop itself costs.

    python benchmarks/host.py [--running 1,32,128,256] [--modes ids,text,stream] [--device auto] [--output FILE]

On a GPU a one-layer model of 128 dimensions runs in CUDA graphs, and the time for which the host waits for it stands
in a column of its own, which `host` leaves out. On a CPU, whose steps the host would have to compute, the model does
nothing and a decode step answers what the first one of its size did. Requests have prompts of 100 to 200 tokens and all
decode. Microseconds a step, of the best of the rounds:

    schedule  which requests run            launch   the step's rows, its graph, its answer's way back
    wait      for the device                collect  its answer as numbers
    update    tokens into their requests    output   text, stop strings, reports, and the rest of `Engine.step`

Modes: `ids` makes no text; `text` does at each token, since every request has a stop string; `stream` reports every
request at each token. `median` and `p99` are of the host's steps of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hookline.benchmark.machine import describe_machine, describe_versions
from hookline.checkpoint.random import RandomReader
from hookline.checkpoint.reader import TokenizerSource
from hookline.config import EngineConfig
from hookline.engine import Engine
from hookline.output_processor import OutputProcessor
from hookline.sampling_params import SamplingParams

SCHEMA = "hookline.host/1"
VOCAB = 1024
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
PROMPTS = (100, 200)
SETTLING_STEPS = 20
VERBS = ("schedule", "launch", "wait", "collect", "update", "output")
COLUMNS = ("host", *VERBS, "median", "p99")
MODES = ("ids", "text", "stream")


def word_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose tokens are the 256 bytes and words of three letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnop"
    words = ["Ġ" + a + b + c for a in letters for b in letters for c in letters[:3]]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words][:VOCAB])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def start(device: str, most: int, steps: int) -> Engine:
    """An engine that serves `most` requests for so many steps, and whose device has next to nothing to do."""
    config = EngineConfig(
        "host",
        device=device,
        load_format="random",
        overlap=True,
        max_running=most,
        max_model_len=PROMPTS[1] + steps + 64,
        max_batch_tokens=8192,
        kv_cache_memory=(most + 1) * (PROMPTS[1] + steps + 128) * 1024,
    )
    engine = Engine(config, reader=RandomReader(SHAPE, tokenizer=TokenizerSource(tokenizer=word_tokenizer())))
    if engine.loaded.opened.model.device.type == "cpu":
        _stand_in(engine, most)
    return engine


def _stand_in(engine: Engine, most: int) -> None:
    """Puts fixed answers in the place of a CPU's steps."""
    model: Any = engine.loaded.opened.model
    hidden = torch.zeros(most, int(model.shapes.hidden_size))
    logits = torch.randn(most, VOCAB, generator=torch.Generator().manual_seed(0))
    model.forward = lambda batch: hidden[: len(batch.logits_rows)]
    model.compute_logits = lambda rows: logits[: len(rows)]
    runner: Any = engine._runner
    decode = runner.decode
    run, answers = decode.run, dict[int, Any]()

    def answer(rows: torch.Tensor, *others: Any) -> Any:
        size = rows.shape[1]
        if size not in answers:
            answers[size] = run(rows, *others)
        return answers[size]

    decode.run = answer


class Stopwatch:
    """Adds up the seconds that an engine's verbs take; what is between them is `output`."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = dict.fromkeys(VERBS, 0.0)
        for owner, name, verb in (
            (engine, "_schedule", "schedule"),
            (engine, "_launch", "launch"),
            (engine._runner, "collect", "collect"),
            (engine.scheduler, "update", "update"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), verb))

    def _timed(self, call: Callable[..., Any], verb: str) -> Callable[..., Any]:
        seconds, clock = self.seconds, time.perf_counter

        def timed(*arguments: Any) -> Any:
            begin = clock()
            if verb == "collect":
                arrived = getattr(arguments[0], "arrived", None)
                if arrived is not None:
                    arrived.synchronize()
                    now = clock()
                    seconds["wait"] += now - begin
                    begin = now
            result = call(*arguments)
            seconds[verb] += clock() - begin
            return result

        return timed

    def step(self, engine: Engine) -> dict[str, float]:
        """Microseconds of a step by verb, and of all but the waiting as `host`."""
        self.seconds.update(dict.fromkeys(VERBS, 0.0))
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        found = {verb: 1e6 * self.seconds[verb] for verb in VERBS}
        found["output"] = 1e6 * whole - sum(found.values())
        return found | {"host": 1e6 * whole - found["wait"]}


def measure(engine: Engine, watch: Stopwatch, running: int, mode: str, rounds: int, steps: int) -> dict[str, Any]:
    """Steps of `running` requests: the mean of the best round by verb, and median and 99th percentile of all."""
    engine._outputs = OutputProcessor(None if mode == "ids" else engine.tokenizer)
    rng = random.Random(running)
    stop = ("a text that never comes",) if mode == "text" else ()
    params = SamplingParams(max_tokens=rounds * steps + SETTLING_STEPS + 40, ignore_eos=True, stop=stop)
    for _ in range(running):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPTS))]
        engine.add_request(prompt, params, stream=mode == "stream")
    while engine.scheduler.num_waiting:
        engine.step()
    for _ in range(SETTLING_STEPS):
        engine.step()
    gc.collect()
    gc.freeze()
    found = [[watch.step(engine) for _ in range(steps)] for _ in range(rounds)]
    decoding = engine.scheduler.num_running
    engine.abort_all()
    while engine.has_work:
        engine.step()
    gc.unfreeze()
    if decoding != running:
        raise RuntimeError(f"{decoding} of {running} requests were decoding at the end")
    means = [{name: statistics.fmean(step[name] for step in each) for name in ("host", *VERBS)} for each in found]
    every = sorted(step["host"] for each in found for step in each)
    spread = {"median": statistics.median(every), "p99": every[int(0.99 * len(every))]}
    return {"running": running, "mode": mode, **min(means, key=lambda mean: mean["host"]), **spread}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,32,128,256", metavar="COUNT,...")
    parser.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64, help="of a round")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows there as JSON")
    options = parser.parse_args(arguments)
    options.running = [int(count) for count in options.running.split(",")]
    options.modes = options.modes.split(",")
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"--modes names {', '.join(sorted(unknown))}; modes are {', '.join(MODES)}")
    if min(*options.running, options.rounds, options.steps) < 1:
        parser.error("counts are at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each mode and number of running requests."""
    options = parse(arguments)
    engine = start(options.device, max(options.running), options.rounds * options.steps + SETTLING_STEPS)
    device = engine.loaded.opened.model.device
    machine, versions = describe_machine(device), describe_versions()
    print(f"{machine['gpu'] or 'no GPU'}, {machine['cpu']}, " + ", ".join(f"{k} {v}" for k, v in versions.items() if v))
    print(f"{'mode':<7} {'running':>8} " + " ".join(f"{name:>9}" for name in COLUMNS))
    rows = []
    with engine:
        watch = Stopwatch(engine)
        for mode in options.modes:
            for running in options.running:
                row = measure(engine, watch, running, mode, options.rounds, options.steps)
                rows.append(row)
                cells = " ".join(f"{row[name]:>9.1f}" for name in COLUMNS)
                print(f"{mode:<7} {running:>8} {cells}", flush=True)
    if options.output is not None:
        settings = {"rounds": options.rounds, "steps": options.steps, "device": str(device)}
        record = {"schema": SCHEMA, "machine": machine, "versions": versions, "settings": settings, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
