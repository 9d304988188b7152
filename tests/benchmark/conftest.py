"""A small model without a checkpoint, as benchmarks run it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hookline.benchmark.roofline import Limits
from hookline.benchmark.setup import Bench, Subject, make_bench
from hookline.config import EngineConfig
from hookline.engine import Engine
from tests.conftest import TINY
from tests.source_tree import ROOT

LIMITS = Limits(4.3e12, 790e12, 650e12, "of this test")


def load_script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def tiny_config(**fields: Any) -> dict[str, Any]:
    """The tiny model's `config.json`."""
    return {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5} | TINY | fields


def start_bench(**fields: Any) -> Bench:
    """The tiny model with random weights, ready to be measured; `fields` go into its config."""
    subject = Subject("tiny", "config", tiny_config(**fields))
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 4 * 2**20, "prefix_caching": False}
    config = EngineConfig("tiny", load_format="random", **options)
    return make_bench(subject, Engine(config, reader=subject.reader()), LIMITS)


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """One for all tests; each leaves it without requests."""
    made = start_bench()
    with made.engine:
        yield made


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The tiny model's config as a file."""
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(tiny_config()))
    return path
