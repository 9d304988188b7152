"""The machine that a benchmark runs on: what it is, what runs on it, and what it could do at most."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hookline.benchmark.roofline import Limits
from hookline.plugins import engine_version

# Of a device whose name holds the key: bytes a second of a kernel that only reads, FLOP a second of a large product in
# 16 bits and of the best causal attention. All measured, none from a datasheet.
_KNOWN: Mapping[str, tuple[float, float, float]] = MappingProxyType({"H200": (4.2e12, 790e12, 650e12)})
_HALF = (torch.bfloat16, torch.float16)
# Of large products, what the best known attention reaches: the ratio of the H200's two figures.
_ATTENTION_SHARE = 650 / 790

_GPU_BYTES, _CPU_BYTES = 2 * 2**30, 256 * 2**20
_GPU_SIDE, _CPU_SIDE = 8192, 1536
_REPEATS = 10


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device's name and memory (bytes), the driver where it is known, and the host."""
    found: dict[str, Any] = {
        "device": "cpu",
        "gpu": None,
        "gpu_memory": None,
        "driver": None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": str(device), "gpu": properties.name, "gpu_memory": properties.total_memory}
        found["driver"] = _driver()
    return found


def describe_versions() -> dict[str, str | None]:
    """Versions of the engine and of what it runs on; None for what is not installed."""
    return {
        "hookline": str(engine_version()),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def known_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """What is known of a device by its name; unknown for parts of a device, and for every CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return limits_by_name(name, dtype)


def limits_by_name(name: str, dtype: torch.dtype) -> Limits:
    """What is known of the GPU called `name`, for products of `dtype`."""
    for key, (bandwidth, peak, attention) in _KNOWN.items():
        if key in name.split() and "MIG" not in name:
            if dtype in _HALF:
                return Limits(bandwidth, peak, attention, f"table, {key}")
            return Limits(bandwidth, source=f"table, {key}")
    return Limits()


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """What the device does in a short test now: reading, copying (read and written bytes), and a large product.

    The better of reading and copying is the bandwidth; attention is taken to reach 82 % of the product's rate. Run it
    before an engine has taken the memory.
    """
    bandwidth, peak = _measure_bandwidth(device), _measure_peak(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine looks at what is free
    return Limits(bandwidth, peak, peak * _ATTENTION_SHARE, "measured in this run")


def _measure_bandwidth(device: torch.device) -> float:
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    source = torch.full((size // 4,), 1.0, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    reading = size / _best_seconds(source.sum, device)
    return max(reading, 2 * size / _best_seconds(lambda: target.copy_(source), device))


def _measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    side = _CPU_SIDE if device.type == "cpu" else _GPU_SIDE
    generator = torch.Generator(device).manual_seed(0)
    # Random values: with zeros the product of a GPU is faster than with any real weight.
    left = torch.empty((side, side), dtype=dtype, device=device).normal_(generator=generator)
    right = torch.empty((side, side), dtype=dtype, device=device).normal_(generator=generator)
    return 2 * side**3 / _best_seconds(lambda: left @ right, device)


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Least seconds of a call, of several after one that does not count."""
    call()
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The NVIDIA driver's version, as its own tool says; None where that cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
