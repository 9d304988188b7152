"""GuideLLM, a load generator: it finds the server healthy, learns the model's name, and measures without an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.server import KEY, Server

# Its processes are made by one that has imported what it consists of, which takes each of them seconds else.
GUIDELLM = """
import multiprocessing
multiprocessing.set_forkserver_preload(["guidellm.cli"])
from guidellm.cli import cli
cli()
"""
REQUESTS, PROMPT, OUTPUT, ROUTE = 24, 48, 16, "/v1/chat/completions"


def test_a_load_is_measured(tiny_server: Server, tiny_llama: Path, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "backend": {
            "kind": "openai_http",
            "target": tiny_server.url,
            "request_format": "/v1/chat/completions",
            "api_key": KEY,
        },
        "profile": {"kind": "concurrent", "streams": [8]},
        "constraint": {"kind": "max_requests", "count": REQUESTS},
        "tokenizer": {"kind": "hf_auto", "model": str(tiny_llama)},
        "data": {"kind": "synthetic_text", "prompt_tokens": PROMPT, "output_tokens": OUTPUT},
        "output": {"kind": "json", "path": str(tmp_path / "report.json")},
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", json.dumps(value))]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    offline |= {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__MP_CONTEXT_TYPE": "forkserver"}
    ran = subprocess.run(
        [sys.executable, "-c", GUIDELLM, "run", *options, "--disable-console-interactive"],
        cwd=tmp_path,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    state = benchmark["scheduler_state"]
    assert (state["successful_requests"], state["errored_requests"], state["cancelled_requests"]) == (REQUESTS, 0, 0)
    assert benchmark["config"]["backend"]["model"] == "tiny"
    requests = benchmark["requests"]["successful"]
    assert len(requests) == REQUESTS
    # What the server says of each request, not what the client would count.
    assert {request["output_tokens"] for request in requests} == {OUTPUT}
    assert all(PROMPT <= request["prompt_tokens"] < 2 * PROMPT for request in requests)
    for request in requests:
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
