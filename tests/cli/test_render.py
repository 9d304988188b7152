"""Progress and figures: lines where there is no terminal, nothing for what is over at once, right rates."""

from __future__ import annotations

import time

import pytest

from hookline.cli.render import ProgressDisplay, run_figures
from hookline.memory_planner import MemoryPlan
from hookline.scheduling.output import CompletionOutput, RequestOutput, Timing, Usage

PLAN = MemoryPlan(
    device="cpu", available=2**30, weights=2**20, activations=2**20, cache=2**20, num_blocks=4, block_size=16,
    max_model_len=64, model_len=64,
)  # fmt: skip


def output(
    prompt_tokens: int, new_tokens: int, cached: int, queued: float, first: float, total: float
) -> RequestOutput:
    return RequestOutput(
        request_id="request-0",
        prompt=None,
        prompt_token_ids=(0,) * prompt_tokens,
        outputs=(CompletionOutput(0, "", (0,) * new_tokens, "length"),),
        finished=True,
        usage=Usage(prompt_tokens, new_tokens, cached),
        timing=Timing(queued, first, total),
    )


def test_quick_stage_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("Loading") as progress:
        progress(5, 5)
    assert capsys.readouterr() == ("", "")


def test_lines_come_while_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("Loading", seconds=0.02) as progress:
        progress(12_000_000, 40_000_000)
        time.sleep(0.2)
    out, lines = capsys.readouterr()
    assert out == ""
    assert lines.count("Loading: 12 of 40 MB, 30 %, 0 s\n") >= 2


def test_line_before_anything_is_known_and_for_prompts() -> None:
    with ProgressDisplay("Generating", "prompts") as progress:
        assert progress.line() == "Generating: 0 s"
        progress(1, 3)
        assert progress.line() == "Generating: 1 of 3 prompts, 33 %, 0 s"


def test_another_stage_counts_anew() -> None:
    with ProgressDisplay("Loading") as progress:
        progress(2, 2)
        progress.begin("Starting", "graphs")
        assert progress.line() == "Starting: 0 s"
        progress(7, 35)
        assert progress.line() == "Starting: 7 of 35 graphs, 20 %, 0 s"


def test_bar_on_a_terminal_goes_away(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay("Loading") as progress:
        progress(1, 2)
    out, bar = capsys.readouterr()
    assert out == ""
    assert "Loading" in bar


def test_interrupt_ends_the_lines() -> None:
    with pytest.raises(KeyboardInterrupt), ProgressDisplay("Loading", seconds=60) as progress:
        raise KeyboardInterrupt
    assert progress.line().startswith("Loading: ")


def test_figures_of_one_request() -> None:
    figures = run_figures([output(40, 11, 8, queued=0.5, first=1.5, total=3.5)], 2.0, 3.5, PLAN)
    for words in (
        "load         2.00 s",
        "requests     1 in 3.50 s",
        "prompt       40 tokens, 8 of them from the prefix cache",
        "output       11 tokens",
        "first token  after 1.500 s",
        "prefill      32.0 tokens/s",
        "decode       5.0 tokens/s",
        "peak memory",
        "Memory on cpu:",
    ):
        assert words in figures


def test_figures_of_several_requests_and_of_none() -> None:
    two = [output(4, 10, 0, 0.0, 1.0, 2.0), output(4, 30, 0, 0.0, 3.0, 4.0)]
    figures = run_figures(two, 2.0, 4.0, PLAN)
    assert "first token  after 2.000 s on average, 3.000 s at most" in figures
    assert "together     10.0 tokens/s" in figures
    assert "requests     0 in" in run_figures([], 2.0, 0.0, PLAN)
