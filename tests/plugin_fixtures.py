"""Tiny third-party plugins for tests: wheels written by hand, and a folder to install them into."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hookline.config import PluginOptions
from hookline.errors import HooklineError, NoPluginError, PluginError
from hookline.plugins import Plugin, PluginRegistry

GROUP = "hookline.architectures"
NEEDS_OURS = ("hookline>=0.1",)

GOOD = """
from hookline.hookspecs import Architecture, hookimpl

@hookimpl
def hookline_architectures():
    return ({records})
"""


def arch_source(*names: str, more: str = "") -> str:
    """An `arch` module with a record for each name (`Name` or `Name/gguf_name`), then the lines of `more`."""
    records = ""
    for name in names:
        architecture, _, gguf_name = name.partition("/")
        records += f"Architecture(name={architecture!r}, gguf_name={gguf_name!r}, example_repositories=('a/b',)), "
    return GOOD.format(records=records) + more


def build_wheel(
    folder: Path,
    distribution: str,
    version: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, str] | str,
    requires: Sequence[str] = NEEDS_OURS,
) -> Path:
    """Writes a pure wheel and returns its path.

    Args:
        folder: where the wheel is written.
        distribution, version: as pip is to know it.
        files: path in the wheel to text.
        entry_points: name to value in our group, or the whole text of `entry_points.txt`.
        requires: lines of Requires-Dist.
    """
    stem = f"{distribution.replace('-', '_')}-{version}"
    if not isinstance(entry_points, str):
        entry_points = f"[{GROUP}]\n" + "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    metadata = "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n"
    tag = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents = dict(files) | {
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": tag,
        f"{stem}.dist-info/entry_points.txt": entry_points,
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in contents.items())
    contents[f"{stem}.dist-info/RECORD"] = record + f"{stem}.dist-info/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Unpacks a pure wheel into `folder`, as `pip install --target` does; returns its `dist-info` folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"


def install_plugin(
    folder: Path,
    distribution: str,
    source: str,
    claims: Sequence[str] | str,
    version: str = "1.0",
    requires: Sequence[str] = NEEDS_OURS,
) -> Path:
    """Builds a plugin whose only module is `<distribution>/arch.py` and installs it; returns its `dist-info` folder."""
    package = distribution.replace("-", "_")
    files = {f"{package}/__init__.py": "", f"{package}/arch.py": source}
    entry_points = claims if isinstance(claims, str) else dict.fromkeys(claims, f"{package}.arch")
    return install_wheel(build_wheel(folder / "wheels", distribution, version, files, entry_points, requires), folder)


def run_engine(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `engine` with the plugins of `folder` installed beside those of this environment."""
    return subprocess.run(
        [sys.executable, "-c", "from hookline.cli.main import main; main()", *arguments],
        env=os.environ | ({"PYTHONPATH": str(folder)} if folder else {}) | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fixture, once a test file has made it one: a folder on `sys.path`, whose modules are forgotten afterwards."""
    monkeypatch.delenv("HOOKLINE_DISABLE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


def row(registry: PluginRegistry, plugin_id: str) -> Plugin:
    """The plugin with this id."""
    return next(plugin for plugin in registry.plugins if plugin.id == plugin_id)


def load_failure(architecture: str, options: PluginOptions | None = None) -> HooklineError:
    """The error that loading `architecture` raises."""
    with pytest.raises((PluginError, NoPluginError)) as caught:
        PluginRegistry(options).load(architecture)
    return caught.value


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
