"""`engine serve`: its options, what it says, and a signal while it starts; the suites K1 to K5 kill real servers."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.cli import render
from hookline.cli import serve as module
from hookline.cli.main import engine as command
from hookline.config import read_environment
from hookline.errors import UsageError
from hookline.serving import server
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts, Stage
from hookline.serving.server_config import ServerConfig
from tests.cli.interruptible import running_engine

CPU = ("--device", "cpu", "--kv-cache-memory", "4MiB", "--port", "0")
KEY = "sk-a-key-for-tests"
PATIENCE = 60.0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The options of servers that were asked for; none of them runs."""
    found: list[ServerConfig] = []

    def serve(config: ServerConfig, listener: socket.socket, **options: Any) -> int:
        found.append(config)
        options["on_stage"](Stage("loading", 1, 2))
        options["say"]("Serving on nothing")
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(module, "find_model", lambda config: Path())
    monkeypatch.delenv("HOOKLINE_API_KEYS", raising=False)
    return found


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["serve", *(str(argument) for argument in arguments)])


def test_options_reach_the_server(taken: list[ServerConfig], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# first\n{KEY}\n\n  another-key-456  \n")
    names = ("--served-model-name", "a", "--served-model-name", "b", "--allowed-host", "chat.example")
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "", "--strict-api")
    limits = ("--max-waiting", "0", "--max-body", "1MiB", "--drain-seconds", "2.5", "--max-n", "3")
    result = run(
        *("my-model", *CPU, *names, *parsers, *limits, "--open-metrics", "--metrics-prefix", "vllm"),
        *("--api-key", "given-key-123", "--api-key-file", keys, "--max-running", "5"),
    )
    assert result.exit_code == 0, result.output
    assert "Serving on nothing" in result.stderr and result.stdout == ""
    [config] = taken
    assert config.engine.model == "my-model" and config.engine.max_running == 5
    assert config.api_keys == ("given-key-123", KEY, "another-key-456")
    assert config.served_model_names == ("a", "b") and config.allowed_hosts == ("chat.example",)
    assert (config.tool_parser, config.reasoning_parser, config.strict_api) == ("hermes", "", True)
    assert (config.metrics_prefix, config.open_metrics, config.port) == ("vllm", True, 0)
    assert config.limits == Limits(waiting=0, body_bytes=2**20, drain_seconds=2.5, n=3)


def test_defaults_are_those_of_the_records(taken: list[ServerConfig]) -> None:
    assert run("-m", "my-model", "--port", "0").exit_code == 0
    [config] = taken
    assert dataclasses.replace(config, port=8000) == ServerConfig(engine=config.engine)


def test_keys_come_from_the_environment_too(taken: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_API_KEYS", f" {KEY}, second-key-22,")
    assert run("my-model", *CPU, "--api-key", KEY).exit_code == 0
    assert taken[0].api_keys == (KEY, "second-key-22")
    assert KEY not in repr(read_environment())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("a", "-m", "b"), "both MODEL and --model"),
        (("a", "--api-key", "short"), "API key"),
        (("a", "--api-key-file", "no/such/file"), "cannot be read"),
        (("a", "--api-key-file", os.devnull), "has no key"),
        (("a", "--max-body", "much"), "--max-body"),
        (("a", "--max-n", "0"), "--max-n is 0"),
        (("a", "--ping-seconds", "0"), "--ping-seconds is 0.0"),
        (("a", "--queue-seconds", "-1"), "--queue-seconds is -1.0"),
        (("a", "--queue-seconds", "nan"), "--queue-seconds is nan"),
        (("a", "--metrics-prefix", "a b"), "metrics_prefix"),
        (("a", "--allowed-host", ""), "an allowed host is ''"),
        (("a", "--allowed-host", "http://chat.example"), "an allowed host is 'http://chat.example'"),
        (("a", "--allowed-host", "*"), "an allowed host is '*'"),
        (("a", "--port", "65536"), "--port"),
        (("a", "--relaxed-topk", "3"), "--relaxed-topk"),
    ],
)
def test_mistakes_are_named(taken: list[ServerConfig], arguments: tuple[str, ...], text: str) -> None:
    result = run("--port", "0", *arguments)
    assert result.exit_code == 2 and text in result.stderr
    assert taken == []


def test_a_port_that_is_taken_is_said_at_once(taken: list[ServerConfig]) -> None:
    with server.bind("127.0.0.1", 0) as first:
        result = run("a", "--port", str(first.getsockname()[1]))
    assert result.exit_code == 8
    assert "cannot listen on 127.0.0.1:" in result.stderr and "--port" in result.stderr
    assert run("a", "--host", "192.0.2.1", "--port", "0").exit_code == 8
    assert run("a", "--host", "no.such.host.invalid", "--port", "0").exit_code == 8
    assert taken == []


def test_without_the_extra_the_command_says_how_to_get_it() -> None:
    hidden = "import sys; sys.modules['uvicorn'] = None; from hookline.cli.main import main; main()"
    command_line = [sys.executable, "-c", hidden, "serve", "a", "--port", "0"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "uvicorn" in done.stderr and 'pip install "hookline[serve]"' in done.stderr


def test_the_http_process_does_without_torch() -> None:
    heavy = ("torch", "triton", "transformers", "xgrammar")
    code = f"import sys, hookline.serving.server; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_ready_text() -> None:
    facts = Facts(
        name="tiny", architecture="TinyForCausalLM", plugin="hookline-tiny 1.0", device="cpu", dtype="float32",
        vocab_size=8, max_model_len=4096, block_size=16, num_blocks=1024, max_running=64, max_batch_tokens=2048,
        prefix_caching=True, eos_token_ids=[], special_tokens={},
    )  # fmt: skip
    text = server.ready_text(facts, "http://127.0.0.1:8000", {"importing": 1.0, "loading": 0.3})
    assert "ready after 1.3 s (importing 1.0 s, loading 0.3 s)" in text
    for part in ("tiny", "hookline-tiny 1.0", "cpu", "float32", "4,096", "1,024", "16,384", "http://127.0.0.1:8000"):
        assert part in text


def test_what_cannot_be_said_keeps_nobody_from_being_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(render.click, "echo", echo)
    monkeypatch.setattr(render.ProgressDisplay, "begin", echo)
    monkeypatch.setattr(render.ProgressDisplay, "__exit__", echo)
    console = module._Console()
    for name in ("loading", "warming"):
        console.show(Stage(name))
    console.say("Serving on nothing")


@pytest.mark.parametrize(("host", "keys", "warned"), [("0.0.0.0", (), True), ("0.0.0.0", (KEY,), False)])
def test_an_open_server_is_warned_of(
    host: str, keys: tuple[str, ...], warned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hookline.config import EngineConfig

    said: list[str] = []
    config = ServerConfig(engine=EngineConfig(model=str(tmp_path / "none"), device="cpu"), host=host, api_keys=keys)

    async def end(self: object, *arguments: object) -> int:
        return 0

    monkeypatch.setattr(server._Server, "run", end)
    with server.bind("127.0.0.1", 0) as listener:
        server.serve(config, listener, model=tmp_path, on_stage=lambda stage: None, say=said.append)
    assert (server.EXPOSED in said) is warned


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_is_there_ends_it(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(module, "find_model", lambda config: signal.raise_signal(number))
    found = run("none", "--port", "0")
    assert (found.exit_code, found.output) == (0, "")
    assert signal.getsignal(number) is before


def test_a_signal_during_the_start_ends_it(tiny_llama: Path, tmp_path: Path) -> None:
    options = (*CPU, "--api-key", KEY)
    with running_engine("serve", str(tiny_llama), *options, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not list(tmp_path.glob("hookline-*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert list(tmp_path.iterdir()) == []
    assert b"Traceback" not in said


def test_a_file_of_keys_is_never_taken_for_an_open_door(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        module._read_keys(str(file))
