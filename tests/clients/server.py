"""A real server for tests: `engine serve` in processes of its own, and clients beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil

START_SECONDS = 120
END_SECONDS = 30
KEY = "a-key-for-tests"
_READY = re.compile(r"^Serving on (http://\S+)$", re.MULTILINE)


@dataclass
class Server:
    """A running `engine serve`.

    Attributes:
        url: without a path.
        process: the HTTP process; the engine process is its child.
        said: lines of its stderr so far.
    """

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)

    def client(self, key: str = KEY, **options: object) -> openai.OpenAI:
        """OpenAI's client of this server, which does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)  # type: ignore[arg-type]

    def async_client(self) -> openai.AsyncOpenAI:
        """The asynchronous one."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def model(self) -> str:
        """The name of what is served."""
        return self.client().models.list().data[0].id

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        answer = httpx.post(f"{self.url}/tokenize", headers={"authorization": f"Bearer {KEY}"}, json={"prompt": text})
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def engine_process(self) -> psutil.Process:
        """The process that runs the model."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "hookline.serving.process.engine_process" in child.cmdline()]
        return engine

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).raise_for_status().text
        total, found = 0.0, False
        for line in text.splitlines():
            match = re.fullmatch(rf"hookline:{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total, found = total + float(match[2]), True
        if not found:
            raise KeyError(f"{name} with {labels} is not among the metrics:\n{text}")
        return total


@contextmanager
def running_server(model: str | Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server on a free port, ready; it must end well when it is told to, and never say its key."""
    server = start_server(model, options, environment or {})
    try:
        yield server
    finally:
        ended = stop_server(server)
    assert ended == 0, "".join(server.said)
    assert not [line for line in server.said if "Traceback" in line or KEY in line], "".join(server.said)


def start_server(
    model: str | Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Server:
    """Starts `engine serve` on a free port and waits until it says where it serves."""
    command = [sys.executable, "-c", "from hookline.cli.main import main; main()", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HOOKLINE_API_KEYS": KEY} | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    server, ready = Server(process), threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            server.said.append(line)
            if match := _READY.match(line):
                server.url = match[1]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(START_SECONDS) or not server.url:
        process.kill()
        raise RuntimeError(f"engine serve did not start:\n{''.join(server.said)}")
    return server


def stop_server(server: Server) -> int:
    """Ends a server as a supervisor does; gives its exit code."""
    server.process.terminate()
    try:
        return server.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise
