"""Decode, prefill and memory on a CPU, beside transformers on the same weights, in one run.

    python benchmarks/cpu.py [--model smollm2-135m-instruct] [--json FILE]

Both read the same GGUF file (needs `accelerate` for transformers). Each figure is the best of `--repeats` runs, ours
and theirs taken in turn, so that a busy machine harms both alike. Decode speed counts the tokens after the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import read_environment
from hookline.model_store import resolve_model

PROMPT, NEW, PREFILL = 24, 65, 1024
DTYPES = ("float32", "bfloat16")


def best(repeats: int, *runs: Callable[[], float]) -> list[float]:
    """Seconds of each run, the best of so many turns."""
    return [min(times) for times in zip(*([run() for run in runs] for _ in range(repeats)), strict=True)]


class Ours:
    """This engine, prefix caching off."""

    def __init__(self, model: str, dtype: Any) -> None:
        config = EngineConfig(model, dtype=dtype, device="cpu", prefix_caching=False)
        self.engine = Engine(config)

    def run(self, ids: list[list[int]], new_tokens: int) -> float:
        """Seconds for `new_tokens` of each prompt."""
        start = time.perf_counter()
        self.engine.generate(ids, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return time.perf_counter() - start


class Theirs:
    """transformers, eager, with its default attention."""

    def __init__(self, path: Path, dtype: str) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
        ).eval()

    @torch.inference_mode()
    def run(self, ids: list[list[int]], new_tokens: int) -> float:
        """Seconds for `new_tokens` of each prompt."""
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        start = time.perf_counter()
        self.model.generate(torch.tensor(ids), **options)
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> float:
        """Seconds for one forward pass over a prompt, with the last token's logits alone."""
        start = time.perf_counter()
        self.model(torch.tensor([ids]), logits_to_keep=1)
        return time.perf_counter() - start


def measure(model: str, path: Path, dtype: str, repeats: int) -> dict[str, float]:
    """Tokens a second, ours and transformers'."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, length: int) -> list[list[int]]:
        return torch.randint(1000, 40000, (rows, length), generator=generator).tolist()

    ours, theirs = Ours(model, dtype), Theirs(path, dtype)
    one, sixteen, long = draw(1, PROMPT), draw(16, PROMPT), draw(1, PREFILL)
    ours.run(one, 2), theirs.run(one, 2)
    found: dict[str, float] = {}
    for name, ids in (("decode_1", one), ("decode_16", sixteen)):
        first = best(repeats, lambda ids=ids: ours.run(ids, 1), lambda ids=ids: theirs.run(ids, 1))
        whole = best(repeats, lambda ids=ids: ours.run(ids, NEW), lambda ids=ids: theirs.run(ids, NEW))
        tokens = len(ids) * (NEW - 1)
        for who, begin, end in zip(("ours", "transformers"), first, whole, strict=True):
            found[f"{name}_{who}"] = tokens / (end - begin)
    ours.run(long, 1), theirs.prefill(long[0])
    seconds = best(repeats, lambda: ours.run(long, 1), lambda: theirs.prefill(long[0]))
    found["prefill_1024_ours"], found["prefill_1024_transformers"] = (PREFILL / s for s in seconds)
    return found


def generate_peak(model: str, dtype: str) -> tuple[float, float]:
    """Peak resident MB of `engine generate`, and MB of the weights in this type."""
    # The process tells its own peak: what the system keeps of a child may be its parent's, from before the exec.
    code = (
        "import atexit, sys\n"
        "lines = lambda: open('/proc/self/status').read().splitlines()\n"
        "atexit.register(lambda: print(next(l for l in lines() if l.startswith('VmHWM')), file=sys.stderr))\n"
        "from hookline.cli.main import main\n"
        "main()"
    )
    prompt = "What is the capital of France?"
    command = [sys.executable, "-c", code, "generate", prompt, "-m", model, "--dtype", dtype, "--max-tokens", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with Engine(EngineConfig(model, dtype=dtype, device="cpu")) as engine:  # type: ignore[arg-type]
        weights = engine.memory_plan.weights
    return int(done.stderr.split()[-2]) * 1024 / 1e6, weights / 1e6


def main() -> None:
    """Prints one table a type, and the whole record as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = resolve_model(options.model, read_environment())
    record: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("hookline", "torch", "transformers")},
        "shape": {"prompt": PROMPT, "new_tokens": NEW, "prefill": PREFILL, "repeats": options.repeats},
    }
    for dtype in DTYPES:
        found = measure(options.model, path, dtype, options.repeats)
        gc.collect()
        peak, weights = generate_peak(options.model, dtype)
        rows = {
            "decode, 1 request, over transformers (aim 2)": found["decode_1_ours"] / found["decode_1_transformers"],
            "decode, 16 requests, over our 1 (aim 6)": found["decode_16_ours"] / found["decode_1_ours"],
            "decode, 16 requests, over transformers": found["decode_16_ours"] / found["decode_16_transformers"],
            "prefill over transformers (aim 1)": found["prefill_1024_ours"] / found["prefill_1024_transformers"],
            "peak memory over its bound of 1.3 x weights + 500 MB (at most 1)": peak / (1.3 * weights + 500),
        }
        record[dtype] = {"tokens_per_second": found, "ratios": rows, "peak_mb": peak, "weights_mb": weights}
        print(f"\n{dtype}: tokens a second")
        for name, value in found.items():
            print(f"  {name:<28} {value:9.1f}")
        for name, value in rows.items():
            print(f"  {name:<66} {value:6.2f}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
