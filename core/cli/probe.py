"""Imports a package and prints what it is, as JSON: `python -m hookline.cli.probe torch`.

`engine doctor` runs this in a process of its own, so that a package that crashes at import is found and not fatal.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def probe(name: str) -> dict[str, Any]:
    """Version of the package `name`; for torch its devices too, and whether there are native kernels."""
    module = importlib.import_module(name)
    found: dict[str, Any] = {"version": str(module.__version__)}
    if name == "torch":
        from hookline.memory_planner import available_memory
        from hookline_kernels.native import load

        cuda = module.cuda
        found["cuda"] = module.version.cuda
        found["devices"] = [_describe_device(cuda, index) for index in range(cuda.device_count())]
        found["available_memory"] = available_memory(module.device("cpu"))
        found["no_native_kernels"] = load(module.float32).reason
    return found


def _describe_device(cuda: Any, index: int) -> dict[str, Any]:
    major, minor = cuda.get_device_capability(index)
    free, total = cuda.mem_get_info(index)
    return {"name": cuda.get_device_name(index), "capability": f"{major}.{minor}", "free": free, "total": total}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
