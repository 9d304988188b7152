"""`engine snapshot`: what it writes is a model that answers as the first one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hookline.cli.main import engine as command


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(model: Path) -> list[int]:
    options = ("--raw", "--json", "--max-tokens", "12", "--kv-cache-memory", "4MiB")
    result = run("generate", "-m", model, *options, "Once upon a time")
    assert result.exit_code == 0, result.stderr
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


def test_snapshot_answers_as_the_model_does(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snap"
    with monkeypatch.context() as patch:
        # Only weights are needed: no cache is made for it.
        patch.setattr("hookline.engine.allocate_cache", None)
        result = run("snapshot", tiny_llama, folder)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{folder}\n"
    assert answer(folder) == answer(tiny_llama)
    shown = run("show", folder, "--json", "--kv-cache-memory", "4MiB")
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["format"] == "snapshot"
    assert found["audit"]["ok"] is True
    assert found["chat_template"] is True
    options = ("--load-format", "random", "--json", "--max-tokens", "2", "--kv-cache-memory", "4MiB")
    assert run("generate", "-m", folder, *options, "Once").exit_code == 0


def test_snapshot_replaces_snapshots_and_nothing_else(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snap"
    assert run("snapshot", tiny_llama, folder).exit_code == 0
    assert run("snapshot", tiny_llama, folder).exit_code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    refused = run("snapshot", tiny_llama, other)
    assert refused.exit_code == 1
    assert "is no snapshot" in refused.stderr
    assert (other / "letter.txt").read_text() == "mine"
    (folder / "letter.txt").write_text("mine")
    refused = run("snapshot", tiny_llama, folder)
    assert refused.exit_code == 1
    assert "letter.txt" in refused.stderr
    assert (folder / "letter.txt").read_text() == "mine"


def test_wrong_path(tmp_path: Path) -> None:
    assert run("snapshot", tmp_path / "none", tmp_path / "snap").exit_code == 3
    assert not (tmp_path / "snap").exists()


def test_snapshots_with_a_draft_and_without(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp"
    drafting = ("--num-speculative-tokens", "2")
    bare, full = tmp_path / "bare", tmp_path / "full"
    assert run("snapshot", source, bare).exit_code == 0
    assert run("snapshot", source, full, *drafting).exit_code == 0
    for folder, options, code, kinds in (
        (bare, (), 0, {"missing": 0, "dropped": 0}),
        (full, drafting, 0, {"missing": 0, "dropped": 0}),
        (full, (), 0, {"missing": 0, "dropped": 22}),
        (bare, drafting, 1, {"missing": 1, "dropped": 0}),
    ):
        result = run("show", folder, "--json", *options)
        audit = json.loads(result.stdout)["audit"]
        assert result.exit_code == code
        assert {kind: len(audit[kind]) for kind in kinds} == kinds and not audit["unexpected"]
