"""lm-eval over both routes, with a task of our own, offline: its figures are those of the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs:\n  cache_dir: {folder}\n  data_files:\n    test: {data}\n"
        )
        (folder / f"{name}.yaml").write_text(common + text.lstrip())
    return folder


class Run(NamedTuple):
    """What lm-eval found of a task."""

    figures: dict[str, Any]
    samples: list[dict[str, Any]]


Evaluate = Callable[..., dict[str, Run]]


@pytest.fixture
def evaluate(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs lm-eval over tasks of ours alone: to read all of its own takes it ten seconds."""
    from lm_eval import simple_evaluate  # heavy, and wanted nowhere else
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    # A list of all packages that are installed: two seconds a run, and nothing that is read here.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)

    def run(server: Server, model: str, route: str, names: Sequence[str], **options: Any) -> dict[str, Run]:
        arguments = {"model": server.model(), "base_url": f"{server.url}/v1/{route}", "max_retries": 1, "timeout": 60}
        arguments |= {"num_concurrent": 4} | options.pop("model_args", {})
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found = simple_evaluate(model, arguments, list(names), task_manager=manager, log_samples=True, **options)
        runs = {name: Run(found["results"][name], found["samples"][name]) for name in names}
        assert all(len(one.samples) == len(CAPITALS) for one in runs.values())
        return runs

    return run


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


def test_log_likelihoods_are_the_models(tiny_server: Server, tiny_llama: Path, evaluate: Evaluate) -> None:
    given = {"tokenizer": str(tiny_llama), "tokenizer_backend": "huggingface"}
    found = evaluate(
        tiny_server, "local-completions", "completions", ["choose_capital"], batch_size=3, model_args=given
    )
    figures, samples = found["choose_capital"]
    right = 0
    for sample in samples:
        expected = expected_logprobs(tiny_llama, f"The capital of {sample['doc']['country']} is")
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += CHOICES[expected.index(max(expected))] == sample["doc"]["capital"]
    assert figures["acc,none"] == right / len(CAPITALS)


def test_a_real_model_knows_capitals_with_the_servers_own_tokenizer(
    smollm2_server: Server, evaluate: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    names, given = ["choose_capital", "write_capital"], {"tokenizer_backend": "auto", "auth_token": KEY}
    with caplog.at_level("INFO"):
        found = evaluate(smollm2_server, "local-completions", "completions", names, model_args=given)
    assert "Using remote tokenizer from" in caplog.text
    assert found["choose_capital"].figures["acc,none"] == 1
    assert found["write_capital"].figures["exact_match,found"] == 1
    assert all("." not in sample["resps"][0][0] for sample in found["write_capital"].samples)


def test_it_writes_over_chat(smollm2_server: Server, evaluate: Evaluate) -> None:
    route = "chat/completions"
    found = evaluate(smollm2_server, "local-chat-completions", route, ["write_capital"], apply_chat_template=True)
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
