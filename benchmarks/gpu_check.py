"""Does the engine run on this machine's GPU, and does it choose transformers' tokens there?

    python benchmarks/gpu_check.py

Makes small random Llama and Mistral checkpoints, serves them in fp32 and bf16 on the GPU with the Triton kernels, and
compares greedy ids: fp32 with transformers token by token, bf16 by how near each choice was to transformers' own.
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
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
