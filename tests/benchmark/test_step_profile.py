"""Where a step's time goes: the arithmetic on spans of a GPU, and a real trace on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hookline.benchmark.measure import Choice
from hookline.benchmark.setup import Bench
from hookline.benchmark.step_profile import Span, from_spans, profile_decode, with_traffic
from hookline.benchmark.traffic import Traffic
from hookline.benchmark.workload import Lengths
from hookline.errors import HooklineError


def spans_of_steps(gap: float, steps: int = 3) -> list[Span]:
    """Steps of three kernels each: 10, 4 and 4 us with 1 us between; the last two overlap by 2 us."""
    found, start = [], 100.0
    for _ in range(steps):
        found += [
            Span("product", start, start + 10),
            Span("norm", start + 11, start + 15),
            Span("norm", start + 13, start + 17),
        ]
        start += 17 + gap
    return found


def test_kernels_by_name_the_longest_first() -> None:
    found = from_spans(spans_of_steps(gap=20.0), steps=3, wall=120.0)
    assert [(row.name, row.calls, row.microseconds) for row in found.rows] == [("product", 1, 10), ("norm", 2, 8)]
    assert found.wall == 40
    # Overlapping kernels keep the device busy once.
    assert found.busy == pytest.approx(16)
    assert found.gap == pytest.approx(20)
    assert [kernel["percent"] for kernel in found.to_dict()["kernels"]] == pytest.approx([1000 / 18, 800 / 18])


def test_spans_may_come_in_any_order() -> None:
    spans = spans_of_steps(gap=20.0)
    assert from_spans(spans[::-1], 3, 120.0) == from_spans(spans, 3, 120.0)


def test_a_device_that_never_waits_has_no_gap() -> None:
    spans = [Span("a", float(start), float(start + 10)) for start in range(0, 50, 10)]
    found = from_spans(spans, steps=5, wall=50.0)
    assert (found.gap, found.busy) == (0, 10)


def test_one_step_has_the_gap_within_it() -> None:
    assert from_spans([Span("a", 0.0, 1.0), Span("a", 4.0, 5.0)], steps=1, wall=5.0).gap == 3


def test_bytes_stand_beside_the_kernels_that_are_known() -> None:
    """A kernel of ours has its own; the library's products have theirs together."""
    names = ("rms_norm_kernel", "nvjet_tst_64x8", "void cutlass::Kernel2<gemm>", "at::native::elementwise_kernel")
    spans = [Span(name, 10.0 * place, 10.0 * place + 4) for place, name in enumerate(names)]
    found = with_traffic(from_spans(spans, 1, 40.0), Traffic({"rms_norm_kernel": 2_000_000, "gone": 5}, 24_000_000))
    assert [(row.name, row.bytes) for row in found.rows] == [
        (names[0], 2_000_000),
        *((name, None) for name in names[1:]),
    ]
    assert found.rows[0].bytes_per_second == 0.5e12
    assert found.library is not None
    assert (found.library.calls, found.library.microseconds, found.library.bytes_per_second) == (2, 8, 3e12)
    lines = list(found.lines())
    assert lines[0].split()[-4:] == ["MB", "a", "step", "TB/s"]
    assert lines[1].split()[-2:] == ["2", "0.5"]
    assert lines[2].split()[-1] == "%"
    assert lines[5].split()[-2:] == ["24", "3"]


def test_without_the_library_there_is_no_row_for_it() -> None:
    assert with_traffic(from_spans([Span("rms_norm_kernel", 0.0, 1.0)], 1, 1.0), Traffic({}, 10)).library is None


def test_a_trace_of_decode_steps(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    found = profile_decode(bench.engine, 3, Lengths(9, 5), Choice(), 4, file)
    assert json.loads(file.read_text())["traceEvents"]
    assert found.steps == 4
    assert found.gap is None
    assert 0 < found.busy <= found.wall * 1.5
    assert sum(row.microseconds for row in found.rows) == pytest.approx(max(found.wall, found.busy), rel=0.01)
    assert any("aten::" in row.name for row in found.rows)
    lines = list(found.lines())
    assert lines[0].split()[:2] == ["kernel", "calls"]
    (end,) = [index for index, line in enumerate(lines) if line.startswith("4 steps:")]
    assert lines[end + 2].split()[:3] == ["product,", "alone", "rows"]
    assert {line.split()[1] for line in lines[end + 3 :]} == {"3"}
    assert {line.split()[0] for line in lines[end + 3 :]} == {one.name for one in found.products}
    assert all(one["bytes_per_second"] > 0 for one in found.to_dict()["products"])
    assert not bench.engine.has_work
    assert bench.engine.pool.num_referenced == 0


def test_a_context_that_ends_too_soon_is_told(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with pytest.raises(HooklineError, match="1 requests ended before the decode steps were traced"):
        profile_decode(bench.engine, 1, Lengths(450, 5), Choice(), 40, file)
    assert not bench.engine.has_work
    assert bench.engine.pool.num_referenced == 0


def test_requests_that_fail_end_the_trace(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.engine.loaded.opened.model

    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no forward today")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(HooklineError, match="no forward today"):
        profile_decode(bench.engine, 1, Lengths(9, 5), Choice(), 2, tmp_path / "trace.json")
    assert not bench.engine.has_work
