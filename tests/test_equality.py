"""Greedy ids in fp32 equal transformers', for every option of the Llama plugin, and whatever else the engine does.

Requests alone and in batches, prefills whole and in chunks, requests preempted, prefixes cold, partly and fully warm:
the ids are the same. A test whose forced event did not happen fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams

NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
BLOCK = 8

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.4 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("llama", {"head_dim": 32}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "large eps": ("llama", {"rms_norm_eps": 0.01}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 12}),
    "mistral head_dim": ("mistral", {"sliding_window": 20, "head_dim": 32}),
}

# Those that are run in every way.
MATRIX = ("plain", "mistral window", "longrope", "dynamic rope")


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Token ids of lengths 1 to `longest`, with the block's borders among them."""
    rng = random.Random(seed)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, longest][:count]
    lengths += [rng.randint(1, longest) for _ in range(count - len(lengths))]
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def reference(folder: Path, many: list[list[int]]) -> list[list[int]]:
    """What transformers generates, each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    with torch.inference_mode():
        for ids in many:
            row = torch.tensor([ids])
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            out = model.generate(row, attention_mask=torch.ones_like(row), **options)
            found.append(out[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, list[list[int]], list[list[int]]]]:
    """Folder, prompts and transformers' ids of a variant, computed once."""
    known: dict[str, tuple[Path, list[list[int]], list[list[int]]]] = {}

    def compute(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        if name not in known:
            kind, fields = VARIANTS[name]
            folder = checkpoint(kind, **fields)
            # Past 64 positions in output only where the rotary type changes there.
            many = prompts(16 if name in MATRIX else 8, longest=90 if name == "longrope" else 50)
            known[name] = folder, many, reference(folder, many)
        return known[name]

    return compute


def engine(folder: Path, blocks: int = 128, **options: Any) -> Engine:
    """An engine with a pool of so many blocks of 8 tokens."""
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    probe = {"block_size": BLOCK, "dtype": "float32", "device": "cpu"} | options
    config = transformers.AutoConfig.from_pretrained(folder)
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    memory = blocks * BLOCK * token_bytes
    return Engine(EngineConfig(str(folder), kv_cache_memory=memory, **probe), **switches)


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder, max_model_len=128) as run:
        assert ids_of(run.generate(many, GREEDY)) == want


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_batches_do_not_matter(name: str, batch: int, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder, prefix_caching=False, max_model_len=128) as run:
        found = [ids for at in range(0, 16, batch) for ids in ids_of(run.generate(many[at : at + batch], GREEDY))]
    assert found == want


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_do_not_matter(name: str, chunk: int, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder, max_chunk_tokens=chunk, max_batch_tokens=70, max_model_len=128) as run:
        assert ids_of(run.generate(many, GREEDY)) == want


@pytest.mark.parametrize("name", ["plain", "mistral window", "longrope"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_loses_nothing(name: str, prefix_caching: bool, expected: Any) -> None:
    """A pool that holds the longest request and little more."""
    folder, many, want = expected(name)
    with engine(folder, blocks=20, prefix_caching=prefix_caching, max_model_len=128) as run:
        requests = spy_on_requests(run)
        assert ids_of(run.generate(many, GREEDY)) == want
    assert sum(request.preemptions for request in requests) > 0


@pytest.mark.parametrize("every", [3, 7])
def test_forced_preemption_loses_nothing(every: int, expected: Any) -> None:
    folder, many, want = expected("plain")
    with engine(folder, preempt_every=every, max_chunk_tokens=5) as run:
        requests = spy_on_requests(run)
        assert ids_of(run.generate(many, GREEDY)) == want
    assert sum(request.preemptions for request in requests) > 3


@pytest.mark.parametrize("name", ["plain", "mistral window", "longrope"])
def test_cold_and_warm_prefixes_agree(name: str, expected: Any) -> None:
    folder, many, want = expected(name)
    half = [ids[: len(ids) // 2] for ids in many if len(ids) >= 4 * BLOCK]
    with engine(folder, max_model_len=128) as run:
        cold = run.generate(many, GREEDY)
        warm = run.generate(many, GREEDY)
    assert ids_of(cold) == want
    assert ids_of(warm) == want
    long = [output.usage.cached_tokens for output, ids in zip(warm, many, strict=True) if len(ids) > BLOCK]
    assert long
    assert all(cached > 0 for cached in long)
    with engine(folder, max_model_len=128) as run:
        run.generate(half, GREEDY)
        partly = run.generate(many, GREEDY)
    assert ids_of(partly) == want
    counts = [(o.usage.cached_tokens, o.usage.prompt_tokens) for o in partly]
    assert any(0 < cached < prompt - BLOCK for cached, prompt in counts)


def spy_on_requests(run: Engine) -> list[Any]:
    """Every request that the scheduler takes from now on."""
    taken: list[Any] = []
    add = run.scheduler.add

    def spy(request: Any) -> None:
        add(request)
        taken.append(request)

    run.scheduler.add = spy  # type: ignore[method-assign]
    return taken
