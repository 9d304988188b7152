"""Plans: their sums, and errors whose remedies really work."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.config import EngineConfig, Percent, ResolvedConfig, bytes_of, parse_bytes, parse_memory, resolve
from hookline.errors import NotEnoughMemoryError, UsageError
from hookline.memory_planner import MemoryPlanner, _cgroup_available, _within, available_memory, format_bytes
from hookline.model import CacheSpec, TransformerConfig

MIB, GIB = 2**20, 2**30
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


def resolved(device: str = "cpu", **options: Any) -> ResolvedConfig:
    dtype = options.pop("dtype", "float32")
    return resolve(EngineConfig("m", **options), device, dtype)


def plan(available: int, weights: int = 10 * MIB, measured: tuple[int, int] | None = None, **options: Any) -> Any:
    config = resolved(**{"max_batch_tokens": 512, "max_running": 64, **options})
    return MemoryPlanner(CONFIG, config).plan([SPEC], weights, available, measured)


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
    config = resolved(kv_cache_memory=20 * MIB)
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
        (34 * MIB, {"max_model_len": 4096}),
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


# What a step that was run had in use, and captured steps, where a third of it is not foreseen.
MEASURED = (12 * MIB, 8 * MIB)


@pytest.mark.parametrize(
    ("available", "options"),
    [
        (40 * MIB, {"kv_cache_memory": Percent(90)}),
        (40 * MIB, {"max_model_len": 4096}),
        (GIB, {"max_model_len": 4096, "kv_cache_memory": MIB}),
        (GIB, {"max_model_len": 4096, "kv_cache_memory": Percent(1)}),
        (28 * MIB, {"max_batch_tokens": 8192}),
        (29 * MIB, {}),
    ],
)
def test_each_remedy_works_on_a_gpu_too(available: int, options: dict[str, Any]) -> None:
    """Where steps were measured; the setting, run again, measures what its share foresees or less."""
    options = {"device": "cuda:0", "dtype": "bfloat16", **options}
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(available, measured=MEASURED, **options)
    assert "Memory on cuda:0:" in caught.value.message and "captured decode steps" in caught.value.message
    lines = caught.value.hint.splitlines()[1:]
    assert lines
    for line in lines:
        change = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--(\S+) (\d+)", line)}
        assert change
        own, other = (
            MemoryPlanner(CONFIG, resolved(**{"max_batch_tokens": 512, "max_running": 64, **options, **more}))
            for more in ({}, change)
        )
        part = other.activation_bytes(2) / own.activation_bytes(2)
        assert part <= 1
        plan(available, measured=(int(MEASURED[0] * part), MEASURED[1]), **{**options, **change})


def test_more_than_was_reckoned_is_not_taken_for_saved() -> None:
    """A step that takes far more than reckoned keeps the surplus, whatever its settings are."""
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(128 * MIB, measured=(200 * MIB, 0), device="cuda:0")
    assert "--max-batch-tokens" not in caught.value.hint


def test_the_limits_depend_on_the_device() -> None:
    assert (resolved().max_batch_tokens, resolved().max_running) == (2048, 64)
    on_gpu = resolved("cuda:1", dtype="bfloat16")
    assert (on_gpu.max_batch_tokens, on_gpu.max_running) == (8192, 256)
    assert (on_gpu.device, on_gpu.dtype) == ("cuda:1", "bfloat16")
    assert resolved("cuda:0", max_batch_tokens=7, max_running=3).max_batch_tokens == 7
    assert resolve(EngineConfig("m", memory="80%", seed=5), "cpu", "float32").memory == Percent(80)


def test_memory_of_a_gpu() -> None:
    """Within what the engine may use, and never all that is free."""
    assert _within(140 * GIB, 141 * GIB, Percent(90)) == int(141 * GIB * 0.9)
    assert _within(50 * GIB, 100 * GIB, Percent(90)) == 48 * GIB
    assert _within(100 * GIB, 100 * GIB, 30 * GIB) == 30 * GIB
    assert _within(GIB, 100 * GIB, Percent(90)) == 0


def test_a_limit_on_a_cpu_is_a_bound() -> None:
    device = torch.device("cpu")
    assert available_memory(device, 5 * MIB) == 5 * MIB
    assert available_memory(device, 2**60) < 2**50
    assert available_memory(device, Percent(10)) < 0.2 * available_memory(device)


def test_the_cache_may_be_a_part_of_what_is_available() -> None:
    assert plan(GIB, kv_cache_memory="25%").num_blocks == GIB // 4 // (TOKEN * 16)


def test_halving_is_offered_where_it_helps_alone() -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(23 * MIB)
    assert "--dtype bfloat16" in caught.value.hint
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(2**30, kv_cache_memory=2**40)
    assert "--dtype" not in caught.value.hint


def test_no_room_for_a_block_is_an_error() -> None:
    with pytest.raises(NotEnoughMemoryError):
        plan(11 * MIB)


def test_activations_grow_with_the_budget() -> None:
    config = resolved(max_batch_tokens=100)
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


@pytest.mark.parametrize(
    ("text", "size"), [("80%", Percent(80)), (" 12.5 % ", Percent(12.5)), ("100GiB", 100 * GIB), (7, 7)]
)
def test_memory_is_bytes_or_percent(text: str | int, size: int | Percent) -> None:
    assert parse_memory(text) == size
    assert parse_memory(str(size)) == size
    assert bytes_of(size, 1000) == (size if isinstance(size, int) else 10 * size.value)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "80 percent", "half", 0, True, "0", "nan%"])
def test_bad_memory_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"kv is(?s:.*)such as 80%"):
        parse_memory(text, "kv")
    for name in ("memory", "kv_cache_memory"):
        with pytest.raises(UsageError, match=f"{name} is"):
            EngineConfig("m", **{name: text})


@pytest.mark.parametrize("text", ["", "0", "9" * 400, "0.1", "-1GiB", "1.5.2GB", "12 parsecs", "GiB", "1e9"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="kv"):
        parse_bytes(text, "kv")


def test_sizes_are_written_with_units() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * MIB, 5 * 2**30)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
