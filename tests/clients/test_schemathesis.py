"""Suite F2: requests to all routes, made from our OpenAPI document; replies are held against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.clients.server import KEY, running_server
from tests.source_tree import ROOT

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SEED = 20_261_130
# Requests a route at most; most routes take no body and have few that differ.
EXAMPLES = 110
WANTED = 500
SERVED = 10
SECONDS = 300
ROUTES = (
    *(("GET", path) for path in ("/health", "/livez", "/readyz", "/startup", "/metrics", "/version", "/plugins")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{model_id}", "/tokenizer_info")),
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")),
)
# What the document offers, and a fuzzer would take: thousands of answers to one call.
LIMITS = ("--max-n", "2", "--max-prompts", "4", "--max-model-len", "128", "--max-messages", "32")


def read_replies(report: Path) -> Counter[tuple[str, int]]:
    """How often each route answered with each status."""
    found: Counter[tuple[str, int]] = Counter()
    for line in report.read_text().splitlines():
        event = json.loads(line).get("ScenarioFinished")
        if event is not None:
            label, interactions = event["recorder"]["label"], event["recorder"]["interactions"].values()
            found.update((label, entry["response"]["status_code"]) for entry in interactions)
    return found


def test_no_request_of_the_document_breaks_the_server(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with running_server(checkpoint("llama"), *LIMITS, "--drain-seconds", "1") as server:
        headers = {"authorization": f"Bearer {KEY}"}
        question = {"prompt": "The sea", "max_tokens": 8, "temperature": 0}
        before = httpx.post(f"{server.url}/v1/completions", headers=headers, json=question).json()["choices"]
        report = tmp_path / "report.ndjson"
        options = {
            "header": f"Authorization:Bearer {KEY}",
            "checks": CHECKS,
            "phases": "fuzzing",
            "max-examples": EXAMPLES,
            "seed": SEED,
            "request-timeout": 20,
            "suppress-health-check": "all",
            "generation-database": "none",
            "warnings": "off",
            "report": "ndjson",
            "report-ndjson-path": report,
        }
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-shrink"]
        command += ["--continue-on-failure", *(f"--{name}={value}" for name, value in options.items())]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.clients.fuzz_hooks", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            command, cwd=tmp_path, env=os.environ | hooks, capture_output=True, text=True, timeout=SECONDS
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        replies = read_replies(report)
        assert replies.total() >= WANTED
        assert {route for route, _ in replies} >= {f"{method} {path}" for method, path in ROUTES}
        for route in ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"):
            assert replies[route, 200] >= SERVED, replies
            assert replies[route, 400] >= SERVED, replies
        after = httpx.post(f"{server.url}/v1/completions", headers=headers, json=question).json()["choices"]
        assert after == before
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
