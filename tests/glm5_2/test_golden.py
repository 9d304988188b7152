"""The trained model against an independent implementation: greedy ids, and the positions that its indexers choose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline_glm5_2_mtp.attention as attention
from hookline import Engine, SamplingParams
from tests.glm5_2.models import GOLDEN_FP8, GOLDEN_MODEL, config_of, logits_of

# Score distance under which another order of summing may choose another position.
GAP = 1e-4


def cases_of(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "golden.json").read_text())["cases"]
    return cases


@pytest.mark.parametrize(
    ("folder", "options"),
    [(GOLDEN_MODEL, {}), (GOLDEN_MODEL, {"max_batch_tokens": 48, "overlap": True}), (GOLDEN_FP8, {})],
    ids=["whole", "chunks", "fp8"],
)
def test_greedy_ids(folder: Path, options: dict[str, Any]) -> None:
    """All prompts beside each other, the longest with a context of 408 tokens, of which 64 are attended to."""
    cases = cases_of(folder)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    config = config_of(folder, kv_cache_memory=2**26, max_model_len=512, **options)
    with Engine(config) as engine:
        results = engine.generate([case["prompt"] for case in cases], params)
    assert [list(result.outputs[0].token_ids) for result in results] == [case["greedy"] for case in cases]


def test_selected_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    own = attention.index_topk

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        made.append(own(*args, **options))
        return made[-1]

    monkeypatch.setattr(attention, "index_topk", spy)
    compared = 0
    with Engine(config_of(GOLDEN_MODEL, max_model_len=512, kv_cache_memory=2**24)) as engine:
        model: Any = engine.loaded.opened.model
        model.attention = dataclasses.replace(model.attention, needs_list=True)
        full = [layer for layer, is_full in enumerate(model.config.full_index) if is_full]
        for case in cases_of(GOLDEN_MODEL):
            made.clear()
            logits_of(engine, [case["prompt"] + case["greedy"]])
            assert len(made) == len(full)
            gap = case["target_selection_gap"]  # None where all that is visible fits into the lists
            if gap is not None and gap <= GAP:
                continue
            for layer, rows in case["target_selection"].items():
                for row, positions in rows.items():
                    found = made[full.index(int(layer))][int(row)].tolist()
                    assert {position for position in found if position >= 0} == set(positions), (layer, row)
                    compared += 1
    assert compared > 40


def test_the_model_answers(tmp_path: Path) -> None:
    """By the checkpoint's own template, with thinking and an end of its own."""
    with Engine(config_of(GOLDEN_MODEL, max_model_len=512, kv_cache_memory=2**24)) as engine:
        [result] = engine.generate(
            [[{"role": "user", "content": "What is 47 + 38?"}]], SamplingParams(max_tokens=64, temperature=0.0)
        )
    assert result.outputs[0].text.endswith("= 85.")
    assert result.outputs[0].finish_reason == "stop"
