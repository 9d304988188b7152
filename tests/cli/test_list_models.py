"""`engine list-models`, `engine plugins` and the group `engine`, as commands of their own process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hookline.cli.main import EngineGroup, engine
from hookline.errors import NotEnoughMemoryError
from tests.plugin_fixtures import GROUP, arch_source, build_wheel, install_plugin, install_wheel, run_engine
from tests.source_tree import ROOT

FAULTS = {
    # distribution: source, requirement, state and reason once checked
    "hookline-good": (arch_source("Good", "Good2/good"), "hookline", "ok", ""),
    "hookline-raises": ("raise RuntimeError('no luck')", "hookline", "broken", "RuntimeError: no luck"),
    "hookline-exits": ("raise SystemExit(7)", "hookline", "broken", "SystemExit: 7"),
    "hookline-syntax": ("def :", "hookline", "broken", "SyntaxError"),
    "hookline-newer": ("raise RuntimeError", "hookline>=99", "incompatible", "needs hookline>=99"),
    "hookline-misspelt": (
        arch_source("Misspelt", more="@hookimpl\ndef hookline_read_confg(): ..."),
        "hookline",
        "broken",
        "did you mean hookline_read_config",
    ),
    "hookline-argument": (
        arch_source("Argument", more="@hookimpl\ndef hookline_read_config(path): ..."),
        "hookline",
        "broken",
        "{'path'}",
    ),
    "hookline-one": (arch_source("Twice"), "hookline", "conflict", "hookline-two 1.0"),
    "hookline-two": (arch_source("Twice"), "hookline", "conflict", "hookline-one 1.0"),
}
CLAIMS = {"hookline-good": ("Good", "Good2", "gguf.good"), "hookline-one": ("Twice",), "hookline-two": ("Twice",)}


def architectures(distribution: str) -> Sequence[str]:
    return CLAIMS.get(distribution, (distribution.removeprefix("hookline-").title(),))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good plugin, one with each fault, and one whose metadata is damaged."""
    folder = tmp_path_factory.mktemp("faulty")
    for distribution, (source, requirement, _, _) in FAULTS.items():
        install_plugin(folder, distribution, source, architectures(distribution), requires=[requirement])
    install_plugin(folder, "hookline-damaged", "", "[hookline.architectures]\nno equals sign\n")
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the core and what it needs for listing: no torch, no transformers, no plugin."""
    folder = tmp_path_factory.mktemp("bare")
    for package in ("hookline", "click", "pluggy", "packaging", "platformdirs"):
        spec = util.find_spec(package)
        assert spec and spec.submodule_search_locations
        (folder / package).symlink_to(Path(next(iter(spec.submodule_search_locations))).resolve())
    install_wheel(build_wheel(folder / "wheels", "hookline", "0.1.0", {}, "", requires=[]), folder)
    return folder


def run_bare(bare: Path, *arguments: str, plugins: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", "from hookline.cli.main import main; main()", *arguments],
        env={"PYTHONPATH": os.pathsep.join(map(str, filter(None, (bare, plugins)))), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )


def line_of(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line.split())


def test_every_faulty_plugin_is_listed_and_harms_no_command(faulty: Path) -> None:
    for command in ("list-models", "plugins"):
        result = run_engine(command, folder=faulty)
        assert (result.returncode, result.stderr) == (0, "")
        for plugin in (name.removeprefix("hookline-") for name in FAULTS):
            assert line_of(result.stdout, plugin)
        assert "incompatible: needs hookline>=99" in line_of(result.stdout, "newer")
        assert "conflict: " in line_of(result.stdout, "one")
        assert "--plugin Twice=hookline-two" in line_of(result.stdout, "two")
        assert "broken: metadata is damaged" in line_of(result.stdout, "damaged")
        assert "gguf.good" not in result.stdout


def test_check_finds_every_fault_and_exits_5(faulty: Path) -> None:
    result = run_engine("plugins", "--check", "--json", folder=faulty)
    assert (result.returncode, result.stderr) == (5, "")
    answer = json.loads(result.stdout)
    assert answer["schema"] == "hookline.plugins/1"
    rows = {row["distribution"]: row for row in answer["plugins"]}
    for distribution, (_, _, state, reason) in FAULTS.items():
        assert rows[distribution]["state"] == state, rows[distribution]
        assert reason in rows[distribution]["reason"]
        assert rows[distribution]["architectures"] == [name for name in architectures(distribution) if "." not in name]
    assert rows["hookline-good"]["gguf"] == ["gguf.good"]
    assert set(rows["hookline-good"]) == {
        *("id", "distribution", "version", "origin", "state", "reason", "architectures", "gguf")
    }


def test_check_is_content_with_plugins_that_the_user_left_out(bare: Path, faulty: Path) -> None:
    result = run_bare(bare, "--no-plugins", "plugins", "--check", plugins=faulty)
    assert result.returncode == 0
    assert "no-plugins" in line_of(result.stdout, "raises")
    at_fault = ["damaged", *(name for name, row in FAULTS.items() if row[2] != "ok")]
    left_out = [part for name in at_fault for part in ("-p", f"no:{name}")]
    result = run_bare(bare, *left_out, "plugins", "--check", plugins=faulty)
    assert result.returncode == 0, result.stdout
    assert line_of(result.stdout, "good").endswith("ok")


def test_long_reads_the_records_and_marks_what_cannot_be_read(faulty: Path) -> None:
    result = run_engine("list-models", "--long", folder=faulty)
    assert (result.returncode, result.stderr) == (0, "")
    assert "EXAMPLE REPOSITORIES" in result.stdout
    for cell in ("bfloat16, float16, float32", "safetensors", "a/b", "ok"):
        assert cell in line_of(result.stdout, "Good")
    assert "broken: hookline-raises 1.0 cannot be imported: RuntimeError: no luck" in line_of(result.stdout, "Raises")
    rows = json.loads(run_engine("list-models", "--long", "--json", folder=faulty).stdout)["architectures"]
    by_name = {row["architecture"]: row for row in rows}
    assert by_name["Good"]["example_repositories"] == ["a/b"]
    assert by_name["Exits"]["status"] == "broken"
    assert by_name["Exits"]["encodings"] is None


def test_json_has_stable_keys(faulty: Path) -> None:
    answer = json.loads(run_engine("list-models", "--json", folder=faulty).stdout)
    assert set(answer) == {"schema", "engine_version", "architectures"}
    assert answer["schema"] == "hookline.list-models/1"
    keys = {"architecture", "plugin", "distribution", "version", "status", "reason"}
    assert all(set(row) == keys for row in answer["architectures"])
    names = [row["architecture"] for row in answer["architectures"]]
    assert names == sorted(names, key=str.casefold)


@pytest.mark.parametrize(
    ("arguments", "environment", "states"),
    [
        (["--plugin", "Twice=two"], {}, {"one": "disabled", "two": "ok"}),
        (["--plugin", "Twice=hookline-one"], {}, {"one": "ok", "two": "disabled"}),
        (["-p", "no:one"], {}, {"one": "disabled", "two": "ok"}),
        ([], {"HOOKLINE_DISABLE_PLUGINS": "hookline-two"}, {"one": "ok", "two": "disabled"}),
        (["--no-plugins"], {}, {"one": "disabled", "two": "disabled", "good": "disabled"}),
    ],
)
def test_flags_resolve_a_conflict(
    faulty: Path, arguments: list[str], environment: dict[str, str], states: dict[str, str]
) -> None:
    result = run_engine(*arguments, "list-models", "--json", folder=faulty, environment=environment)
    found = {row["plugin"]: row["status"] for row in json.loads(result.stdout)["architectures"]}
    assert found == found | states


def test_nothing_heavy_and_no_plugin_is_imported(faulty: Path) -> None:
    code = """
import sys
from hookline.cli.main import engine
for arguments in (["--help"], ["list-models"], ["plugins"], ["list-models", "--long"]):
    engine(arguments, standalone_mode=False)
    plugins = {name.split(".")[0] for name in sys.modules} & {"hookline_good", "hookline_raises", "hookline_llama"}
    heavy = {"torch", "triton", "transformers", "numpy", "rich"} & set(sys.modules)
    print("IMPORTED", sorted(heavy), bool(plugins), file=sys.stderr)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(faulty)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr.splitlines() == ["IMPORTED [] False"] * 3 + ["IMPORTED [] True"]


def test_our_plugins_come_and_go_on_their_own(bare: Path, tmp_path: Path) -> None:
    """Each from its own project, the others there or not."""
    projects = {file.parent.name: tomllib.loads(file.read_text()) for file in ROOT.glob("plugins/*/pyproject.toml")}
    served = {
        name: {claim for claim in project["project"]["entry-points"][GROUP] if "." not in claim}
        for name, project in projects.items()
    }
    assert {"llama", "mixtral", "qwen2_moe"} <= served.keys()
    folders = {}
    for name, tables in projects.items():
        project, package = tables["project"], f"hookline_{name}"
        sources = (ROOT / "plugins" / name / package).glob("*.py")
        files = {f"{package}/{source.name}": source.read_text() for source in sources}
        claims, requires = project["entry-points"][GROUP], project["dependencies"]
        wheel = build_wheel(tmp_path / "wheels", project["name"], project["version"], files, claims, requires)
        folders[name] = (install_wheel(wheel, tmp_path), tmp_path / package)

    def listed() -> set[str]:
        result = run_bare(bare, "list-models", "--json", plugins=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        rows = json.loads(result.stdout)["architectures"]
        assert all(row["status"] == "ok" for row in rows)
        return {row["architecture"] for row in rows}

    left = dict(served)
    assert listed() == set().union(*left.values())
    for name in served:
        for folder in folders[name]:
            shutil.rmtree(folder)
        del left[name]
        assert listed() == set().union(*left.values())


def test_core_alone_lists_nothing_and_says_what_to_install(bare: Path) -> None:
    for command in ("list-models", "plugins"):
        result = run_bare(bare, command)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        assert "No plugin is installed. " in result.stderr
        assert "pip install hookline-<family>" in result.stderr
    assert json.loads(run_bare(bare, "list-models", "--json").stdout)["architectures"] == []


def test_list_models_costs_little() -> None:
    # Processor time, not the clock's: other processes may hold the machine.
    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_engine("list-models").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(cost() for _ in range(5)) <= 0.3


# The group


def test_version_and_help(bare: Path) -> None:
    for flag in ("-V", "--version"):
        assert run_bare(bare, flag).stdout == "hookline 0.1.0\n"
    result = run_bare(bare, "--help")
    assert result.returncode == 0
    for command in ("list-models", "plugins", "generate", "chat", "show", "pull", "snapshot", "doctor"):
        assert line_of(result.stdout, command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list-model"], "No such command 'list-model'. Did you mean list-models?"),
        (["qqq"], "No such command 'qqq'. Commands are generate, chat"),
        (["--plugins"], "--plugin"),
        (["--plugin", "Twice", "list-models"], "expected ARCH=DISTRIBUTION"),
        (["--plugin", "A=b", "--plugin", "A=c", "list-models"], "A is given to two plugins"),
        (["-p", "llama", "list-models"], "expected no:ID"),
        (["-p", "no:", "list-models"], "expected no:ID"),
        (["-p", "no:nobody", "list-models"], "Error: -p no:nobody: no plugin 'nobody' is installed"),
        (["list-models", "extra"], "extra"),
    ],
)
def test_usage_errors_exit_2_and_leave_stdout_empty(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(engine, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_shell_completion_imports_no_command() -> None:
    items = engine.shell_complete(click.Context(engine, **engine.context_settings), "li")
    assert [(item.value, item.help) for item in items] == [("list-models", "List the architectures served.")]


def invoke_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException, *flags: str) -> Result:
    @click.command()
    def raising() -> None:
        raise error

    monkeypatch.setattr(EngineGroup, "get_command", lambda self, ctx, name: raising)
    return CliRunner().invoke(engine, [*flags, "doctor"])


def test_our_errors_become_message_hint_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    error = NotEnoughMemoryError("9 GiB are needed, 8 GiB are free.", hint="Use --max-model-len 1024.")
    result = invoke_raising(monkeypatch, error)
    assert (result.exit_code, result.stdout) == (6, "")
    assert result.stderr == "Error: 9 GiB are needed, 8 GiB are free.\nUse --max-model-len 1024.\n"
    assert "Traceback" in invoke_raising(monkeypatch, error, "--debug").stderr


def test_unexpected_errors_exit_1_and_point_at_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke_raising(monkeypatch, ZeroDivisionError("oh"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: ZeroDivisionError: oh\nThis is unexpected. See where: engine --debug ...\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    assert invoke_raising(monkeypatch, error).exit_code == 130


def test_exit_code_of_a_command_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke_raising(monkeypatch, click.exceptions.Exit(3)).exit_code == 3
