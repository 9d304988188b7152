"""Greedy ids in fp32 equal transformers', whatever else the engine does: the matrix of tests/test_equality.py.

Contexts grow from below the length of the indexers' lists to far beyond it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import Engine, SamplingParams
from tests.glm5_2.models import VARIANTS, config_of, make_model, save_model
from tests.test_equality import are_greedy, ids_of, spy_on_batches, spy_on_requests

NEW_TOKENS = 16
BLOCK = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
_RNG = random.Random(0)
PROMPTS = [[_RNG.randrange(256) for _ in range(length)] for length in (1, 7, 8, 9, 16, 90, 89, 33)]
Expected = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Folder and transformers' ids of a variant, computed once; judged where they can be, as in test_equality."""
    known: dict[str, Expected] = {}

    def compute(name: str) -> Expected:
        if name not in known:
            folder = save_model(tmp_path_factory.mktemp("glm") / "model", name)
            with engine(folder) as run:
                found = ids_of(run.generate(PROMPTS, GREEDY))
            known[name] = folder, found if are_greedy(make_model(name), PROMPTS, found) else by_transformers(name)
        return known[name]

    return compute


def by_transformers(name: str) -> list[list[int]]:
    model = make_model(name)
    model.generation_config.eos_token_id = None
    found = []
    with torch.inference_mode():
        for ids in PROMPTS:
            row = torch.tensor([ids])
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            out = model.generate(row, attention_mask=torch.ones_like(row), **options)
            found.append(out[0, len(ids) :].tolist())
    return found


def engine(folder: Path, **options: Any) -> Engine:
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    return Engine(config_of(folder, max_model_len=128, **options), **switches)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [1, 8])
def test_alone_and_in_batches(name: str, batch: int, expected: Any) -> None:
    folder, want = expected(name)
    with engine(folder, prefix_caching=False) as run:
        batches = spy_on_batches(run)
        found = [ids for at in range(0, 8, batch) for ids in ids_of(run.generate(PROMPTS[at : at + batch], GREEDY))]
    assert found == want
    assert max(len(step) for step in batches) == batch


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk", [5, 24])
def test_chunks_do_not_matter(name: str, chunk: int, expected: Any) -> None:
    folder, want = expected(name)
    with engine(folder, max_chunk_tokens=chunk, max_batch_tokens=40, overlap=chunk == 24) as run:
        batches = spy_on_batches(run)
        assert ids_of(run.generate(PROMPTS, GREEDY)) == want
    assert max(count for step in batches for count in step) == chunk
    assert any(max(step) == chunk and min(step) == 1 for step in batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_loses_nothing(overlap: bool, expected: Any) -> None:
    """A pool of 20 blocks, which holds the longest request and little more."""
    folder, want = expected("glm")
    with engine(folder) as probe:
        specs = probe.loaded.opened.model.cache_specs()
    memory = 20 * BLOCK * sum(spec.bytes_per_token() for spec in specs)
    with engine(folder, kv_cache_memory=memory, overlap=overlap) as run:
        requests = spy_on_requests(run)
        assert ids_of(run.generate(PROMPTS, GREEDY)) == want
    assert sum(request.preemptions for request in requests) > 0


@pytest.mark.parametrize("name", ["glm", "deepseek yarn groups"])
def test_cold_and_warm_prefixes_agree(name: str, expected: Any) -> None:
    """A cached block brings its index keys with it."""
    folder, want = expected(name)
    with engine(folder) as run:
        cold, warm = run.generate(PROMPTS, GREEDY), run.generate(PROMPTS, GREEDY)
    assert ids_of(cold) == ids_of(warm) == want
    assert [output.usage.cached_tokens for output in warm] == [(len(ids) - 1) // BLOCK * BLOCK for ids in PROMPTS]
