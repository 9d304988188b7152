"""Load over HTTP against a small asyncio server: who is sent when, what counts, and what a bad server can do."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hookline.benchmark.http_load import Outcome, Target, _Stream, send_load
from hookline.benchmark.load_report import load_figures
from hookline.benchmark.measure import Choice
from hookline.benchmark.open_loop import Objectives, Trace, summarise
from hookline.benchmark.workload import Lengths, poisson_arrivals
from hookline.cli.main import engine as command
from hookline.errors import ServerError, UsageError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LOOSE = Objectives(ttft=10.0, itl=10.0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = "a", reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None})


def ending(tokens: int) -> bytes:
    usage = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}})
    return chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def whole(tokens: int, per_chunk: int = 1) -> bytes:
    """An answer, with so many tokens in each chunk."""
    return HEAD + chunk(token("ab")) * (tokens // per_chunk) + ending(tokens)


def refused(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


class FakeServer:
    """Answers each call with what `answer` gives for its number and body, and closes behind None.

    Args:
        tls: a certificate to be served with, by TLS alone.

    Attributes:
        bodies: of all calls.
        connections: how many were made.
        most: how many calls were at work at a time.
    """

    def __init__(
        self, answer: Callable[[int, dict[str, Any]], Awaitable[bytes | None]], tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer = answer
        self._tls = tls
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.connections = self.most = self._working = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", self.port, "/sub", "tiny", "a-key", self._tls is not None)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener, ssl=self._tls)
        await self._ended.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    body = b'{"data": [{"id": "tiny", "max_model_len": 512}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                    continue
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(int(length[16:]))))
                self._working += 1
                self.most = max(self.most, self._working)
                answer = await self.answer(len(self.bodies) - 1, self.bodies[-1])
                self._working -= 1
                if answer is None:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


async def at_once(number: int, body: dict[str, Any]) -> bytes:
    return whole(body["max_tokens"])


async def soon(number: int, body: dict[str, Any]) -> bytes:
    await asyncio.sleep(0.01)
    return whole(body["max_tokens"])


def load(server: FakeServer, count: int, tokens: int = 3, **options: Any) -> Outcome:
    return send_load(server.target, [Lengths(4, tokens)] * count, Choice(), vocab_size=100, **options)


def test_a_closed_loop_keeps_so_many_running() -> None:
    with FakeServer(soon) as server:
        found = load(server, 20, concurrency=4, warmup=5)
    assert len(found.traces) == 15
    assert (server.most, server.connections) == (4, 4)
    assert found.chunks == 60
    assert found.client_us_per_chunk > 0
    assert min(trace.ttft for trace in found.traces) >= 0.01
    serving = summarise(found.traces, LOOSE)
    assert (serving.input_tokens, serving.output_tokens, serving.good) == (60, 45, 15)


def test_what_is_asked() -> None:
    work = [Lengths(4, 3), Lengths(7, 2)]
    with FakeServer(at_once) as server:
        send_load(server.target, work, Choice(temperature=0.5, top_k=3), vocab_size=100, concurrency=1, seed=5)
    assert server.heads[0].startswith(b"POST /sub/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer a-key\r\n" in server.heads[0]
    first, second = server.bodies
    assert (len(first["prompt"]), first["max_tokens"], first["ignore_eos"], first["stream"]) == (4, 3, True, True)
    assert first["stream_options"] == {"include_usage": True}
    assert (first["model"], first["temperature"], first["top_k"], first["top_p"]) == ("tiny", 0.5, 3, 1.0)
    assert (len(second["prompt"]), second["seed"]) == (7, 1)
    assert all(0 <= token_id < 100 for token_id in first["prompt"] + second["prompt"])


def test_an_open_loop_sends_when_it_is_due_and_counts_from_then() -> None:
    """One request holds the server up; those that come meanwhile are sent nevertheless."""
    dues = poisson_arrivals(12, 100.0)

    async def slow(number: int, body: dict[str, Any]) -> bytes:
        if number == 0:
            await asyncio.sleep(0.2)
        return whole(body["max_tokens"])

    with FakeServer(slow) as server:
        found = load(server, 12, rate=100.0)
    assert [trace.due for trace in found.traces] == dues
    assert 0.2 <= found.traces[0].ttft < 2
    assert server.most >= 1 and len(server.bodies) == 12
    # The second came while the first was held up, and was answered before it.
    assert found.traces[1].due + found.traces[1].ttft < found.traces[0].due + found.traces[0].ttft


def test_tokens_are_those_of_the_usage_not_chunks() -> None:
    async def joined(number: int, body: dict[str, Any]) -> bytes:
        return whole(body["max_tokens"], per_chunk=4)

    with FakeServer(joined) as server:
        found = load(server, 2, tokens=8, concurrency=1)
    assert [trace.tokens for trace in found.traces] == [8, 8]
    assert [len(trace.reports) for trace in found.traces] == [2, 2]
    trace = found.traces[0]
    assert trace.tpot == pytest.approx((trace.reports[1] - trace.reports[0]) / 7)


FAULTS = {
    "status 429: the queue is full": refused(429, "the queue is full"),
    "status 500": b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"<html>") + b"0\r\n\r\n",
    "in the stream: the engine died": HEAD + chunk(token()) + chunk(event({"error": {"message": "the engine died"}})),
    "a request ended with 2 of 3 tokens": whole(2),
    "the answer is not of HTTP/1.1": b"SSH-2.0\r\n\r\n",
    "the answer's chunks are not sound": HEAD + b"zz\r\n",
}


@pytest.mark.parametrize("error", FAULTS)
def test_a_failure_is_counted_and_hurts_no_other(error: str) -> None:
    async def one_bad(number: int, body: dict[str, Any]) -> bytes:
        return FAULTS[error] if number == 3 else await at_once(number, body)

    with FakeServer(one_bad) as server:
        found = load(server, 8, concurrency=2)
    assert dict(found.failures) == {error: 1}
    assert len(found.traces) == 7


def test_an_answer_that_breaks_off() -> None:
    async def half(number: int, body: dict[str, Any]) -> bytes | None:
        return None if number == 0 else await at_once(number, body)

    with FakeServer(half) as server:
        found = load(server, 4, concurrency=1)
    assert dict(found.failures) == {"the answer broke off": 1}


def test_nothing_but_failures_is_an_error() -> None:
    async def never(number: int, body: dict[str, Any]) -> bytes:
        return refused(401, "No.")

    with FakeServer(never) as server, pytest.raises(ServerError, match="in full: status 401: No"):
        load(server, 4, concurrency=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match="refused"):
        send_load(Target("127.0.0.1", port, "", "m"), [Lengths(4, 3)], Choice(), vocab_size=9, concurrency=1)


def test_a_connection_that_was_closed_while_free_is_made_anew() -> None:
    """The server closes each connection at its second call, without a word: the call is sent again on a new one."""
    seen: list[int] = []

    async def once(number: int, body: dict[str, Any]) -> bytes | None:
        seen.append(body["seed"])
        return None if seen.count(body["seed"]) == 1 and body["seed"] in (1, 2) else whole(body["max_tokens"])

    with FakeServer(once) as server:
        found = load(server, 4, concurrency=1)
    assert not found.failures
    assert seen == [0, 1, 1, 2, 2, 3]
    assert server.connections == 3


def stream() -> _Stream:
    return _Stream(b"call", Trace(0.0, Lengths(4, 3)))


ANSWERS = {
    "chunked": whole(3),
    "two lines' ends": HEAD + chunk((token() * 3 + ending(3)[4:-7]).replace(b"\n", b"\r\n")) + b"0\r\n\r\n",
    "comments": HEAD + chunk(b": still here\n\n") + chunk(token() * 3) + ending(3),
    "words in the text": HEAD + chunk(token('"usage":{"error"')) + chunk(token("data: [DONE]")) * 2 + ending(3),
    "an end without text": HEAD + chunk(token()) * 3 + chunk(token("", "length")) + ending(3),
    "usage in each chunk": HEAD
    + b"".join(chunk(event({"choices": [{}], "usage": {"completion_tokens": n}})) for n in (1, 2, 3))
    + ending(3),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_may_come_in_any_pieces(name: str) -> None:
    data = ANSWERS[name]
    for size in (len(data), 1, 7):
        one = stream()
        for start in range(0, len(data), size):
            assert not one.ended
            one.take(data[start : start + size], float(start))
        assert (one.ended, one.error, one.keeps_open) == (True, "", True)
        assert (one.trace.tokens, len(one.trace.reports)) == (3, 3)


def test_bodies_that_are_not_chunked() -> None:
    events = token() * 3 + event({"choices": [], "usage": {"completion_tokens": 3}})
    one = stream()
    one.take(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(events), 0.0)
    one.take(events, 1.0)
    assert (one.ended, one.error, len(one.trace.reports)) == (True, "", 3)
    two = stream()
    two.take(b"HTTP/1.0 200 OK\r\n\r\n" + events, 0.0)
    assert not two.ended
    two.end_of_data()
    assert (two.ended, two.error, two.keeps_open) == (True, "", False)


@pytest.mark.parametrize("loop", [{}, {"rate": 1.0, "concurrency": 2}])
def test_one_kind_of_loop(loop: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--rate"):
        send_load(Target("127.0.0.1", 1, "", "m"), [Lengths(4, 3)], Choice(), vocab_size=9, **loop)


def test_names_are_those_of_the_field() -> None:
    trace = Trace(0.0, Lengths(4, 3), [1.0, 2.0, 4.0], 3)
    figures = {figure.name: figure.value for figure in load_figures(summarise([trace], LOOSE))}
    assert figures["mean_ttft_ms"] == 1000
    assert figures["p99_tpot_ms"] == 1500
    assert (figures["median_itl_ms"], figures["p99_itl_ms"], figures["mean_itl_ms"]) == (1000, 2000, 1500)
    assert figures["mean_e2el_ms"] == 4000
    assert (figures["request_throughput"], figures["output_throughput"]) == (0.25, 0.75)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["bench", "serve", *map(str, arguments)])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(at_once) as made:
        yield made


def test_the_command(server: FakeServer, tmp_path: Path) -> None:
    out, url = tmp_path / "out.json", f"http://127.0.0.1:{server.port}/v1"
    sizes = ("--input-len", "5", "--output-len", "4", "--requests", "6", "--warmup", "2", "--json", out)
    for loop in (("--concurrency", "3"), ("--rate", "500")):
        result = bench("--url", url, *loop, *sizes)
        assert result.exit_code == 0, result.stderr
        found = json.loads(out.read_text())
        assert (found["measure"], found["server"]["model"]) == ("serve", "tiny")
        results = {name: figure["value"] for name, figure in found["results"].items()}
        assert (results["completed"], results["failed"], results["total_output_tokens"]) == (6, 0, 24)
        assert results["client_us_per_chunk"] > 0
        assert found["settings"]["workload"][loop[0][2:]] == float(loop[1])
        assert "median ttft ms" in result.stdout
    assert max(max(body["prompt"]) for body in server.bodies) < 256


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--url", "{url}"), 2, "neither --rate nor --concurrency"),
        (("--url", "https://127.0.0.1:1", "--rate", "1"), 8, "cannot be reached"),
        (("--url", "{url}", "--rate", "1", "--max-running", "3"), 2, "--max-running cannot be given with --url"),
        (("--url", "{url}", "--rate", "1", "--shape", "a"), 2, "--shape cannot be given with --url"),
        (("--url", "{url}", "--rate", "1", "--input-len", "500"), 2, "the context of tiny 512"),
        (("--url", "{url}", "other", "--rate", "1"), 3, "serves no model other"),
        (("--url", "http://127.0.0.1:1", "--rate", "1"), 8, "cannot be reached"),
    ],
)
def test_mistakes(server: FakeServer, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = bench(*(argument.format(url=f"http://127.0.0.1:{server.port}") for argument in arguments))
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
