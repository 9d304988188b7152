"""F2: requests to all routes, made from our OpenAPI document; replies are held against it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.source_tree import ROOT
from tests.suites.raw_client import Reply
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.served import serving
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 500, Tier.T2: 20_000}
# Requests a route at most; most routes take no body and have few that differ.
_EXAMPLES = {Tier.T1: 110, Tier.T2: 5_200}
_SECONDS = {Tier.T1: 300.0, Tier.T2: 7_200.0}
_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
_LOOKED_AT = (
    *("/health", "/livez", "/ping", "/readyz", "/startup", "/load", "/metrics", "/version", "/plugins"),
    *("/v1/models", "/v1/models/{model_id}", "/tokenizer_info"),
)
_CALLED = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
# Each route that takes a body, served and refused at least so often.
_LEAST = 10
# What the document offers, and a fuzzer would take: thousands of answers to one call.
_LIMITS = ("--max-n", "2", "--max-prompts", "4", "--max-model-len", "128", "--max-messages", "32")


def run(tier: Tier, seed: int) -> SuiteReport:
    statuses = [f"POST {path} {status}" for path in _CALLED for status in (200, 400)]
    tally = Tally("F2", tier, seed, _PLANNED[tier], [*statuses, *(f"GET {path}" for path in _LOOKED_AT)])
    asyncio.run(_run(tally, tier))
    for name in statuses:
        tally.expect(tally.events[name] >= _LEAST, f"{name}: only {tally.events[name]} such replies")
    tally.expect(tally.cases >= _PLANNED[tier], f"only {tally.cases} requests were made")
    return tally.report()


async def _run(tally: Tally, tier: Tier) -> None:
    with tiny_model() as model, tempfile.TemporaryDirectory(prefix="suite-") as folder:
        async with serving(model, *_LIMITS) as served:
            watch = Watch(tally, served)
            await watch.begin()
            replies = await _fuzz(watch, tier, Path(folder))
            await watch.check("after all")
    tally.cases += replies.total()
    for (route, status), count in replies.items():
        tally.event(f"{route} {status}" if route.startswith("POST") else route, count)


async def _fuzz(watch: Watch, tier: Tier, folder: Path) -> Counter[tuple[str, int]]:
    """How often each route answered with each status."""
    tally, port, report = watch.tally, watch.served.port, folder / "report.ndjson"
    options = {
        "checks": _CHECKS,
        "phases": "fuzzing",
        "max-examples": _EXAMPLES[tier],
        "seed": tally.seed,
        "request-timeout": 20,
        "suppress-health-check": "all",
        "generation-database": "none",
        "warnings": "off",
        "report": "ndjson",
        "report-ndjson-path": report,
    }
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", "--no-shrink"]
    command += ["--continue-on-failure", *(f"--{name}={value}" for name, value in options.items())]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.suites.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    with (folder / "said").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=os.environ | hooks, stdout=said, stderr=said
        )
        try:
            await asyncio.wait_for(process.wait(), _SECONDS[tier])
        except TimeoutError:
            process.kill()
            await process.wait()
    text = (folder / "said").read_text(errors="replace")
    told = text.partition("FAILURES")[2] or text[-500:]
    tally.expect(process.returncode == 0, f"Schemathesis ends with {process.returncode}: {told[:500]}")
    if process.returncode not in (0, 1):  # its report is not whole
        return Counter()
    found: Counter[tuple[str, int]] = Counter()
    for label, reply in _replies(report):
        found[label, reply.status] += 1
        watch.reply(label, reply)
    return found


def _replies(report: Path) -> Iterator[tuple[str, Reply]]:
    """The replies of a report, each with its route; a line of it has all of one scenario."""
    with report.open() as lines:
        for line in lines:
            recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
            for entry in recorder.get("interactions", {}).values():
                if response := entry.get("response"):  # Schemathesis has told of those that got none
                    yield recorder["label"], _reply(response)


def _reply(response: dict[str, Any]) -> Reply:
    headers = {name: ", ".join(values) for name, values in response["headers"].items()}
    return Reply(response["status_code"], headers, base64.b64decode((response["content"] or {}).get("$base64", "")))
