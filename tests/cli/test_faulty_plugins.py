"""Serving an architecture whose plugin is at fault: the exit code, and words that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hookline.cli.main import engine
from tests.conftest import TINY
from tests.plugin_fixtures import arch_source, install_plugin, plugin_site

site = pytest.fixture(plugin_site, name="site")

SPELLING = arch_source("Thing", more="@hookimpl\ndef hookline_read_confg(): ...")
ARGUMENT = arch_source("Thing", more="@hookimpl\ndef hookline_read_config(path): ...")


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A config alone, of the architecture `Thing`."""
    folder = tmp_path_factory.mktemp("thing")
    (folder / "config.json").write_text(json.dumps(TINY | {"architectures": ["Thing"]}))
    yield folder


@pytest.mark.parametrize(
    ("source", "requirement", "words"),
    [
        ("raise RuntimeError('no luck')", "hookline", ["hookline-thing 1.0", "RuntimeError: no luck", "Reinstall"]),
        ("import sys; sys.exit(0)", "hookline", ["hookline-thing 1.0", "SystemExit"]),
        ("def :", "hookline", ["hookline-thing 1.0", "SyntaxError"]),
        (arch_source("Thing"), "hookline>=99", ["hookline-thing 1.0", "hookline>=99", "0.1.0"]),
        (SPELLING, "hookline", ["hookline-thing 1.0", "hookline_read_confg", "hookline_read_config"]),
        (ARGUMENT, "hookline", ["hookline-thing 1.0", "hookline_read_config", "path"]),
        (arch_source("Other"), "hookline", ["hookline-thing 1.0", "Thing"]),
    ],
)
@pytest.mark.parametrize("command", ["generate", "show"])
def test_a_faulty_plugin_that_is_needed(
    site: Path, model: Path, source: str, requirement: str, words: list[str], command: str
) -> None:
    install_plugin(site, "hookline-thing", source, ["Thing"], requires=[requirement])
    arguments = ["-m", str(model), "hello"] if command == "generate" else [str(model)]
    result = CliRunner().invoke(engine, [command, *arguments, "--load-format", "random"])
    assert result.exit_code == 5, result.output
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) >= 2, "no word of what to do"


def test_two_claims_say_how_to_choose(site: Path, model: Path) -> None:
    for name in ("hookline-one", "hookline-two"):
        install_plugin(site, name, arch_source("Thing"), ["Thing"])
    arguments = ["generate", "-m", str(model), "--load-format", "random", "hello"]
    result = CliRunner().invoke(engine, arguments)
    assert result.exit_code == 5
    assert "--plugin Thing=hookline-" in result.stderr
    chosen = CliRunner().invoke(engine, ["--plugin", "Thing=hookline-one", *arguments])
    assert "conflict" not in chosen.stderr
    assert "hookline-one" in chosen.stderr  # it answers one question alone, and is told the next


def test_none_is_installed(site: Path, model: Path) -> None:
    result = CliRunner().invoke(engine, ["generate", "-m", str(model), "--load-format", "random", "hello"])
    assert result.exit_code == 4
    assert "Thing" in result.stderr
    assert "LlamaForCausalLM" in result.stderr
    assert "pip install" in result.stderr


def test_a_plugin_that_the_user_left_out(site: Path, model: Path) -> None:
    install_plugin(site, "hookline-thing", arch_source("Thing"), ["Thing"])
    result = CliRunner().invoke(
        engine, ["-p", "no:thing", "generate", "-m", str(model), "--load-format", "random", "hello"]
    )
    assert result.exit_code == 5
    assert "no:thing" in result.stderr
