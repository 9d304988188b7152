"""How many drafts of the trained tiny GLM-5.2 are accepted, beside what its makers measured.

    python benchmarks/acceptance.py [--output FILE]

They measured 20 prompts that their README does not name. Here 60 prompts of the kinds that the model was trained on
run, and the spread of groups of 20 of them tells how far two such figures may lie apart. Prefill steps do not count.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import mean

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig

MODEL = Path(__file__).parents[1] / "tests" / "data" / "tiny-glm5.2-mtp"
KINDS = (
    *("Tell me a short story about a brave {}.", "Write a list of three things about {}.", "Explain what {} is."),
    *("Write a poem about {}.", "What is {}?"),
)
THINGS = (
    *("fox", "rabbit and a silver key", "river", "robot", "garden", "teacher"),
    *("moon", "castle", "friendship", "rain", "dog", "bread"),
)
GREEDY, SAMPLED = SamplingParams(max_tokens=64), SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=1)
# Drafts, options, and accepted drafts a step as the model's README has them.
RUNS = (
    *((1, GREEDY, 0.835), (2, GREEDY, 1.548), (3, GREEDY, 2.031), (5, GREEDY, 2.782)),
    *((3, SAMPLED, 1.411), (5, SAMPLED, 1.733)),
)
GROUP, GROUPS, EDGE = 20, 1000, 50  # groups of 20 prompts, drawn 1,000 times; the middle 90 % of them


def accepted(drafts: int, params: SamplingParams) -> list[list[int]]:
    """Accepted drafts of each step of each prompt."""
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2**26}
    speculative = SpeculativeConfig(num_speculative_tokens=drafts)
    chats = [[{"role": "user", "content": kind.format(thing)}] for thing in THINGS for kind in KINDS]
    with Engine(EngineConfig(str(MODEL), speculative=speculative, **options)) as engine:
        outputs = engine.generate(chats, params)
    return [[step.num_accepted for step in output.outputs[0].speculative if step.num_drafts] for output in outputs]


def main() -> None:
    """Runs all and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output, rng, found = parser.parse_args().output, random.Random(0), []
    for drafts, params, theirs in RUNS:
        steps = accepted(drafts, params)
        ours = mean(count for each in steps for count in each)
        groups = sorted(mean(n for each in rng.sample(steps, GROUP) for n in each) for _ in range(GROUPS))
        low, high = groups[EDGE], groups[-EDGE]
        kind = f"temperature {params.temperature}"
        print(f"{drafts} drafts, {kind}: {ours:.3f}, groups of {GROUP} {low:.3f} to {high:.3f}; README {theirs}")
        found.append({"drafts": drafts, "temperature": params.temperature, "accepted": ours, "readme": theirs})
        found[-1] |= {"low": low, "high": high}
    if output is not None:
        output.write_text(json.dumps({"schema": "hookline.acceptance/1", "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
