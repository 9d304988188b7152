"""Hookline: an LLM inference engine whose model architectures are plugins.

The names below are the public ones; they are imported when they are first used, so that `import hookline` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.config import EngineConfig as EngineConfig
    from hookline.config import SpeculativeConfig as SpeculativeConfig
    from hookline.engine import Engine as Engine
    from hookline.errors import HooklineError as HooklineError
    from hookline.hookspecs import Architecture as Architecture
    from hookline.hookspecs import hookimpl as hookimpl
    from hookline.sampling_params import SamplingParams as SamplingParams
    from hookline.scheduling.output import RequestOutput as RequestOutput
    from hookline.serving.process.async_engine import AsyncEngine as AsyncEngine

_HOMES = {
    "Architecture": "hookline.hookspecs",
    "AsyncEngine": "hookline.serving.process.async_engine",
    "Engine": "hookline.engine",
    "EngineConfig": "hookline.config",
    "HooklineError": "hookline.errors",
    "RequestOutput": "hookline.scheduling.output",
    "SamplingParams": "hookline.sampling_params",
    "SpeculativeConfig": "hookline.config",
    "hookimpl": "hookline.hookspecs",
}
__all__ = [
    "Architecture",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "HooklineError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
