"""Ctrl-C of the command `engine`, wherever it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.cli.main import INTERRUPTED

# A module whose import presses Ctrl-C, and swallows what is raised meanwhile, as extension modules do.
SWALLOWS = """
import os, signal, time
for press in range(PRESSES):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        print("raised inside the import", flush=True)
print("imported", flush=True)
"""
COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.HANDLER)
import click
from hookline.cli import main

@click.command()
def slow():
    import swallows
    time.sleep(1)
    print("went on", flush=True)

main.engine.get_command = lambda ctx, name: slow
sys.argv = ["engine", "doctor"]
main.main()
"""


def _run(folder: Path, presses: int, handler: str = "default_int_handler") -> subprocess.CompletedProcess[str]:
    (folder / "swallows.py").write_text(SWALLOWS.replace("PRESSES", str(presses)))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", COMMAND.replace("HANDLER", handler)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_an_interrupt_inside_an_import_waits_for_its_end(tmp_path: Path) -> None:
    result = _run(tmp_path, presses=1)
    assert (result.returncode, result.stdout, result.stderr) == (INTERRUPTED, "imported\n", "Interrupted.\n")


def test_a_second_interrupt_inside_an_import_does_not_wait(tmp_path: Path) -> None:
    result = _run(tmp_path, presses=2)
    assert result.stdout.startswith("raised inside the import\nimported\n")


@pytest.mark.parametrize("presses", [1, 2])
def test_a_caller_that_ignores_interrupts_is_obeyed(tmp_path: Path, presses: int) -> None:
    result = _run(tmp_path, presses, handler="SIG_IGN")
    assert (result.returncode, result.stdout) == (0, "imported\nwent on\n")


def test_an_error_that_cannot_be_told_keeps_its_exit_code(tmp_path: Path) -> None:
    """With stderr on a full disk."""
    command = [sys.executable, "-c", "from hookline.cli.main import main; main()", "show", str(tmp_path / "none")]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stderr=full, check=False).returncode == 3
