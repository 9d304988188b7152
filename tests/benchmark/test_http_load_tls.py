"""Load over TLS: the same figures, of a server whose certificate is trusted and is the server's own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hookline.benchmark.http_load import send_load
from hookline.benchmark.measure import Choice
from hookline.benchmark.workload import Lengths
from hookline.errors import ServerError
from tests.benchmark.test_http_load import FakeServer, at_once, bench, load, soon, whole

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl is there to make a certificate")


def make_certificate(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate that its own server signed for `name`, as a file, and what a server needs of it."""
    file, key = folder / "certificate.pem", folder / "key.pem"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=test", "-addext", f"subjectAltName={name}")
    command = (str(OPENSSL), "req", "-x509", *kind, *names, "-keyout", str(key), "-out", str(file))
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return file, context


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def trusted(certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate that the client trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return certificate[1]


def test_a_closed_loop_uses_its_connections_again(trusted: ssl.SSLContext) -> None:
    with FakeServer(soon, trusted) as server:
        found = load(server, 20, concurrency=4)
    assert (len(found.traces), found.chunks, found.failures.total()) == (20, 60, 0)
    assert (server.most, server.connections) == (4, 4)


def test_calls_and_answers_longer_than_any_buffer(trusted: ssl.SSLContext) -> None:
    tokens = 20_000
    with FakeServer(at_once, trusted) as server:
        found = send_load(server.target, [Lengths(400_000, tokens)], Choice(), vocab_size=100, concurrency=1)
    assert len(server.bodies[0]["prompt"]) == 400_000
    assert (found.traces[0].tokens, found.chunks, found.failures.total()) == (tokens, tokens, 0)


def test_a_connection_that_was_closed_while_free_is_made_anew(trusted: ssl.SSLContext) -> None:
    seen: list[int] = []

    async def once(number: int, body: dict[str, Any]) -> bytes | None:
        seen.append(body["seed"])
        return None if seen == [0, 1] else whole(body["max_tokens"])

    with FakeServer(once, trusted) as server:
        found = load(server, 3, concurrency=1)
    assert (seen, server.connections, found.failures.total()) == ([0, 1, 1, 2], 2, 0)


def test_a_certificate_that_nobody_trusts(certificate: tuple[Path, ssl.SSLContext]) -> None:
    with FakeServer(at_once, certificate[1]) as server, pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
        load(server, 2, concurrency=1)
    assert server.bodies == []


def test_a_certificate_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, context = make_certificate(tmp_path, "DNS:other.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with FakeServer(at_once, context) as server, pytest.raises(ServerError, match=r"not valid for '127\.0\.0\.1'"):
        load(server, 2, concurrency=1)
    assert server.bodies == []


def test_the_command(trusted: ssl.SSLContext, tmp_path: Path) -> None:
    out, sizes = tmp_path / "out.json", ("--input-len", "5", "--output-len", "4", "--requests", "6", "--warmup", "0")
    with FakeServer(at_once, trusted) as server:
        url = f"https://127.0.0.1:{server.port}/v1"
        result = bench("--url", url, "--concurrency", "3", *sizes, "--json", out)
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert (found["results"]["completed"]["value"], found["results"]["failed"]["value"]) == (6, 0)
    assert any("TLS is part of" in note for note in found["notes"])
