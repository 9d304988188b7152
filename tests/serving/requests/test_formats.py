"""Parsers by name: what an operator gets wrong is told before anything is loaded, whatever the model's files are."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE
from hookline.cli import serve as serve_command
from hookline.cli.main import engine as engine_command
from hookline.config import EngineConfig
from hookline.errors import NoPluginError, UsageError
from hookline.loading import architecture_name
from hookline.parsers.hermes import HermesFormat
from hookline.parsers.think import ThinkFormat
from hookline.plugins import PluginRegistry
from hookline.serving import server
from hookline.serving.requests.formats import Formats, peek_architecture
from hookline.serving.server_config import REASONING_FIELDS, ServerConfig
from tests.cli.interruptible import running_engine

GLM = Path(__file__).parents[2] / "data" / "tiny-glm5.2-mtp"
GLM_NAME = "GlmMoeDsaForCausalLM"
PATIENCE = 60.0


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model="tiny"), **fields)


def gguf(key: bytes = b"general.architecture", text: bytes = b"llama", kind: int = 8, magic: bytes = b"GGUF") -> bytes:
    head = struct.pack("<4sIQQQ", magic, 3, 0, 1, len(key)) + key
    return head + struct.pack("<IQ", kind, len(text)) + text


# -- the architecture at a glance --------------------------------------------------------------------------------------


def test_a_glance_finds_what_the_reader_finds(smollm2: Path, tiny_llama: Path) -> None:
    for model in (GLM, smollm2, smollm2.parent if smollm2.is_file() else smollm2, tiny_llama):
        assert peek_architecture(model) == architecture_name(open_checkpoint(model).hf_config)


def test_a_glance_at_each_kind_of_folder(tmp_path: Path) -> None:
    named = {"architectures": ["A", "B"]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    assert peek_architecture(tmp_path) == "A"
    (tmp_path / "model.gguf").write_bytes(gguf())
    assert peek_architecture(tmp_path) == "gguf.llama"
    (tmp_path / "adapter.safetensors").touch()  # of something else
    assert peek_architecture(tmp_path) == "gguf.llama"
    for name in (SINGLE_FILE, INDEX_FILE):
        (tmp_path / name).touch()
        assert peek_architecture(tmp_path) == "A"
        (tmp_path / name).unlink()
    (tmp_path / "hookline-snapshot.json").write_text(json.dumps({"hf_config": {"architectures": ["C"]}}))
    assert peek_architecture(tmp_path) == "C"


@pytest.mark.parametrize("text", ["", "[]", "{", "5", '{"architectures": 5}', '{"architectures": []}', '"\\ud800"'])
def test_files_that_do_not_tell_are_left_to_the_engine(text: str, tmp_path: Path) -> None:
    assert peek_architecture(tmp_path / "nothing") is None
    assert peek_architecture(tmp_path) is None
    (tmp_path / "config.json").write_text(text)
    assert peek_architecture(tmp_path) is None
    (tmp_path / "hookline-snapshot.json").write_text(text)
    assert peek_architecture(tmp_path) is None


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"GGUF", gguf(magic=b"GGML"), gguf(key=b"general.name"), gguf(kind=4), gguf(text=b"x" * 257)),
        *(gguf(text=b"\xff"), gguf()[:-1] + b"\xff"),
    ],
)
def test_gguf_files_that_do_not_tell(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    assert peek_architecture(tmp_path / "a.gguf") is None
    (tmp_path / "b.gguf").write_bytes(gguf())
    assert peek_architecture(tmp_path) is None  # which of them it is


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert peek_architecture(tmp_path) is None
    assert peek_architecture(tmp_path / "config.json") is None


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_are_the_records_or_the_operators() -> None:
    registry = PluginRegistry()
    own = Formats.find(config(), registry, GLM_NAME)
    assert type(own.tools).__name__ == "Glm45ToolFormat" and type(own.reasoning).__name__ == "Glm45ReasoningFormat"
    chosen = Formats.find(config(tool_parser="hermes", reasoning_parser="think"), registry, GLM_NAME)
    assert type(chosen.tools) is HermesFormat and type(chosen.reasoning) is ThinkFormat
    assert Formats.find(config(tool_parser="", reasoning_parser=""), registry, GLM_NAME) == Formats(None, None)
    for kind in ("tool", "reasoning"):
        with pytest.raises(UsageError, match=f"{kind} parser called 'x'"):
            Formats.find(config(**{f"{kind}_parser": "x"}), registry, GLM_NAME)
    with pytest.raises(NoPluginError):
        Formats.find(config(), registry, "NobodysForCausalLM")


def test_a_wrong_name_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GLM / "config.json").read_text())  # there are no weights to load
    with running_engine("serve", str(tmp_path), "--port", "0", "--tool-parser", "nonsense") as process:
        _, said = process.communicate(timeout=PATIENCE)
    text = said.decode()
    assert process.returncode == UsageError.exit_code
    assert "no tool parser called 'nonsense'" in text and "Known for" in text and "glm45" in text
    assert "weights" not in text and "Traceback" not in text


def test_the_option_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServerConfig] = []
    monkeypatch.setattr(serve_command, "find_model", lambda config: GLM)
    monkeypatch.setattr(server, "serve", lambda config, listener, **options: found.append(config))
    asked = ["serve", str(GLM), "--port", "0"]
    assert CliRunner().invoke(engine_command, asked).exit_code == 0
    assert CliRunner().invoke(engine_command, [*asked, "--reasoning-fields", "reasoning"]).exit_code == 0
    assert [config.reasoning_fields for config in found] == ["both", "reasoning"]


def test_names_of_reasoning() -> None:
    for name in REASONING_FIELDS:
        assert config(reasoning_fields=name).reasoning_fields == name
    with pytest.raises(UsageError, match="reasoning_fields is 'thoughts'") as caught:
        config(reasoning_fields="thoughts")
    assert "both, reasoning, reasoning_content" in (caught.value.hint or "")
