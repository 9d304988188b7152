"""Does the engine run on this machine's GPU, and does it choose transformers' tokens there?

    TRITON_INTERPRET=0 python benchmarks/gpu_check.py [--only mistral,llama] [--ways graphs,poisoned] [--seconds 300]

Makes small random checkpoints and serves them with the Triton kernels: in fp32 in every way to run (graphs, plain loop,
chunks, preemption, warm prefixes, NaN in all unused cache blocks) against the plain loop on the CPU; then greedy ids,
in fp32 token by token with transformers, in bf16 by how near each choice was to transformers' own. What `--seconds`
does not reach is left out and said. A first smoke test, not a measure of speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from hookline import Engine, EngineConfig, RequestOutput, SamplingParams
from tests.conftest import make_checkpoint

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 12, "head_dim": 64}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama-128": ("llama", {"head_dim": 128, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
}
# Few graphs and small steps to measure: a start is then mostly compilation.
SMALL: dict[str, Any] = {"block_size": 16, "kv_cache_memory": 2**24, "max_running": 16, "max_batch_tokens": 256}
NEW = 24


def measure(folder: Path, dtype: str, device: str) -> dict[str, float]:
    """Share of equal ids, and the largest gap by which transformers preferred another token."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in (1, 7, 8, 9, 16, 40, 100)]
    with Engine(EngineConfig(str(folder), dtype=dtype, device=device, **SMALL)) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    equal, gap = 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        found = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
        best = logits.amax(-1)
        chosen = logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
        equal += int((best == chosen).sum())
        gap = max(gap, float((best - chosen).max()))
    return {"equal": equal / (NEW * len(prompts)), "largest gap of logits": gap}


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"cuda_graphs": False},
    "plain loop": {"overlap": False},
    "chunks of 7": {"max_batch_tokens": 16, "max_chunk_tokens": 7},
    "three at a time": {"max_running": 3},
    "preempted": {"preempt_every": 3},
    "no prefixes": {"prefix_caching": False},
    "poisoned": {"prefix_caching": False, "poison": True},
}


def compare_ways(folder: Path, device: str, ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Answers in fp32 on the GPU beside those of the plain loop on the CPU: every option, prefixes cold and warm."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 15, 16, 17, 40, 100, 64, 3, 9, 33, 20, 5)
    prompts = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in lengths]
    many = [
        SamplingParams(max_tokens=NEW + row, ignore_eos=True, **choice)
        for row, choice in enumerate([{}, {"temperature": 0.8, "seed": 1}] * 2)
    ]
    many += [
        SamplingParams(max_tokens=NEW, temperature=0.9, top_p=0.9, seed=2),
        SamplingParams(max_tokens=NEW, temperature=1.1, top_k=7, min_p=0.02, seed=3),
        SamplingParams(max_tokens=NEW, repetition_penalty=1.2, logprobs=3, prompt_logprobs=1),
        SamplingParams(max_tokens=5, logprobs=1),
        SamplingParams(max_tokens=NEW, presence_penalty=0.9, frequency_penalty=-0.6, logit_bias={9: 2.0, 40: -3.0}),
        SamplingParams(max_tokens=NEW, allowed_token_ids=tuple(range(0, 256, 5)), temperature=0.8, seed=4),
        SamplingParams(max_tokens=NEW, min_tokens=9, stop_token_ids=tuple(range(0, 256, 4))),
        SamplingParams(max_tokens=NEW, bad_words=("the", "in", "a", "e", "qu"), presence_penalty=0.5),
    ]

    def answers_of(where: str, **options: Any) -> list[tuple[list[int], list[float]]]:
        switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
        poison = options.pop("poison", False)
        known = SMALL | {"dtype": "float32", "device": where, "max_model_len": 256}
        found = []
        with Engine(EngineConfig(str(folder), **(known | options)), **switches) as engine:
            for _ in range(2):
                if poison:  # no request runs and no prefix is kept: every block is unused
                    poison_cache(engine)
                found += engine.generate(prompts, many)
            engine.scheduler.check()
        return [(list(output.outputs[0].token_ids), logprobs(output)) for output in found]

    want = answers_of("cpu")
    for name in ways:
        pairs = enumerate(zip(answers_of(device, **WAYS[name]), want, strict=True))
        wrong = [index for index, (one, other) in pairs if one[0] != other[0] or not near(one[1], other[1])]
        yield name, "equal" if not wrong else f"{len(wrong)} of {len(want)} requests differ: {wrong}"


def poison_cache(engine: Engine) -> None:
    """NaN in every block."""
    for layers in engine._runner.cache.values():
        for layer in layers:
            for entry in layer.values():
                entry.fill_(float("nan"))


def logprobs(output: RequestOutput) -> list[float]:
    """All log probabilities of an answer and its prompt, in order."""
    entries = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
    return [value for entry in entries if entry for value in (entry.logprob, *(value for _, value in entry.top))]


def near(found: list[float], want: list[float]) -> bool:
    """Whether log probabilities are the same but for the order of sums."""
    return len(found) == len(want) and all(abs(one - other) < 1e-3 for one, other in zip(found, want, strict=True))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, names in (("--only", VARIANTS), ("--ways", WAYS)):
        parser.add_argument(option, metavar="NAME,...", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--dtypes", metavar="NAME,...", default="float32,bfloat16", help="to compare with transformers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args(arguments)
    for name, known in (("only", VARIANTS), ("ways", WAYS), ("dtypes", ("float32", "bfloat16", "float16"))):
        chosen = [part for part in getattr(options, name).split(",") if part]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name} names {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        setattr(options, name, chosen)
    return options


def checks(folder: Path, options: argparse.Namespace, until: float) -> Iterator[tuple[str, str, bool]]:
    """What was compared, what came out, and whether that is as it must be; each is done when it is asked for."""
    ways = compare_ways(folder, options.device, options.ways)
    for what in (*options.ways, *options.dtypes):
        if time.monotonic() > until:
            yield what, "left out, and what comes after it: the time is over", False
            return
        if what in WAYS:
            _, answer = next(ways)
            yield what, answer, answer == "equal"
        else:
            found = measure(folder, what, options.device)
            yield what, json.dumps(found), what != "float32" or found["equal"] == 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each thing compared; 1 if fp32 differs anywhere, something failed or was left out."""
    options = parse(arguments)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {version('torch')}, triton {version('triton')}, transformers {version('transformers')}")
    last, sound = time.monotonic(), True
    until = last + options.seconds
    for variant in options.only:
        kind, fields = VARIANTS[variant]
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), kind, **fields)
            try:
                for what, answer, right in checks(Path(folder), options, until):
                    now = time.monotonic()
                    print(f"{variant:<12} {what:<16} {now - last:5.1f} s  {answer}", flush=True)
                    last, sound = now, sound and right
            except Exception as error:  # a fault of one variant, which the others may not have
                print(f"{variant:<12} FAILED: {type(error).__name__}: {str(error)[:500]}", flush=True)
                last, sound = time.monotonic(), False
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
