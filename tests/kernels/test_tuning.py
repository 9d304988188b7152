"""The table of tuned products: look-up, files and their faults; the sweep with made-up times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline_kernels import tuning
from hookline_kernels.linear_small import SmallConfig
from hookline_kernels.tune_linear import LLAMA_8B, Product, around, coarse, line, split_ways, sweep
from hookline_kernels.tuning import BUCKETS, Device, TunedChoice, dump, heuristic, merge, parse

H200 = Device("NVIDIA H200", 132, (9, 0))
GPU = torch.device("cuda", 0)
ONE = TunedChoice(
    device=H200.name, dtype="bfloat16", kind="plain", n=4096, k=4096, m=8, config=SmallConfig(splits=4), us=9.5
)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None, str | None], None]]:
    """Puts texts in place of the shipped file and of the user's."""

    class Manager:
        def get_file(self, name: str) -> str | None:
            return str(tmp_path / name) if (tmp_path / name).exists() else None

        def put(self, data: str, name: str, binary: bool) -> str:
            assert not binary
            (tmp_path / name).write_text(data)
            return str(tmp_path / name)

    def install(shipped: str | None, users: str | None) -> None:
        for name, text in (("shipped.json", shipped), ("linear.json", users)):
            if text is not None:
                (tmp_path / name).write_text(text)
        tuning.forget()

    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(tuning, "get_cache_manager", lambda key: Manager())
    monkeypatch.setattr(tuning, "device_facts", lambda device: H200)
    tuning.forget()
    yield install
    tuning.forget()


def look_up(tokens: int, n: int = 4096, kind: str = "plain", dtype: torch.dtype = torch.bfloat16) -> SmallConfig | None:
    return tuning._configuration(GPU, dtype, kind, n, 4096, tokens)


def test_the_nearest_larger_number_of_tokens_decides(tables: Any) -> None:
    vector = replace(ONE, m=1, config=SmallConfig(form="vector", block_n=4))
    library = replace(ONE, m=32, config=None)
    tables(dump([ONE, library, vector]), None)
    assert look_up(1) == vector.config
    assert look_up(2) == look_up(8) == ONE.config
    assert look_up(9) is None and look_up(32) is None
    assert look_up(33) == heuristic(H200, torch.bfloat16, "plain", 4096, 4096, 33)
    for other in ({"n": 4112}, {"kind": "wide"}, {"dtype": torch.float16}):
        assert look_up(8, **other) == heuristic(H200, torch.bfloat16, "plain", other.get("n", 4096), 4096, 8)  # type: ignore[arg-type]


def test_the_users_choices_are_kept_over_the_shipped_ones(tables: Any) -> None:
    tables(dump([ONE, replace(ONE, m=16)]), None)
    mine = replace(ONE, config=SmallConfig(form="columns"))
    path = tuning.store([mine])
    assert look_up(8) == mine.config and look_up(16) == ONE.config
    tuning.store([replace(mine, kind="wide")])
    assert {choice.kind for choice in parse(path.read_text(), "")} == {"plain", "wide"}
    assert look_up(8) == mine.config


def test_without_files_there_is_the_heuristic(tables: Any) -> None:
    assert look_up(4) == heuristic(H200, torch.bfloat16, "plain", 4096, 4096, 4) is not None


def test_what_is_written_is_read() -> None:
    choices = merge([ONE, replace(ONE, m=64, config=None)], [replace(ONE, us=9.0, library_us=14.25)])
    assert parse(dump(choices), "") == tuple(sorted(choices, key=lambda choice: choice.key))
    assert len(choices) == 2 and choices[0].us == 9.0
    assert parse(dump([]), "") == ()


def test_the_shipped_table_is_sound() -> None:
    for choice in tuning.shipped():
        assert choice.m in BUCKETS


GOOD: dict[str, Any] = json.loads(dump([ONE]))["choices"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": None}, "device"),
        ({"n": "4096"}, "n must be"),
        ({"n": True}, "n must be"),
        ({"k": -1}, "k must be"),
        ({"m": 7}, "m must be one of"),
        ({"kind": "fat"}, "kind"),
        ({"kind": "gated", "n": 5}, "even"),
        ({"us": "fast"}, "us must be"),
        ({"us": float("nan")}, "us must be"),
        ({"colour": 1}, "unknown colour"),
        ({"choice": "cublas"}, "library"),
        ({"choice": None}, "library"),
        ({"choice": {"block_n": 16}}, "form"),
        ({"choice": {"form": ["rows"]}}, "form"),
        ({"choice": {"form": "rows", "tile": 1}}, "configuration"),
        ({"choice": {"form": "rows", "block_n": 24}}, "block_n"),
        ({"choice": {"form": "rows", "splits": [1]}}, "splits"),
        ({"choice": {"form": "vector", "block_n": 4}}, "m = 1"),
    ],
    ids=str,
)
def test_an_unsound_choice_is_refused(change: dict[str, Any], message: str) -> None:
    text = json.dumps({"format": 1, "choices": [GOOD, {**GOOD, **change}]})
    with pytest.raises(ValueError, match=f"(?s)mine.json.*choice 1: .*{message}.*delete"):
        parse(text, "mine.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2, "choices": []}',
        '{"format": 1}',
        '{"format": 1, "choices": [3]}',
        json.dumps({"format": 1, "choices": [GOOD, GOOD]}),
    ],
)
def test_an_unsound_file_is_refused_and_named(text: str, tables: Any) -> None:
    with pytest.raises(ValueError, match=r"mine.json: .*tune again"):
        parse(text, "mine.json")
    tables(None, text)
    with pytest.raises(ValueError, match=r"linear.json: "):
        look_up(8)


@pytest.mark.parametrize("kind", ["plain", "gated", "wide"])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64])
def test_the_heuristic_fits_the_machine(kind: str, tokens: int) -> None:
    for n, k in ((28672, 4096), (4096, 14336), (4096, 4096), (128256, 4096), (64, 64), (2, 8), (576, 1536)):
        config = heuristic(H200, torch.bfloat16, kind, n, k, tokens)
        if config is not None:
            assert config.shared_bytes(tokens, 2, kind == "gated") <= 200 * 1024 and config.form == "rows"
            assert config.splits == 1 or k // config.splits >= 512
    assert heuristic(H200, torch.float32, kind, 4096, 4096, tokens) is None
    assert heuristic(H200, torch.bfloat16, kind, 4096, 4100, tokens) is None
    assert heuristic(replace(H200, capability=(7, 5)), torch.float16, kind, 4096, 4096, tokens) is None


def test_candidates_fit_and_differ() -> None:
    for product in LLAMA_8B:
        for tokens in (1, 16, 32, 64):
            first = coarse(product, tokens, 132)
            assert len(set(first)) == len(first) and any(config.form == "columns" for config in first)
            assert any(config.form == "vector" for config in first) == (tokens == 1)
            for config in (*first, *around(first[0], tokens, product.kind == "gated", True)):
                assert config.shared_bytes(tokens, 2, product.kind == "gated") <= 227 * 1024
    assert first[0] not in around(first[0], 16, False, True)
    assert split_ways(first[0], Product("tiny", "plain", 16, 16), 132) == [replace(first[0], splits=1)]


class MadeUp:
    """Times by a formula, with a best configuration that is not in the coarse list."""

    def __init__(self, library_us: float = 14.0) -> None:
        self.library_us, self.compiled, self.timed = library_us, 0, 0

    def compile(self, configs: Sequence[SmallConfig]) -> None:
        self.compiled += len(configs)

    def wrong(self, config: SmallConfig) -> str | None:
        return "worst error 1" if config.form == "vector" else None

    def time(self, config: SmallConfig | None, replays: int) -> float:
        self.timed += 1
        if config is None:
            return self.library_us
        assert config.form != "vector"
        us = 10.0 + abs(config.block_n - 64) + abs(config.stages - 6) + abs(config.splits - 4) - 2.0 * config.pdl
        return us + (config.warps != 8) + (config.form == "rows")


def test_the_sweep_finds_the_best_and_takes_the_library_where_it_is_faster() -> None:
    product = Product("o", "plain", 4096, 4096)
    lines: list[str] = []
    trials = {1: MadeUp(), 8: MadeUp(library_us=8.0)}
    found = list(sweep([product], [1, 8], report=lines.append, prepare=lambda product, tokens: trials[tokens]))
    best = found[0].config
    assert best is not None and (best.form, best.block_n, best.stages, best.splits) == ("columns", 64, 6, 4)
    assert best.pdl and best.warps == 8 and found[0].us == 8.0
    assert found[1].config is None and found[1].library_us == 8.0 and found[1].us == 8.0
    assert len(lines) == 2 and "unusable" in lines[0] and "-> library" in lines[1] and "o " in lines[0]
    assert parse(dump(found), "") == tuple(found)
    assert "TB/s" in line(found[0])


def test_the_sweep_ends_with_its_time() -> None:
    lines: list[str] = []
    assert list(sweep(LLAMA_8B, [1], seconds=0.0, report=lines.append, prepare=lambda *_: MadeUp())) == []
    assert lines == ["no time left for 5 of 5"]
