"""lm-eval over both routes, with a task of our own, offline: its figures are those of the model itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from tests.clients.server import KEY, Server

CHOICES = ["London", "Paris", "Rome", "Berlin"]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "England": "London"}
TASKS = {
    "choose_capital": """
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(capital)}}"
metric_list:
  - metric: acc
""",
    "write_capital": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{capital}}"
generation_kwargs:
  until: ["\\n\\n", "."]
  max_gen_toks: 16
filter_list:
  - name: found
    filter:
      - function: regex
        regex_pattern: "(London|Paris|Rome|Berlin)"
      - function: take_first
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "capitals.json"
    rows = [
        {"country": country, "capital": capital, "choices": CHOICES, "question": f"The capital of {country} is"}
        for country, capital in CAPITALS.items()
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        common = (
            f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        )
        (folder / f"{name}.yaml").write_text(common + text.lstrip())
    return folder


class Run(NamedTuple):
    """What lm-eval wrote of a task."""

    figures: dict[str, Any]
    samples: list[dict[str, Any]]


def evaluate(
    server: Server,
    tasks: Path,
    folder: Path,
    model: str,
    route: str,
    names: Sequence[str],
    *options: str,
    **given: object,
) -> tuple[dict[str, Run], str]:
    """Runs lm-eval over tasks; what it wrote of each, and its log."""
    arguments = {"model": server.model(), "base_url": f"{server.url}/v1/{route}", "max_retries": 1, "timeout": 60}
    arguments |= {"num_concurrent": 4} | given
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--include_path", str(tasks)]
    command += ["--tasks", ",".join(names), "--output_path", str(folder), "--log_samples", *options]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    ran = subprocess.run(
        command, env=os.environ | offline | {"OPENAI_API_KEY": KEY}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (results,) = folder.rglob("results_*.json")
    figures, found = json.loads(results.read_text())["results"], {}
    for name in names:
        (samples,) = folder.rglob(f"samples_{name}_*.jsonl")
        found[name] = Run(figures[name], [json.loads(line) for line in samples.read_text().splitlines()])
        assert len(found[name].samples) == len(CAPITALS)
    return found, ran.stdout + ran.stderr


def expected_logprobs(folder: Path, context: str) -> list[float]:
    """What transformers gives each choice behind `context`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for choice in CHOICES:
        start, ids = len(tokenizer(context).input_ids), tokenizer(f"{context} {choice}").input_ids
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids))))
    return found


def test_log_likelihoods_are_the_models(tiny_server: Server, tiny_llama: Path, tasks: Path, tmp_path: Path) -> None:
    found, _ = evaluate(
        tiny_server, tasks, tmp_path, "local-completions", "completions", ["choose_capital"],
        "--batch_size", "3", tokenizer=tiny_llama, tokenizer_backend="huggingface",
    )  # fmt: skip
    figures, samples = found["choose_capital"]
    right = 0
    for sample in samples:
        expected = expected_logprobs(tiny_llama, f"The capital of {sample['doc']['country']} is")
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += CHOICES[expected.index(max(expected))] == sample["doc"]["capital"]
    assert figures["acc,none"] == right / len(CAPITALS)


def test_a_real_model_knows_capitals_with_the_servers_own_tokenizer(
    smollm2_server: Server, tasks: Path, tmp_path: Path
) -> None:
    found, log = evaluate(
        smollm2_server, tasks, tmp_path, "local-completions", "completions", ["choose_capital", "write_capital"],
        tokenizer_backend="auto", auth_token=KEY,
    )  # fmt: skip
    assert "Using remote tokenizer from" in log
    assert found["choose_capital"].figures["acc,none"] == 1
    assert found["write_capital"].figures["exact_match,found"] == 1
    assert all("." not in sample["resps"][0][0] for sample in found["write_capital"].samples)


def test_it_writes_over_chat(smollm2_server: Server, tasks: Path, tmp_path: Path) -> None:
    found, _ = evaluate(
        smollm2_server, tasks, tmp_path, "local-chat-completions", "chat/completions", ["write_capital"],
        "--apply_chat_template",
    )  # fmt: skip
    for sample in found["write_capital"].samples:
        asked: list[Any] = [{"role": "user", "content": sample["doc"]["question"]}]
        answer = smollm2_server.client().chat.completions.create(
            model="smollm2",
            messages=asked,
            max_tokens=16,
            temperature=0,
            stop=["\n\n", "."],
        )
        assert sample["resps"][0][0] == answer.choices[0].message.content
    assert found["write_capital"].figures["exact_match,found"] > 0
