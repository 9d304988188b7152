"""Compiles the native kernels (C) for this machine's CPU, and loads them: the `native` rows of the kernels' tables.

Each element type has a library of its own, built by the machine's C compiler when it is first asked for, which takes a
few seconds, and kept in Triton's cache beside Triton's own. Where there is no compiler, the tables fall back to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from triton.runtime.cache import get_cache_manager

_FOLDER = Path(__file__).parent
HEADER = _FOLDER / "native.h"
SOURCES = tuple(_FOLDER / name for name in ("native.c", "native_attention.c", "native_quantized.c"))
LANES = 16
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-fPIC")
_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_SECONDS = 120
_PRODUCTS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "linear": (_int, [*[_pointer] * 4, *[_long] * 4, _int, _int]),
    "linear_packed_silu": (_int, [*[_pointer] * 4, *[_long] * 3, _int, _int]),
    "linear_packed": (_int, [*[_pointer] * 4, *[_long] * 3, _int, _int, _int]),
    "unpack": (None, [*[_pointer] * 2, *[_long] * 2, _int, _int]),
    "embedding_packed": (_long, [*[_pointer] * 3, *[_long] * 3, _int]),
    "rms_norm": (None, [*[_pointer] * 4, *[_long] * 3, _float, _int]),
    "silu_and_mul": (None, [*[_pointer] * 2, *[_long] * 3, _int]),
    "rotary": (None, [*[_pointer] * 3, *[_long] * 5]),
    "rotary_cache_write": (_long, [*[_pointer] * 6, *[_long] * 7, _int]),
    "attention_decode": (_int, [*[_pointer] * 7, _float, _float, _int]),
    "attention_prefill": (_int, [*[_pointer] * 8, _float, _float, _int]),
    "cache_write": (_long, [*[_pointer] * 3, *[_long] * 4]),
}


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


def native(dtype: torch.dtype) -> ctypes.CDLL:
    """The library of an element type.

    Raises:
        RuntimeError: there is none; `why_not` says why before.
    """
    found = load(dtype)
    if found.library is None:
        raise RuntimeError(f"no native kernels for {dtype}: {found.reason}")
    return found.library


def why_not(x: torch.Tensor) -> str | None:
    """Why native kernels cannot take tensors like x; None where they can."""
    return why_not_on(x.device, x.dtype)


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why native kernels cannot take tensors of `dtype` on `device`; None where they can."""
    return load(dtype).reason if device.type == "cpu" else f"it is for the CPU and the tensor is on {device}"


@cache
def has_native_16bit_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` by instructions of its own; never for a type of another width."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name, False)) for name in _PRODUCTS.get(dtype, ()))


@cache
def load(dtype: torch.dtype) -> Native:
    """Builds the library of an element type where the cache does not have it, and loads it; asks only once."""
    if dtype not in _DEFINES:
        return Native(None, f"there are no native kernels for {dtype}")
    openmp = _openmp()
    if openmp is None:
        return Native(None, "torch does not run on GNU OpenMP here, whose threads the native kernels share")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return Native(None, "there is no C compiler (gcc or cc) on the PATH")
    try:
        # Torch's own copy answers for the OpenMP calls, so that both use one set of threads.
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(_built(compiler, _DEFINES[dtype]))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return Native(None, f"{compiler} could not build them: {output.strip()[:500]}")
    for name, (answer, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = answer, arguments
    return Native(library, None)


def _openmp() -> str | None:
    """The OpenMP library that torch has loaded, if it is GNU's."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line.split(maxsplit=5)[5] for line in lines if "libgomp" in line), None)


def _built(compiler: str, defines: tuple[str, ...]) -> str:
    """Path of the library, from the cache or newly built for exactly this source, compiler and CPU."""
    version = _run([compiler, "--version"])
    parts = (*(path.read_text() for path in (HEADER, *SOURCES)), version, _cpu(), *_FLAGS, *defines)
    manager = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    found = manager.get_file("native.so")
    if found is not None:
        return str(found)
    with tempfile.TemporaryDirectory() as folder:
        whole, objects = Path(folder) / "native.so", [Path(folder) / f"{path.stem}.o" for path in SOURCES]
        for path, part in zip(SOURCES, objects, strict=True):
            _run([compiler, *_FLAGS, *defines, "-c", str(path), "-o", str(part)])
        _run([compiler, "-shared", *map(str, objects), "-o", str(whole), "-lm"])
        return str(manager.put(whole.read_bytes(), "native.so", binary=True))


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


def _cpu() -> str:
    """What the compiler's `native` depends on: a home folder may serve several machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(named)])
