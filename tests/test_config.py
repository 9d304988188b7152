"""Options that contradict themselves are refused when they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hookline.config import EngineConfig, SpeculativeConfig, engine_environment, resolve
from hookline.errors import UsageError


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "eagle"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": True},
        {"num_speculative_tokens": 2.0},
        {"relaxed_topk": 0},
        {"relaxed_delta": 1.1},
        {"relaxed_delta": None},
        {"relaxed_delta": float("nan")},
        {"synthetic_acceptance_rate": -0.1},
        {"synthetic_acceptance_rate": "0.5"},
        {"draft_proposal": "beam"},
        {"ngram_min": 0},
        {"ngram_min": 5, "ngram_max": 4},
        {"think_token_ids": (1,)},
        {"think_token_ids": (1, 1)},
        {"think_token_ids": (1, -1)},
        {"think_token_ids": 5},
        {"use_relaxed_acceptance_for_thinking": 1},
        {"use_relaxed_acceptance_for_thinking": True, "draft_proposal": "sampled"},
        {"use_relaxed_acceptance_for_thinking": True, "synthetic_acceptance_rate": 0.5},
        {"synthetic_acceptance_rate": 0.5, "draft_proposal": "sampled"},
        {"method": "ngram", "draft_proposal": "sampled"},
    ],
)
def test_unsound_options_of_speculation(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SpeculativeConfig(**fields)
    assert caught.value.hint


def test_options_of_speculation_are_frozen_and_kept() -> None:
    config = SpeculativeConfig(method="ngram", think_token_ids=[3, 4])  # type: ignore[arg-type]
    assert config.think_token_ids == (3, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.relaxed_topk = 3  # type: ignore[misc]
    assert resolve(EngineConfig("model", speculative=config), "cpu", "float32").speculative == config


def test_a_dict_is_no_config_of_speculation() -> None:
    with pytest.raises(UsageError, match="speculative"):
        EngineConfig("model", speculative={"method": "ngram"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["overlap", "cuda_graphs", "prefix_caching", "offline"])
@pytest.mark.parametrize("value", ["no", 0, 1])
def test_what_is_on_or_off_is_no_text_or_number(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        EngineConfig("model", **{name: value})  # type: ignore[arg-type]
    assert caught.value.hint
    assert EngineConfig("model", **{name: False}) != EngineConfig("model", **{name: True})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 2, True, "1", 1.0, None])
def test_one_device_is_all_that_there_is(value: Any) -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size is") as caught:
        EngineConfig("model", tensor_parallel_size=value)
    assert "give 1" in str(caught.value.hint)
    assert EngineConfig("model", tensor_parallel_size=1).tensor_parallel_size == 1


def test_an_engine_process_is_not_told_the_keys_of_clients() -> None:
    assert engine_environment({"A": "1", "HOOKLINE_API_KEYS": "secret-key"}) == {"A": "1"}
