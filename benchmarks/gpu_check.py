"""Does the engine run on this machine's GPU, and does it choose transformers' tokens there?

    python benchmarks/gpu_check.py

Makes small random Llama and Mistral checkpoints, serves them in fp32 and bf16 on the GPU with the Triton kernels, and
compares greedy ids: fp32 with transformers token by token, bf16 by how near each choice was to transformers' own. Then,
in fp32, every way to run (graphs, plain loop, chunks, preemption, warm prefixes) against the plain loop on the CPU.
A first smoke test, not a measure of speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from hookline import Engine, EngineConfig, SamplingParams
from tests.conftest import make_checkpoint

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama, head size 128, biases": ("llama", {"head_dim": 128, "attention_bias": True, "mlp_bias": True}),
    "mistral, window 12": ("mistral", {"sliding_window": 12, "head_dim": 64}),
}
NEW = 24


def measure(folder: Path, dtype: str, device: str) -> dict[str, float]:
    """Share of equal ids, and the largest gap by which transformers preferred another token."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in (1, 7, 8, 9, 16, 40, 100)]
    options: dict[str, Any] = {"dtype": dtype, "device": device, "block_size": 16, "kv_cache_memory": 2**24}
    with Engine(EngineConfig(str(folder), **options)) as engine:
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
}


def compare_ways(folder: Path, device: str) -> dict[str, str]:
    """Ids in fp32 on the GPU beside those of the plain loop on the CPU, greedy and sampled, prefixes cold and warm."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 40, 100, 64, 3)]
    many = [
        SamplingParams(max_tokens=NEW + row, ignore_eos=True, **choice)
        for row, choice in enumerate([{}, {"temperature": 0.8, "seed": 1}] * 2)
    ]
    many += [
        SamplingParams(max_tokens=NEW, temperature=0.9, top_p=0.9, seed=2),
        SamplingParams(max_tokens=NEW, temperature=1.1, top_k=7, min_p=0.02, seed=3),
        SamplingParams(max_tokens=7, repetition_penalty=1.2),
        SamplingParams(max_tokens=5, logprobs=1),
    ]

    def ids(where: str, **options: Any) -> list[Any]:
        switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
        known = {"dtype": "float32", "device": where, "block_size": 16, "kv_cache_memory": 2**24, "max_model_len": 256}
        with Engine(EngineConfig(str(folder), **(known | options)), **switches) as engine:
            found = [engine.generate(prompts, many) for _ in range(2)]
            engine.scheduler.check()
        return [list(output.outputs[0].token_ids) for outputs in found for output in outputs]

    want = ids("cpu")
    answers = {}
    for name, options in WAYS.items():
        found = ids(device, **options)
        wrong = [index for index, (one, other) in enumerate(zip(found, want, strict=True)) if one != other]
        answers[name] = "equal" if not wrong else f"{len(wrong)} of {len(want)} requests differ: {wrong}"
    return answers


def main() -> None:
    """Prints a row a variant and type; exit code 1 if fp32 differs anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {version('torch')}, triton {version('triton')}, transformers {version('transformers')}")
    failed = False
    for variant, (kind, fields) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), kind, **fields)
            for dtype in ("float32", "bfloat16"):
                found = measure(Path(folder), dtype, device)
                failed |= dtype == "float32" and found["equal"] < 1
                print(f"{variant:<32} {dtype:<9} {json.dumps(found)}")
            for way, answer in compare_ways(Path(folder), device).items():
                failed |= answer != "equal"
                print(f"{variant:<32} {way:<18} {answer}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
