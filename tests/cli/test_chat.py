"""`engine chat`, driven through a pipe: history, commands, limits, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hookline.cli.conversation import Conversation, load_conversation, save_conversation
from hookline.cli.main import engine as command
from hookline.config import EngineConfig
from hookline.engine import Engine
from hookline.errors import ModelNotFoundError, UsageError
from hookline.sampling_params import SamplingParams
from tests.cli.interruptible import running_engine

CACHE = ("--kv-cache-memory", "4MiB")


@pytest.fixture
def chat(tiny_llama: Path) -> Callable[..., Result]:
    """Runs `engine chat` on the tiny Llama with the given lines."""

    def run(lines: list[str], *arguments: str, model: Path = tiny_llama) -> Result:
        text = "".join(f"{line}\n" for line in lines)
        return CliRunner().invoke(command, ["chat", "-m", str(model), *CACHE, *arguments], input=text)

    return run


def test_the_whole_conversation_is_the_context(chat: Callable[..., Result], tiny_llama: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "I am a first question, long enough for blocks",
        "",
        "And you?",
        "/stats",
        f"/save {saved}",
        "/quit",
        "no",
    ]
    result = chat(lines, "--system", "Be brief.", "--max-tokens", "6")
    assert result.exit_code == 0, result.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[:2]] == ["Be brief.", lines[0]]
    assert result.stdout == f"{messages[2]['content']}\n{messages[4]['content']}\n"
    with Engine(EngineConfig(model=str(tiny_llama), kv_cache_memory=4 * 2**20)) as engine:
        for end in (2, 4):
            [output] = engine.generate([messages[:end]], SamplingParams(max_tokens=6))
            assert output.outputs[0].text == messages[end]["content"]
    # The second turn finds the first one's blocks in the cache.
    cached = re.search(r"(\d+) of them from the prefix cache", result.stderr)
    assert cached is not None
    assert int(cached[1]) >= 64
    assert "cut at --max-tokens 6" in result.stderr
    assert re.search(r"context +\d+ of 512 tokens", result.stderr)


def test_commands(chat: Callable[..., Result], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    save_conversation(Conversation("Old.", [{"role": "user", "content": "a"}]), str(saved))
    lines = ["/system", "/system New.", "/stats", "/sistem", "/help", "/save", "/load /nowhere", f"/load {saved}"]
    result = chat([*lines, "/reset", f"/save {saved}"])
    assert result.exit_code == 0
    assert result.stdout == ""
    for words in (
        "System message: none",
        "System message: New.",
        "No answer yet.",
        "Did you mean /system?",
        "/load FILE",
        "/save needs a file",
        "/nowhere cannot be read",
        "1 messages are loaded",
        "The conversation is forgotten.",
    ):
        assert words in result.stderr
    assert json.loads(saved.read_text()) == {"messages": [{"role": "system", "content": "Old."}]}


def test_files_that_cannot_be_written_do_not_end_the_conversation(chat: Callable[..., Result], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    names = (".", "/", str(tmp_path), str(tmp_path / "none" / "a"), "a\0b", "~nobody-here/a", "/dev/null", str(pipe))
    result = chat([f"/{verb} {name}" for name in names for verb in ("save", "load") if name != str(pipe)])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("Error: ") == 13
    assert chat([f"/save {pipe}"]).exit_code == 0
    assert json.loads(os.read(reader, 100)) == {"messages": []}
    os.close(reader)
    assert not Path("/dev/null").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_line_that_is_no_text_is_refused_alone(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", "from hookline.cli.main import main; main()", "chat", "-m", str(tiny_llama)]
    done = subprocess.run(
        [*command, *CACHE, "--max-tokens", "1"],
        input=b"\xff\xfe\n/system Late.\n/system\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"no valid Unicode" in done.stderr
    assert b"System message: Late." in done.stderr


def test_full_context_is_said(chat: Callable[..., Result]) -> None:
    lines = ["a", "b" * 100, "/reset", "c"]
    result = chat(lines, "--max-model-len", "64")
    assert result.exit_code == 0
    assert "the context of 64 tokens is full" in result.stderr
    assert re.search(r"the prompt has \d+ tokens; the context holds 64", result.stderr)
    assert "/reset begins anew" in result.stderr
    assert result.stdout.count("\n") >= 2


def test_checkpoint_without_template_cannot_chat(chat: Callable[..., Result], tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "plain"
    shutil.copytree(tiny_llama, model)
    (model / "tokenizer_config.json").unlink()
    result = chat(["a"], model=model)
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "{bad",
        "[]",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "robot", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
    ],
)
def test_files_that_are_no_conversation(text: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"talk\.json"):
        load_conversation(str(path))
    with pytest.raises(ModelNotFoundError, match="none"):
        load_conversation(str(tmp_path / "none"))


def test_interrupt_stops_the_answer_and_not_the_program(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama", max_position_embeddings=100_000)
    arguments = ("chat", "-m", str(model), "--ignore-eos", "--max-tokens", "90000")
    with running_engine(*arguments, bufsize=0, stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        for text in (b"Hello\n", b"Go on\n"):
            process.stdin.write(text)
            assert process.stdout.read(1), "no answer has begun"
            process.send_signal(signal.SIGINT)
            process.stdin.write(b"/stats\n")
            messages = b""
            while b"context  " not in messages:  # the last line of /stats
                line = process.stderr.readline()
                assert line, messages
                messages += line
            assert b"(stopped)" in messages
            assert b"requests     1 in" in messages
            os.set_blocking(process.stdout.fileno(), False)
            while process.stdout.read(1 << 16):
                pass
            os.set_blocking(process.stdout.fileno(), True)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages
