"""`engine bench`: each measure runs on a tiny shape, says what it is told to, and every mistake has its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from hookline.cli.bench import bench
from hookline.cli.main import engine as command
from tests.benchmark.conftest import config_file, tiny_config

__all__ = ["config_file"]

CPU = ("--device", "cpu", "--kv-cache-memory", "4MiB")
SIZES = ("--input-len", "12", "--output-len", "5")
SUBCOMMANDS = sorted(bench.commands)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["bench", *(str(argument) for argument in arguments)])


def record(result: Result, file: Path) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_latency(config_file: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    options = ("--batch", "3", "--repeats", "1", "--json", out, "--profile", trace, "--profile-steps", "2")
    result = run("latency", "--config", config_file, *CPU, *SIZES, *options)
    found = record(result, out)
    assert found["measure"] == "latency"
    assert found["model"]["source"] == "config"
    assert found["settings"]["workload"]["batch"] == 3
    assert found["settings"]["max_batch_tokens"] == 8192
    assert found["settings"]["prefix_caching"] is False
    assert {"tpot", "prefill_batch", "decode_rate"} <= found["results"].keys()
    assert found["results"]["tpot"]["floor"] is None  # nothing is known of a CPU by its name
    assert found["profile"]["steps"] == 2
    assert json.loads(trace.read_text())["traceEvents"]
    assert "tpot" in result.stdout and "n/a" in result.stdout and "--measure-roofline" in result.stdout
    assert "calls a step" in result.stdout
    assert "repeat 1 of 1" in result.stderr and "repeat" not in result.stdout.partition("\n\n")[2]


def test_throughput_with_a_measured_roofline(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--requests", "4", "--json", out, "--measure-roofline", "--temperature", "0.8", "--top-p", "0.9")
    found = record(run("throughput", "--config", config_file, *CPU, *SIZES, *options), out)
    assert found["measure"] == "throughput"
    workload = found["settings"]["workload"]
    assert (workload["requests"], workload["mean_input"], workload["mean_output"]) == (4, 12, 5)
    assert (workload["temperature"], workload["top_p"]) == (0.8, 0.9)
    assert found["settings"]["max_running"] == 512
    results = found["results"]
    assert results["output_rate"]["value"] == pytest.approx(20 / results["total"]["value"])
    assert results["output_rate"]["percent_of_floor"] > 0
    assert found["limits"]["source"] == "measured in this run"


def test_lognormal_lengths_are_the_recipes(tmp_path: Path) -> None:
    config, out = tmp_path / "long.json", tmp_path / "out.json"
    config.write_text(json.dumps(tiny_config(max_position_embeddings=2048)))
    options = ("--requests", "2", "--lengths", "lognormal", "--json", out, "--device", "cpu")
    workload = record(run("throughput", "--config", config, *options), out)["settings"]["workload"]
    assert workload["lengths"] == "lognormal"
    assert (workload["mean_input"], workload["mean_output"]) == ((81 + 255) / 2, (119 + 104) / 2)


def test_serve(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--rate", "200", "--requests", "6", "--warmup", "2", "--json", out, "--slo-ttft", "60000")
    result = run("serve", "--config", config_file, *CPU, *SIZES, *options, "--slo-itl", "60000")
    found = record(result, out)
    times = {f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    assert times | {"request_throughput", "output_throughput", "request_goodput"} <= found["results"].keys()
    assert found["results"]["good_requests"]["value"] == 100
    assert found["settings"]["workload"]["warmup"] == 2
    assert "HTTP is not part" in result.stdout


def test_a_checkpoint_is_measured_too(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = record(run("latency", tiny_llama, *CPU, *SIZES, "--repeats", "1", "--json", out), out)
    assert found["model"]["source"] == "checkpoint"
    assert found["settings"]["load_format"] == "auto"
    # The checkpoint's end token does not end an output.
    assert found["results"]["tpot"]["value"] != 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("latency",), 2, "neither MODEL nor --shape nor --config"),
        (("latency", "--shape", "llama-8b", "--config", "x.json"), 2, "--shape and --config are given"),
        (("latency", "--shape", "no-such"), 2, "llama-70b, llama-8b"),
        (("latency", "--config", "no-such.json"), 3, "no-such.json does not exist"),
        (("latency", "no-such-model"), 3, "no-such-model"),
        (("latency", "--shape", "llama-8b", "--temperature", "-1"), 2, "temperature"),
        (("latency", "--shape", "llama-8b", "--json", "no/such/folder/x.json"), 2, "--json"),
        (("latency", "--shape", "llama-8b", "--profile", "no/such/folder/x.json"), 2, "--profile"),
        (("latency", "--shape", "llama-8b", "--batch", "0"), 2, "--batch"),
        (("latency", "--shape", "llama-70b", "--device", "cpu", "--dtype", "float32"), 6, "The weights take"),
        (("serve", "--shape", "llama-8b"), 2, "neither --rate nor --concurrency"),
        (("serve", "--shape", "llama-8b", "--rate", "1", "--concurrency", "1"), 2, "both given"),
        (("serve", "--shape", "llama-8b", "--rate", "0"), 2, "the rate is 0.0"),
        (("nothing",), 2, "No such command"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_a_workload_beyond_the_context_is_refused(config_file: Path) -> None:
    result = run("latency", "--config", config_file, *CPU, "--input-len", "510", "--output-len", "5")
    assert result.exit_code == 2
    assert "515 tokens" in result.stderr and "512" in result.stderr


def test_an_architecture_that_nobody_serves(tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    config.write_text(json.dumps(tiny_config(architectures=["NobodyServesThis"])))
    assert run("latency", "--config", config, "--device", "cpu").exit_code == 4


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_measure_and_option_has_help(name: str) -> None:
    found = bench.commands[name]
    assert found.help is not None and f"  engine bench {name}" in found.help
    options = [option for option in found.params if isinstance(option, click.Option)]
    assert all(option.help for option in options)
    assert "prefix_caching" not in {option.name for option in options}


def test_help_imports_no_torch() -> None:
    code = "import sys, hookline.cli.bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    result = run("throughput", "--help")
    shown = " ".join(result.stdout.split())
    assert "[default: 8192; " in shown and "[default: 512; " in shown
