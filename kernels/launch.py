"""What Triton launches share: checks of configurations, dependent launches, and counters that stay zero between them.

A kernel of a decode step lasts a few microseconds, of which the edge to the next one is a good part. On GPUs that can
(Hopper and later) the next kernel is therefore started while the one before still runs, and waits for its end itself:
each such kernel begins with `wait_for_inputs`, before it touches anything that another kernel may touch.
See "Programmatic Dependent Launch" in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Tiles of one launch that can be counted: enough for a weight [262144, K] in tiles of 16 rows.
COUNTERS = 16384


def check_choices(config: object, allowed: Mapping[str, Sequence[object]]) -> None:
    """Looks whether a kernel's configuration has values that the kernel can take.

    Args:
        config: has the attributes that `allowed` names.
        allowed: values by name, all of one type, at least one.

    Raises:
        ValueError: naming the first attribute with another value, or of another type.
    """
    for name, values in allowed.items():
        value = getattr(config, name)
        if value not in values or type(value) is not type(values[0]):
            known = ", ".join(map(str, values))
            raise ValueError(f"{type(config).__name__}: {name} must be one of {known}, got {value!r}")


@triton.jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """Lets the next kernel start, and waits for the end of the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """The arguments of a kernel that begins with `wait_for_inputs`, on a device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """COUNTERS int32, zero before and after each launch, of all launches on a device; made at the first call there.

    Whoever arrives last at a count sets it back to 0. Launches that use them must be on one stream.

    Raises:
        RuntimeError: the first call is captured in a CUDA graph: the zeros would only be written at its replays.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("arrival_counters: run the kernel once on this device before capturing it in a CUDA graph")
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
