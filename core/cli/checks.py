"""The checks of `engine doctor`. Nothing here imports torch or a plugin's model: what is broken must not break this."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from hookline.config import Environment, PluginOptions, read_environment
from hookline.errors import HooklineError
from hookline.model_store import DEFAULT_MODEL, find_pullable
from hookline.plugins import Plugin, PluginRegistry, PluginState

_OLDEST_PYTHON = (3, 11)
# Oldest that works, newest that is tested.
_TORCH = ("2.11", "2.13")
_TRITON = ("3.6", "3.7")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")
_PROBE_SECONDS = 120
_FREE_DISK = 300 * 10**6


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        found: what is there.
        remedy: what to do; "" for nothing. One that is not a failure may have advice too.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


def run_checks(options: PluginOptions) -> list[Check]:
    """All checks, in the order of the report."""
    environment = read_environment()
    torch = probe_package("torch")
    return [
        check_python(),
        Check("system", True, f"{platform.system()} {platform.release()}, {platform.machine()}"),
        check_cpu(),
        check_memory(torch),
        check_version("torch", torch, *_TORCH),
        check_triton(),
        check_device(torch),
        check_native(torch),
        check_cache(environment.cache_dir),
        *check_plugins(options),
        check_model(environment),
    ]


def probe_package(name: str) -> dict[str, Any]:
    """What `hookline.cli.probe` says of a package, imported in a process of its own; `error` where it cannot be."""
    command = [sys.executable, "-m", "hookline.cli.probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it takes more than {_PROBE_SECONDS} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ends with code {done.returncode}"])[-1]
        return {"error": last}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_python() -> Check:
    """Python's version and which one it is."""
    ok = sys.version_info >= _OLDEST_PYTHON
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    remedy = "" if ok else f"Make a virtual environment with Python {wanted} or newer."
    return Check("python", ok, f"{platform.python_version()}, {sys.executable}", remedy)


def check_cpu() -> Check:
    """Model, cores, and what of its arithmetic helps."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        by_name = {name.strip(): value.strip() for name, _, value in reversed(fields)}
        model = by_name.get("model name", model)
        flags = set((by_name.get("flags") or by_name.get("Features") or "").split())
    features = ", ".join(name for name in _CPU_FEATURES if name in flags) or "none known"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("cpu", True, f"{model}, {cores} cores, features: {features}")


def check_memory(torch: dict[str, Any]) -> Check:
    """Memory of the machine, and what the engine may use of it as far as that is known."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = torch.get("available_memory")
    free = "" if available is None else f", {_gibibytes(available)} of them available"
    return Check("memory", True, f"{_gibibytes(total)}{free}")


def check_version(name: str, found: dict[str, Any], oldest: str, newest: str) -> Check:
    """Whether a package can be imported, and its version against the tested range."""
    tested = f"tested from {oldest} to {newest}"
    if "error" in found:
        remedy = f"Reinstall it: {sys.executable} -m pip install --force-reinstall '{name}>={oldest}'"
        return Check(name, False, f"cannot be imported: {found['error']}", remedy)
    version = Version(found["version"])
    if version < Version(oldest):
        return Check(
            name, False, f"{version}, {tested}", f"Upgrade it: {sys.executable} -m pip install '{name}>={oldest}'"
        )
    newer = version.release[:2] > Version(newest).release[:2]
    return Check(name, True, f"{version}, {tested}", f"It is newer than what is tested, {newest}." if newer else "")


def check_triton() -> Check:
    """As for torch, but only Linux has it."""
    if sys.platform != "linux":
        return Check("triton", True, "not needed on this system")
    return check_version("triton", probe_package("triton"), *_TRITON)


def check_device(torch: dict[str, Any]) -> Check:
    """The CUDA devices that torch sees. None is fine; a driver that torch cannot use deserves a word."""
    devices = torch.get("devices", [])
    if devices:
        shown = [
            f"{device['name']} (sm {device['capability']}), {_gibibytes(device['free'])} of "
            f"{_gibibytes(device['total'])} free"
            for device in devices
        ]
        return Check("cuda", True, "; ".join(shown))
    has_driver = shutil.which("nvidia-smi") is not None
    advice = (
        "An NVIDIA driver is installed, but torch sees no device: install a CUDA build of torch, or run nvidia-smi."
    )
    return Check("cuda", True, "none found; the CPU is used", advice if has_driver else "")


def check_native(torch: dict[str, Any]) -> Check:
    """Whether the CPU's own kernels are there. Without them all works, slower."""
    if "no_native_kernels" not in torch:
        return Check("cpu kernels", True, "not known without torch")
    reason = torch["no_native_kernels"]
    if reason is None:
        return Check("cpu kernels", True, "built for this CPU")
    return Check("cpu kernels", True, f"none: {reason}", "Decoding on the CPU is faster with gcc: install it.")


def check_cache(folder: Path) -> Check:
    """Whether the cache folder, or where it will be made, can be written and has room."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    elsewhere = "Set HOOKLINE_CACHE_DIR to a folder"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check("cache folder", False, f"{folder} cannot be written", f"{elsewhere} that can be.")
    free = shutil.disk_usage(there).free
    found = f"{folder}, {_gibibytes(free)} free"
    if free < _FREE_DISK:
        return Check("cache folder", False, found, f"Free some space, or {elsewhere.lower()} on another disk.")
    return Check("cache folder", True, found)


def check_plugins(options: PluginOptions) -> Iterator[Check]:
    """A line a plugin, after importing each."""
    try:
        plugins = PluginRegistry(options).check()
    except HooklineError as error:
        yield Check("plugins", False, error.message, error.hint)
        return
    if not plugins:
        yield Check("plugins", False, "none installed", "Install the one of your model: pip install hookline-<family>")
    for plugin in plugins:
        yield _check_plugin(plugin)


def _check_plugin(plugin: Plugin) -> Check:
    served = ", ".join(claim.architecture for claim in plugin.claims if not claim.is_gguf) or "nothing"
    what = f"{plugin.distribution} {plugin.version}, {plugin.state}"
    if plugin.state is PluginState.OK:
        return Check(f"plugin {plugin.id}", True, f"{what}, serves {served}")
    if plugin.state is PluginState.DISABLED:
        return Check(f"plugin {plugin.id}", True, f"{what}: {plugin.reason}")
    remedies = {
        PluginState.INCOMPATIBLE: f"Install versions that fit: pip install --upgrade hookline {plugin.distribution}",
        PluginState.CONFLICT: "Choose with --plugin ARCH=DISTRIBUTION, or uninstall all but one.",
    }
    mend = f"Reinstall it (pip install --force-reinstall {plugin.distribution}), or leave it out: -p no:{plugin.id}"
    return Check(f"plugin {plugin.id}", False, f"{what}: {plugin.reason}", remedies.get(plugin.state, mend))


def check_model(environment: Environment) -> Check:
    """Whether the default model is there; it is fetched on first use, so its absence is no failure."""
    model = find_pullable(DEFAULT_MODEL)
    if model is not None and model.is_pulled(environment.cache_dir):
        return Check("default model", True, f"{DEFAULT_MODEL} is pulled: {model.path(environment.cache_dir)}")
    return Check(
        "default model",
        True,
        f"{DEFAULT_MODEL} is not pulled",
        f"First use fetches it, or: engine pull {DEFAULT_MODEL}",
    )


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
