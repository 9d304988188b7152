"""`engine generate`: what it prints is what the engine computes, and every mistake has its exit code and its words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.cli.main import engine as command
from hookline.config import EngineConfig
from hookline.engine import Engine
from hookline.errors import ModelNotFoundError
from hookline.sampling_params import SamplingParams
from tests.cli.interruptible import running_engine

CACHE = ("--kv-cache-memory", "4MiB")


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(model=str(tiny_llama), kv_cache_memory=4 * 2**20)) as made:
        yield made


@pytest.fixture
def generate(tiny_llama: Path) -> Callable[..., Result]:
    """Runs `engine generate` on the tiny Llama."""

    def run(*arguments: str, input: str | bytes | None = None, model: Path = tiny_llama) -> Result:
        return CliRunner().invoke(command, ["generate", "-m", str(model), *CACHE, *arguments], input=input)

    return run


def greedy(engine: Engine, prompt: Any, **fields: Any) -> dict[str, Any]:
    [output] = engine.generate([prompt], SamplingParams(**fields))
    return output.to_dict()


def without_timing(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("timing", "usage")}


def test_json_is_what_the_engine_gives(generate: Callable[..., Result], engine: Engine) -> None:
    result = generate("--raw", "--json", "--max-tokens", "12", "Once upon a time")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)
    expected = greedy(engine, "Once upon a time", max_tokens=12)
    assert without_timing(row) == without_timing(expected)
    assert len(row["token_ids"]) == 12
    assert row["usage"] == {"prompt_tokens": 16, "completion_tokens": 12, "cached_tokens": 0}
    assert 0 <= row["timing"]["time_to_first_token"] <= row["timing"]["total"]


def test_streamed_text_is_the_text_and_nothing_else_is_on_stdout(
    generate: Callable[..., Result], engine: Engine
) -> None:
    result = generate("--raw", "--max-tokens", "30", "--stats", "Once")
    assert result.exit_code == 0
    assert result.stdout == greedy(engine, "Once", max_tokens=30)["text"] + "\n"
    for word in ("load", "first token", "prefill", "decode", "peak memory", "Memory on cpu", "weights"):
        assert word in result.stderr
    assert generate("--raw", "--max-tokens", "3", "Once").stderr == ""


def test_chat_template_is_the_default(generate: Callable[..., Result], engine: Engine) -> None:
    plain = json.loads(generate("--json", "--max-tokens", "2", "Hi").stdout)
    system = json.loads(generate("--json", "--max-tokens", "2", "--system", "Be brief.", "Hi").stdout)
    user = {"role": "user", "content": "Hi"}
    assert plain["prompt_token_ids"] == engine.encode([user])
    assert system["prompt_token_ids"] == engine.encode([{"role": "system", "content": "Be brief."}, user])


def test_checkpoint_without_template_takes_the_prompt_as_it_is(
    generate: Callable[..., Result], engine: Engine, tiny_llama: Path, tmp_path: Path
) -> None:
    model = tmp_path / "plain"
    shutil.copytree(tiny_llama, model)
    (model / "tokenizer_config.json").unlink()
    row = json.loads(generate("--json", "--max-tokens", "2", "Hi", model=model).stdout)
    assert row["prompt_token_ids"] == engine.encode("Hi")
    refused = generate("--system", "Be brief.", "Hi", model=model)
    assert refused.exit_code == 2
    assert "no chat template" in refused.stderr


def test_prompt_from_stdin_loses_one_line_end(generate: Callable[..., Result], engine: Engine) -> None:
    row = json.loads(generate("--raw", "--json", "--max-tokens", "2", "-", input="Two\nlines\n\n").stdout)
    assert row["prompt_token_ids"] == engine.encode("Two\nlines\n")


def test_sampling_options_reach_the_request(generate: Callable[..., Result]) -> None:
    def ids(*arguments: str) -> list[int]:
        row = json.loads(generate("--raw", "--json", "--max-tokens", "8", *arguments, "Once").stdout)
        return list(row["token_ids"])

    drawn = ids("--temperature", "1", "--seed", "1")
    assert ids("--temperature", "1", "--seed", "1") == drawn
    assert ids("--temperature", "1", "--seed", "2") != drawn
    assert ids("--logit-bias", "65=100", "--logit-bias", "66=-100") == [65] * 8
    assert ids("--logit-bias", "65=100", "--stop-token-id", "65") == [65]
    assert ids("--logit-bias", "65=100", "--stop", "bbb") == [65] * 3
    assert set(ids("--allowed-token-id", "65", "--allowed-token-id", "70")) <= {65, 70}


def test_several_continuations(generate: Callable[..., Result]) -> None:
    arguments = ("--raw", "-n", "2", "--temperature", "1", "--seed", "3", "--max-tokens", "4", "Once")
    row = json.loads(generate("--json", "--logprobs", "2", *arguments).stdout)
    assert [one["index"] for one in row["outputs"]] == [0, 1]
    assert row["outputs"][0]["token_ids"] != row["outputs"][1]["token_ids"]
    assert len(row["outputs"][0]["logprobs"]) == 4
    text = generate(*arguments).stdout
    assert text == "".join(f"--- {one['index'] + 1} of 2 ---\n{one['text']}\n" for one in row["outputs"])


ROWS = (
    {"prompt": "One", "max_tokens": 9},
    {"prompt": "Two", "temprature": 1},
    {"prompt": "One", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "Three"}], "temperature": 1.0, "seed": 5},
    {"prompt_token_ids": [1, 2, 9999]},
    {"prompt_token_ids": [1, 2, 3], "logit_bias": {"65": 100}},
    {"messages": [{"role": "user", "content": "Three"}], "temperature": 1.0, "seed": 6},
)


def test_file_of_prompts(generate: Callable[..., Result], engine: Engine, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, ROWS)))
    target.write_text("what was there before")
    result = generate("--raw", "--max-tokens", "6", "--input", str(source), "--output", str(target))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "2 of 7 rows failed" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    message = [{"role": "user", "content": "Three"}]
    for index, prompt, fields in (
        (0, "One", {"max_tokens": 9}),
        (2, "One", {"max_tokens": 3}),
        (3, message, {"max_tokens": 6, "temperature": 1.0, "seed": 5}),
        (5, [1, 2, 3], {"max_tokens": 6, "logit_bias": {65: 100}}),
        (6, message, {"max_tokens": 6, "temperature": 1.0, "seed": 6}),
    ):
        assert without_timing(rows[index]) == without_timing(greedy(engine, prompt, **fields)), index
    assert rows[3]["token_ids"] != rows[6]["token_ids"]
    assert rows[1]["index"] == 1
    assert rows[1]["error"]["field"] == "temprature"
    assert "Did you mean temperature?" in rows[1]["error"]["message"]
    assert rows[4]["index"] == 4
    assert rows[4]["error"]["field"] == "prompt_token_ids"
    assert "9999" in rows[4]["error"]["message"]


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (b"{bad", None, "line 2 is no sound JSON"),
        (b'"text"', None, "line 2 is no JSON object"),
        (b'{"prompt": "\xff"}', None, "line 2 is no sound JSON"),
        (b'{"max_tokens": 3}', "prompt", "no prompt"),
        (b'{"prompt": "a", "messages": []}', "messages", "prompt and messages"),
        (b'{"prompt": ""}', "prompt", "not empty"),
        (b'{"prompt": "\\ud800"}', "prompt", "Unicode"),
        (b'{"prompt": "a", "\\ud800": 1}', "\ud800", "no sampling option"),
        (b'{"prompt": "a", "stop": "\\ud83d"}', "stop", "Unicode"),
        (b'{"messages": [{"content": "a"}]}', "messages", "role"),
        (b'{"messages": [{"role": "user", "content": null}]}', "messages", "both texts"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "messages", "both texts"),
        (b'{"prompt_token_ids": [true]}', "prompt_token_ids", "whole number"),
        (b'{"prompt": "a", "top_p": 0}', "top_p", "top_p"),
        (b'{"prompt": "' + b"a" * 600 + b'"}', "prompt", "512"),
    ],
)
def test_bad_row_is_named_and_the_others_go_on(
    generate: Callable[..., Result], line: bytes, field: str | None, words: str
) -> None:
    good = b'{"prompt": "a", "max_tokens": 1}'
    result = generate("--raw", "--input", "-", input=b"\n".join([good, line, good]))
    assert result.exit_code == 1
    first, bad, last = map(json.loads, result.stdout.splitlines())
    assert first["token_ids"] == last["token_ids"]
    assert bad["error"]["field"] == field
    assert words in bad["error"]["message"]
    assert bad["index"] == 1


def test_more_rows_than_the_engine_holds(generate: Callable[..., Result], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": str(i), "max_tokens": 1 + i % 3}) for i in range(30)))
    result = generate("--raw", "--max-running", "2", "--stats", "--input", str(source))
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt_token_ids"] for row in rows] == [[ord(c) - ord("!") for c in str(i)] for i in range(30)]
    assert [len(row["token_ids"]) for row in rows] == [1 + i % 3 for i in range(30)]
    assert "30 in" in result.stderr


def test_interrupted_file_leaves_what_was_done(
    generate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": "a", "max_tokens": 1 + i}) for i in range(5)))
    target.write_text("old")
    real, steps = Engine.step, []

    def step(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    result = generate("--raw", "--input", str(source), "--output", str(target))
    assert result.exit_code == 130
    assert target.read_text() == "old"
    partial = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert [len(json.loads(line)["token_ids"]) for line in partial] == [1, 2, 3]
    assert "out.jsonl.partial" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--temperature", "-1", "a"], 2, ["temperature", "-1"]),
        (["--dtype", "float31", "a"], 2, ["--dtype", "float31"]),
        (["--logit-bias", "x", "a"], 2, ["ID=VALUE"]),
        (["--kv-cache-memory", "much", "a"], 2, ["--kv-cache-memory", "512MiB"]),
        (["--device", "tpu", "a"], 2, ["device", "tpu"]),
        (["--max-tokns", "3", "a"], 2, ["--max-tokens"]),
        ([], 2, ["PROMPT"]),
        ([""], 2, ["prompt is empty"]),
        (["  "], 2, ["prompt is empty"]),
        (["--raw", ""], 2, ["prompt is empty"]),
        (["--raw", "--system", "b", "a"], 2, ["--system", "--raw"]),
        (["--input", "x.jsonl", "a"], 2, ["PROMPT", "--input"]),
        (["--input", "/nowhere/x.jsonl"], 3, ["/nowhere/x.jsonl"]),
        (["--output", "x.jsonl", "a"], 2, ["--output", "--input"]),
        (["--raw", "a" * 600], 2, ["600", "512"]),
        (["--kv-cache-memory", "100000GiB", "a"], 6, ["--kv-cache-memory", "available", "weights"]),
        (["--kv-cache-memory", "9" * 400, "a"], 2, ["--kv-cache-memory", "512MiB"]),
        (["--logprobs", "2", "a"], 2, ["--json"]),
        (["--prompt-logprobs", "2", "a"], 2, ["--json"]),
        (["--load-format", "gguf", "a"], 1, ["safetensors", "gguf"]),
    ],
)
def test_mistakes_have_their_exit_code(
    generate: Callable[..., Result], arguments: list[str], code: int, words: list[str]
) -> None:
    result = generate(*arguments)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_output_in_no_folder(generate: Callable[..., Result], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    result = generate("--input", str(source), "--output", str(tmp_path / "none" / "out.jsonl"))
    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_output_to_a_pipe_or_a_link_does_not_replace_it(generate: Callable[..., Result], tmp_path: Path) -> None:
    source, pipe, link, target = (tmp_path / name for name in ("in.jsonl", "pipe", "link", "out.jsonl"))
    source.write_text('{"prompt": "a", "max_tokens": 1}')
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert generate("--input", str(source), "--output", str(pipe)).exit_code == 0
    assert len(json.loads(os.read(reader, 2**16))["token_ids"]) == 1
    os.close(reader)
    full = generate("--input", str(source), "--output", "/dev/full")
    assert full.exit_code == 1
    assert "/dev/full cannot be written" in full.stderr
    assert generate("--input", str(source), "--output", str(link)).exit_code == 0
    assert len(json.loads(target.read_text())["token_ids"]) == 1
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link", "out.jsonl", "pipe"]


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"], ["generate", "--input", "-"]])
def test_closed_stdin_is_an_empty_one(tiny_llama: Path, arguments: list[str]) -> None:
    script = "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    run = "from hookline.cli.main import main; main()"
    command = [sys.executable, "-c", script, run, *arguments, "-m", str(tiny_llama), *CACHE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if arguments == ["chat"] else 2), done.stderr
    assert "unexpected" not in done.stderr


def test_a_full_disk_is_said(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", "from hookline.cli.main import main; main()", "generate", "-m", str(tiny_llama)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, *CACHE, "--max-tokens", "2", "a"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "stdout" in done.stderr
    assert "No space left on device" in done.stderr


def test_figures_that_cannot_be_told_lose_no_answer(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", "from hookline.cli.main import main; main()", "generate", "-m", str(tiny_llama)]
    with Path("/dev/full").open("w") as full:
        options = [*CACHE, "--max-tokens", "2", "--stats", "a"]
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_checkpoints_at_fault(generate: Callable[..., Result], tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("Dear")
    for name, says in (("none", "none"), ("~nobody-here/m", "~nobody"), (str(tmp_path / "letters"), "neither weights")):
        missing = generate("a", model=Path(name) if name != "none" else tmp_path / "none")
        assert missing.exit_code == 3
        assert says in missing.stderr

    unknown = tmp_path / "unknown"
    shutil.copytree(tiny_llama, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["UnheardOfForCausalLM"]}))
    result = generate("a", model=unknown)
    assert result.exit_code == 4
    for word in ("UnheardOfForCausalLM", "LlamaForCausalLM", "pip install"):
        assert word in result.stderr

    cut = tmp_path / "cut"
    shutil.copytree(tiny_llama, cut)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    result = generate("a", model=cut)
    assert result.exit_code == 1
    assert "model.safetensors" in result.stderr


def test_default_model_is_pulled_when_it_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pull(name: str, environment: Any, offline: bool = False) -> Path:
        asked.append((name, offline))
        raise ModelNotFoundError("no network here")

    monkeypatch.setenv("HOOKLINE_CACHE_DIR", str(tmp_path))
    refused = CliRunner().invoke(command, ["generate", "--offline", "a"])
    assert refused.exit_code == 3
    assert "offline" in refused.stderr
    monkeypatch.setattr("hookline.cli.starting.pull_with_progress", pull)
    assert CliRunner().invoke(command, ["generate", "a"]).exit_code == 3
    assert asked == [("smollm2-135m-instruct", False)]


def test_interrupt_keeps_what_was_streamed(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama", max_position_embeddings=100_000)
    arguments = ["generate", "-m", str(model), "--raw", "--ignore-eos", "--max-tokens", "90000", "Once"]
    with running_engine(*arguments) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert rest.endswith(b"\n")
    assert b"Interrupted." in messages
    assert b"Traceback" not in messages


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from hookline.cli.main import engine\n"
        "for name in ('generate', 'chat', 'show', 'snapshot', 'doctor'):\n"
        "    engine([name, '--help'], standalone_mode=False)\n"
        "print('heavy:', sorted({'torch', 'transformers', 'triton'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")
