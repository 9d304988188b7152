"""How many drafts of the trained tiny GLM-5.2 are accepted, beside what its makers measured.

    python benchmarks/acceptance.py [--output FILE]

They measured 20 prompts that their README does not name, and the figure depends on the prompts: arithmetic and code are
easier to draft than stories. So two sets run here: 60 prompts of the kinds of prose that the model was trained on, with
the spread of groups of 20 of them, and the 12 without tools that `golden.json` and the README's samples name. Prefill
steps do not count.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline.prompt_encoder import Prompt

MODEL = Path(__file__).parents[1] / "tests" / "data" / "tiny-glm5.2-mtp"
KINDS = (
    *("Tell me a short story about a brave {}.", "Write a list of three things about {}.", "Explain what {} is."),
    *("Write a poem about {}.", "What is {}?"),
)
THINGS = (
    *("fox", "rabbit and a silver key", "river", "robot", "garden", "teacher"),
    *("moon", "castle", "friendship", "rain", "dog", "bread"),
)
SAMPLES = (
    *("What is 47 + 38?", "Write a Python function that checks if a number is even.", "What does a teacher do?"),
    "Tell me a short story about a brave fox and a red ball.",
)
GREEDY, SAMPLED = SamplingParams(max_tokens=64), SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=1)
# Drafts, options, and accepted drafts a step as the model's README has them.
RUNS = (
    *((1, GREEDY, 0.835), (2, GREEDY, 1.548), (3, GREEDY, 2.031), (5, GREEDY, 2.782)),
    *((3, SAMPLED, 1.411), (5, SAMPLED, 1.733)),
)
GROUP, GROUPS, EDGE = 20, 1000, 50  # groups of 20 prompts, drawn 1,000 times; the middle 90 % of them


def prompt_sets() -> tuple[list[Prompt], list[Prompt]]:
    """Those of the kinds, and those that are named."""

    def ask(text: str) -> Prompt:
        return [{"role": "user", "content": text}]

    golden = json.loads((MODEL / "golden.json").read_text())["cases"]
    named = [*(case["prompt"] for case in golden), *map(ask, SAMPLES)]
    return [ask(kind.format(thing)) for thing in THINGS for kind in KINDS], named


def accepted(prompts: Sequence[Prompt], drafts: int, params: SamplingParams) -> list[list[int]]:
    """Accepted drafts of each step of each prompt."""
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_memory": 2**26}
    speculative = SpeculativeConfig(num_speculative_tokens=drafts)
    with Engine(EngineConfig(str(MODEL), speculative=speculative, **options)) as engine:
        outputs = engine.generate(prompts, params)
    return [[step.num_accepted for step in output.outputs[0].speculative if step.num_drafts] for output in outputs]


def main() -> None:
    """Runs all and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output, rng, found = parser.parse_args().output, random.Random(0), []
    kinds, named = prompt_sets()
    for drafts, params, theirs in RUNS:
        steps = accepted(kinds, drafts, params)
        groups = sorted(mean(n for each in rng.sample(steps, GROUP) for n in each) for _ in range(GROUPS))
        row = {"drafts": drafts, "temperature": params.temperature, "readme": theirs}
        row |= {"kinds": mean(count for each in steps for count in each), "low": groups[EDGE], "high": groups[-EDGE]}
        row["named"] = mean(count for each in accepted(named, drafts, params) for count in each)
        found.append(row)
        print(
            f"{drafts} drafts, temperature {params.temperature}: kinds {row['kinds']:.3f} (groups of {GROUP} "
            f"{row['low']:.3f} to {row['high']:.3f}), named {row['named']:.3f}; README {theirs}",
            flush=True,
        )
    if output is not None:
        output.write_text(json.dumps({"schema": "hookline.acceptance/1", "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
