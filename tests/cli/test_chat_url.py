"""`engine chat --url` against a small server: the same conversation, and what can be wrong with a server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.cli.main import engine as command
from hookline.cli.remote import RemoteServer, split_url
from hookline.errors import ServerError, UsageError
from tests.cli.interruptible import running_engine

KEY = "a-long-secret"
MODELS = {"data": [{"id": "tiny", "max_model_len": 512}, {"id": "other"}]}


class FakeServer(ThreadingHTTPServer):
    """Answers each question with the next of `answers`: a list of chunks, or a status and an object.

    A chunk that is None keeps the answer open until the client has gone.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[list[Any] | tuple[int, Any]] = []
        self.models: tuple[int, Any] = (200, MODELS)
        self.key = ""
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.give(*(self.server.models if self.is_open() else (401, {"error": {"message": "No."}})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append({"path": self.path, **body})
        answer = self.server.answers.pop(0)
        if isinstance(answer, tuple):
            self.give(*answer)
            return
        self.protocol_version = "HTTP/1.1"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in answer:
            if chunk is None:
                while self.rfile.read1(100):
                    continue
                self.server.gone.set()
                return
            data = f": still here\r\n\r\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
            for piece in (data[:7], data[7:-9], data[-9:]):  # a client must not count on whole events
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        end = b"data: [DONE]\n\n"
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))

    def is_open(self) -> bool:
        return not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"

    def give(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def piece(reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}


def answer(text: str, reason: str = "stop", tokens: int = 3) -> list[Any]:
    details = {"prompt_tokens": 20, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 16}}
    middle = len(text) // 2
    chunks = [piece(role="assistant", content=""), piece(content=text[:middle]), piece(content=text[middle:])]
    return [*chunks, piece(reason), {"choices": [], "usage": details}]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def chat(url: str, lines: list[str], *arguments: str, **environment: str) -> Result:
    text = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(command, ["chat", "--url", url, *arguments], input=text, env=environment)


def test_the_conversation_is_sent_and_answered(server: FakeServer, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    server.answers = [answer("Grüße 😀"), answer("Two", "length")]
    lines = ["One?", "/stats", "Two?", f"/save {saved}"]
    result = chat(f"{server.url}/v1/", lines, "--system", "Be brief.", "--max-tokens", "6", "--logit-bias", "5=-1.5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Grüße 😀\nTwo\n"
    first, second = server.bodies
    assert first["path"] == "/v1/chat/completions"
    assert first["model"] == "tiny"
    assert (first["temperature"], first["max_tokens"], first["logit_bias"]) == (0.0, 6, {"5": -1.5})
    assert first["stream_options"] == {"include_usage": True}
    assert not {"top_p", "stop", "n", "seed"} & first.keys()
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages] == ["Be brief.", "One?", "Grüße 😀", "Two?", "Two"]
    assert second["messages"] == messages[:4]
    assert "20 tokens, 16 of them from the prefix cache" in result.stderr
    assert re.search(r"context +23 of 512 tokens", result.stderr)
    assert "cut at --max-tokens 6" in result.stderr


def test_a_full_context_is_said(server: FakeServer) -> None:
    server.answers = [answer("a", "length", tokens=492)]
    assert "the context of 512 tokens is full" in chat(server.url, ["a"]).stderr


def test_what_the_model_thinks_goes_to_stderr(server: FakeServer) -> None:
    server.answers = [
        [
            piece(reasoning="Hm", reasoning_content="Hm"),
            piece(reasoning_content=", so"),
            piece(content="Yes."),
            piece("stop"),
        ]
    ]
    result = chat(server.url, ["a"])
    assert (result.stdout, result.stderr) == ("Yes.\n", "Hm, so\n\n")


def test_a_model_may_be_named(server: FakeServer) -> None:
    server.answers = [answer("a")]
    assert chat(server.url, ["a"], "--model", "other").exit_code == 0
    assert server.bodies[0]["model"] == "other"
    result = chat(server.url, ["a"], "--model", "third")
    assert result.exit_code == 3
    assert "serves no model third" in result.stderr and "tiny, other" in result.stderr


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((400, {"error": {"message": "too long", "param": "messages"}}), "the server says: too long"),
        ((404, {"error": {"message": "no model"}}), "the server says: no model"),
        ((429, {"error": {"message": "the queue is full"}}), "says: the queue is full"),
        ((500, ["odd"]), "says: status 500 Internal Server Error"),
        ([piece(content="Half"), {"error": {"message": "the engine died"}}], "the server failed: the engine died"),
        ([piece(content="Half")], "broke off"),
        ([["no object"]], "no JSON object"),
    ],
)
def test_an_error_ends_the_answer_alone(server: FakeServer, refusal: Any, words: str, tmp_path: Path) -> None:
    server.answers = [refusal, answer("Fine")]
    result = chat(server.url, ["a", "b"])
    assert result.exit_code == 0
    assert words in result.stderr
    assert result.stdout.endswith("Fine\n")
    assert len(server.bodies[1]["messages"]) == 1


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = chat(f"http://127.0.0.1:{port}", ["a"])
    assert result.exit_code == 8
    assert "cannot be reached" in result.stderr and "engine serve" in result.stderr


@pytest.mark.parametrize("models", [(404, {"detail": "x"}), (200, {"no": 1}), (200, "x"), (200, {"data": [1]})])
def test_a_server_of_something_else(server: FakeServer, models: tuple[int, Any]) -> None:
    server.models = models
    result = chat(server.url, ["a"])
    assert result.exit_code == 8
    assert "no server of OpenAI's API" in result.stderr


def test_a_server_that_loads_says_so(server: FakeServer) -> None:
    server.models = (503, {"error": {"message": "The model is loading."}})
    result = chat(server.url, ["a"])
    assert result.exit_code == 8 and "The model is loading." in result.stderr


def test_keys(server: FakeServer, tmp_path: Path) -> None:
    server.key = KEY
    file, wrong, empty = tmp_path / "key", tmp_path / "wrong", tmp_path / "empty"
    file.write_text(f"# keys\n\n{KEY}\nsecond-key\n")
    wrong.write_text("another-key")
    empty.write_text("\n")
    server.answers = [answer("a"), answer("b")]
    assert chat(server.url, ["a"], "--api-key-file", str(file)).exit_code == 0
    assert chat(server.url, ["a"], HOOKLINE_API_KEYS=f"{KEY},second-key").stdout == "b\n"
    for arguments, code, words in (
        ([], 8, "wants an API key"),
        (["--api-key-file", str(wrong)], 8, "does not take this API key"),
        (["--api-key-file", str(empty)], 2, "has no key"),
        (["--api-key-file", str(tmp_path / "none")], 3, "cannot be read"),
    ):
        result = chat(server.url, ["a"], *arguments)
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
        assert KEY not in result.output and "another-key" not in result.output


def test_options_of_the_engine_are_refused(server: FakeServer) -> None:
    result = chat(server.url, ["a"], "--dtype", "float32", "--max-running", "2")
    assert result.exit_code == 2
    assert "--dtype, --max-running cannot be given with --url" in result.stderr


def test_addresses() -> None:
    assert split_url("https://[::1]:8000/sub/v1/").geturl() == "https://[::1]:8000/sub"
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://a:0", "http://[a"):
        with pytest.raises(UsageError, match="--url"):
            split_url(url)
    with pytest.raises(ServerError):
        RemoteServer("http://no-such-host.invalid")


def test_interrupt_closes_the_connection_and_not_the_program(server: FakeServer) -> None:
    server.answers = [[piece(content="Half"), None], answer("Whole")]
    with running_engine("chat", "--url", server.url, bufsize=0, stdin=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"a\n")
        assert process.stdout.read(4) == b"Half"
        process.send_signal(signal.SIGINT)
        assert server.gone.wait(60), "the server was not told"
        output, messages = process.communicate(b"b\n/stats\n", timeout=60)
    assert process.returncode == 0
    assert output == b"\nWhole\n"
    assert b"(stopped)" in messages and b"requests     1 in" in messages
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["a", "Half", "b"]


def test_no_torch_is_needed(server: FakeServer) -> None:
    server.answers = [answer("a")]
    code = (
        "import sys; from hookline.cli.main import engine\n"
        f"engine(['chat', '--url', '{server.url}'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b"a\n", capture_output=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout) == (0, b"a\n"), done.stderr
