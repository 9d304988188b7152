"""Options of speculation on the command line, and what is shown of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.cli.main import engine as command
from hookline.cli.speculation import speculative_config
from hookline.config import SpeculativeConfig
from hookline.errors import UsageError

NGRAM = ("--speculative-method", "ngram", "--num-speculative-tokens", "3")


@pytest.fixture
def generate(tiny_llama: Path) -> Callable[..., Result]:
    def run(*arguments: str, name: str = "generate") -> Result:
        return CliRunner().invoke(
            command, [name, "-m", str(tiny_llama), "--kv-cache-memory", "4MiB", "--raw", *arguments]
        )

    return run


def test_steps_stand_in_the_json(generate: Callable[..., Result]) -> None:
    text = ("--json", "--max-tokens", "40", "--ignore-eos", "abcabcabcabc")
    plain, drafted = json.loads(generate(*text).stdout), json.loads(generate(*NGRAM, *text).stdout)
    assert "speculative" not in plain
    assert drafted["token_ids"] == plain["token_ids"]
    steps = drafted["speculative"]["steps"]
    assert all(set(step) == {"num_accepted", "next_token", "drafts"} for step in steps)
    tokens, before = [], list[int]()
    for step in steps:  # the steps alone say the whole text
        assert step["num_accepted"] <= len(before)
        tokens += [*before[: step["num_accepted"]], step["next_token"]]
        before = step["drafts"]
    assert tokens[: len(drafted["token_ids"])] == drafted["token_ids"]
    assert steps[0]["num_accepted"] == 0 and any(len(step["drafts"]) == 3 for step in steps)


def test_stats_say_what_became_of_drafts(generate: Callable[..., Result]) -> None:
    result = generate(*NGRAM, "--stats", "--max-tokens", "40", "--ignore-eos", "abcabcabcabc")
    assert result.exit_code == 0
    for word in ("drafts ", "proposed", "accepted ", "by position", "tokens each"):
        assert word in result.stderr
    assert "drafts " not in generate("--stats", "--max-tokens", "4", "abc").stderr


def test_dotted_names_are_the_same_options(generate: Callable[..., Result]) -> None:
    dotted = ("--speculative-config.speculative-method", "ngram", "--speculative-config.num-speculative-tokens", "3")
    text = ("--json", "--max-tokens", "30", "abcabc")
    first, second = (json.loads(generate(*names, *text).stdout) for names in (NGRAM, dotted))
    assert first["speculative"] == second["speculative"]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, None),
        ({"num_speculative_tokens": None, "relaxed_topk": None}, None),
        ({"num_speculative_tokens": 3}, SpeculativeConfig(method="mtp", num_speculative_tokens=3)),
        ({"speculative_method": "ngram"}, SpeculativeConfig(method="ngram")),
        (
            {
                "num_speculative_tokens": 5,
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": 3,
                "relaxed_delta": 0.25,
            },
            SpeculativeConfig(
                num_speculative_tokens=5, use_relaxed_acceptance_for_thinking=True, relaxed_topk=3, relaxed_delta=0.25
            ),
        ),
        (
            {"num_speculative_tokens": 1, "synthetic_acceptance_rate": 0.0},
            SpeculativeConfig(num_speculative_tokens=1, synthetic_acceptance_rate=0.0),
        ),
    ],
)
def test_options_become_a_config(values: dict[str, Any], wanted: SpeculativeConfig | None) -> None:
    assert speculative_config(values) == wanted


def test_an_option_that_says_more_of_what_is_off_is_refused() -> None:
    with pytest.raises(UsageError, match="--relaxed-topk is given, and nothing is proposed"):
        speculative_config({"relaxed_topk": 3})
    with pytest.raises(UsageError, match="--relaxed-delta is given, and no acceptance is relaxed"):
        speculative_config({"num_speculative_tokens": 2, "relaxed_delta": 0.1})


def test_mistakes_have_the_exit_code_of_usage(generate: Callable[..., Result]) -> None:
    for arguments in (
        ("--num-speculative-tokens", "3"),  # this model has no draft of its own
        ("--num-speculative-tokens", "0"),
        ("--synthetic-acceptance-rate", "0.5"),
        (*NGRAM, "--synthetic-acceptance-rate", "1.5"),
        (*NGRAM, "--use-relaxed-acceptance-for-thinking"),  # this tokenizer has no tokens of thinking
        (*NGRAM, "--use-relaxed-acceptance-for-thinking", "--synthetic-acceptance-rate", "0.5"),
    ):
        result = generate(*arguments, "abc")
        assert result.exit_code == 2, arguments
        assert result.stdout == ""
