"""Plans: their sums, and errors whose remedies really work."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.config import EngineConfig, parse_bytes
from hookline.errors import NotEnoughMemoryError, UsageError
from hookline.memory_planner import MemoryPlanner, _cgroup_available, available_memory, format_bytes
from hookline.model import CacheSpec, TransformerConfig

MIB = 2**20
CONFIG = TransformerConfig(
    architecture="A",
    num_layers=4,
    hidden_size=256,
    vocab_size=1000,
    max_position_embeddings=4096,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    norm_eps=1e-5,
)
SPEC = CacheSpec("kv", 4, (("k", (2, 64)), ("v", (2, 64))), torch.float32)
TOKEN = 4 * 2 * 2 * 64 * 4


def plan(available: int, weights: int = 10 * MIB, **options: Any) -> Any:
    config = EngineConfig("m", **{"dtype": "float32", "device": "cpu", "max_batch_tokens": 512, **options})
    return MemoryPlanner(CONFIG, config).plan([SPEC], weights, available)


def test_the_cache_takes_what_was_asked() -> None:
    found = plan(2**30, kv_cache_memory=20 * MIB)
    assert found.num_blocks == 20 * MIB // (TOKEN * 16)
    assert found.cache == found.num_blocks * TOKEN * 16
    assert found.max_model_len == min(4096, found.num_blocks * 16)


def test_the_default_leaves_most_of_a_cpus_memory() -> None:
    found = plan(1024 * MIB)
    assert found.cache <= (1024 * MIB - found.weights - found.activations) // 4
    assert plan(2**40).cache <= 512 * MIB


def test_groups_add_up() -> None:
    other = CacheSpec("index", 2, (("key", (32,)),), torch.float32)
    config = EngineConfig("m", dtype="float32", device="cpu", kv_cache_memory=20 * MIB)
    found = MemoryPlanner(CONFIG, config).plan([SPEC, other], 0, 2**30)
    assert found.num_blocks == 20 * MIB // (16 * (TOKEN + 2 * 32 * 4))


def test_the_table_names_every_part() -> None:
    table = plan(2**30).table()
    for word in ("available", "weights", "activations", "cache", "left", "requests of"):
        assert word in table
    assert "short of" not in table
    assert "short of 4,096" in plan(2**30, kv_cache_memory=MIB).table()


@pytest.mark.parametrize(
    ("available", "options"),
    [
        (64 * MIB, {"kv_cache_memory": 2**40}),
        (40 * MIB, {"max_model_len": 4096}),
        (2**30, {"max_model_len": 4096, "kv_cache_memory": MIB}),
        (2**30, {"kv_cache_memory": 1}),
        (2**30, {"block_size": 10**9}),
        (2**30, {"max_batch_tokens": 10**9}),
        (2**30, {"max_running": 10**9}),
        (22 * MIB, {"max_model_len": 4096}),
    ],
)
def test_each_remedy_works(available: int, options: dict[str, int]) -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(available, **options)
    assert "Memory on cpu:" in caught.value.message
    lines = caught.value.hint.splitlines()
    remedies = [dict(re.findall(r"--(\S+) (\d+)", line)) for line in lines[1:] if "--dtype" not in line]
    assert remedies
    for found in remedies:
        assert found
        plan(available, **{**options, **{name.replace("-", "_"): int(value) for name, value in found.items()}})


def test_halving_is_offered_where_it_helps_alone() -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(11 * MIB)
    assert "--dtype bfloat16" in caught.value.hint
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(2**30, kv_cache_memory=2**40)
    assert "--dtype" not in caught.value.hint


def test_no_room_for_a_block_is_an_error() -> None:
    with pytest.raises(NotEnoughMemoryError):
        plan(11 * MIB)


def test_activations_grow_with_the_budget() -> None:
    config = EngineConfig("m", dtype="float32", device="cpu", max_batch_tokens=100)
    small = MemoryPlanner(CONFIG, config).activation_bytes(4)
    large = MemoryPlanner(CONFIG, dataclasses.replace(config, max_batch_tokens=1000)).activation_bytes(4)
    assert large > small > 0


def test_available_memory_is_within_the_machine() -> None:
    assert 0 < available_memory(torch.device("cpu")) < 2**50


def test_a_containers_limit_counts_and_idle_files_do_not(tmp_path: Path) -> None:
    assert _cgroup_available(tmp_path) is None
    for name, text in (("max", "1000\n"), ("current", "900\n"), ("stat", "anon 500\ninactive_file 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert _cgroup_available(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_available(tmp_path) is None


@pytest.mark.parametrize(("text", "count"), [("512MiB", 512 * MIB), ("2 GB", 2 * 10**9), ("1000", 1000), (7, 7)])
def test_sizes_are_parsed(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "9" * 400, "0.1", "-1GiB", "1.5.2GB", "12 parsecs", "GiB", "1e9"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="kv"):
        parse_bytes(text, "kv")


def test_sizes_are_written_with_units() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * MIB, 5 * 2**30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
