"""Bodies on their way in: how many bytes and threads there may be at a time, and what ends the wait."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from hookline.errors import InvalidRequestError
from hookline.serving.api_errors import ApiError
from hookline.serving.intake import LARGE_BODY, THREADS, Intake
from hookline.serving.limits import Limits
from hookline.tokenizer import Tokenizer
from tests.serving.fakes import PATIENCE, Rig, make_tokenizer

SMALL = b'{"a": 1}'


def body_of(size: int) -> bytes:
    return b'{"a":"' + b"b" * (size - 8) + b'"}'


class Client:
    """Who sends a body in parts, or only its beginning, and may leave.

    `silent` is set when all is sent.
    """

    def __init__(self, *parts: bytes, told: int | str | None = None, whole: bool = True) -> None:
        self.silent = asyncio.Event()
        self._parts = list(parts)
        self._whole = whole
        self._gone = asyncio.Event()
        headers = [] if told is None else [(b"content-length", str(told).encode())]
        self.request = Request({"type": "http", "headers": headers}, self._receive)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> Any:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts) or not self._whole}
        self.silent.set()
        await self._gone.wait()
        return {"type": "http.disconnect"}


class Work:
    """What is done with a body, which lasts until the test lets it end."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = threading.Event()
        self._begins = asyncio.Condition()
        self._loop = asyncio.get_running_loop()

    def __call__(self, value: dict[str, Any]) -> int:
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop)
        assert self.go_on.wait(PATIENCE), "nobody let the work end"
        return len(value["a"])

    async def _begin(self) -> None:
        async with self._begins:
            self.begun += 1
            self._begins.notify_all()

    async def until(self, count: int) -> None:
        """Waits until it has begun `count` times."""
        async with self._begins:
            await asyncio.wait_for(self._begins.wait_for(lambda: self.begun >= count), PATIENCE)


async def until_free(intake: Intake) -> None:
    async with asyncio.timeout(PATIENCE):
        while intake.held:
            await asyncio.sleep(0.005)


def read(intake: Intake, size: int, work: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(intake.read(Client(body_of(size)).request, work))


def test_the_bytes_of_all_large_bodies_are_bounded() -> None:
    async def run() -> None:
        intake, work = Intake(Limits(body_bytes=100_000, bodies=2)), Work()
        first, second = read(intake, 100_000, work), read(intake, 60_000, work)
        await work.until(2)
        assert intake.held == 160_000
        with pytest.raises(ApiError) as error:
            await intake.read(Client(body_of(40_001)).request, len)
        assert (error.value.status, error.value.code, error.value.retry_after) == (503, "overloaded", 2)
        assert intake.held == 160_000
        assert await intake.read(Client(SMALL).request, len) == 1  # is never kept out by large ones
        third = read(intake, 40_000, work)  # just fits
        await work.until(3)
        assert intake.held == 200_000
        work.go_on.set()
        assert [await first, await second, await third] == [99_992, 59_992, 39_992]
        await until_free(intake)
        assert await intake.read(Client(body_of(100_000)).request, len) == 1

    asyncio.run(run())


def test_a_body_counts_while_it_comes() -> None:
    async def run() -> None:
        intake = Intake(Limits(body_bytes=100_000, bodies=1))
        slow = Client(b'{"a":"', b"b" * LARGE_BODY, whole=False)
        reading = asyncio.create_task(intake.read(slow.request, len))
        await asyncio.wait_for(slow.silent.wait(), PATIENCE)
        assert intake.held == LARGE_BODY + 6
        with pytest.raises(ApiError, match="bytes of bodies"):
            await intake.read(Client(body_of(100_000)).request, len)
        slow.leave()
        with pytest.raises(ClientDisconnect):
            await reading
        assert intake.held == 0

    asyncio.run(run())


def test_a_length_of_thousands_of_digits_is_a_length() -> None:
    """Python makes no number of so many."""

    async def run() -> None:
        intake = Intake(Limits())
        assert await intake.read(Client(SMALL, told="0" * 5_000 + str(len(SMALL))).request, len) == 1
        with pytest.raises(ApiError) as error:
            await intake.read(Client(SMALL, told="9" * 5_000).request, len)
        assert error.value.status == 413

    asyncio.run(run())


def refuse(value: dict[str, Any]) -> None:
    raise InvalidRequestError("no", field="a")


@pytest.mark.parametrize(
    ("parts", "told", "work", "expected"),
    [
        ([body_of(60_000), b"x" * 40_001], None, len, ApiError),  # too large
        ([body_of(60_000)], 100_001, len, ApiError),
        ([body_of(60_000)[:-1]], None, len, ApiError),  # no JSON
        ([body_of(60_000)], None, refuse, InvalidRequestError),
        ([SMALL], None, refuse, InvalidRequestError),
    ],
)
def test_a_refused_body_leaves_nothing(parts: Sequence[bytes], told: int | None, work: Any, expected: Any) -> None:
    async def run() -> None:
        intake = Intake(Limits(body_bytes=100_000))
        with pytest.raises(expected):
            await intake.read(Client(*parts, told=told).request, work)
        await until_free(intake)

    asyncio.run(run())


def test_nobody_waits_for_the_work_of_a_client_who_has_gone() -> None:
    async def run() -> None:
        intake, work, client = Intake(Limits()), Work(), Client(body_of(50_000))
        reading = asyncio.create_task(intake.read(client.request, work))
        await work.until(1)
        client.leave()
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(reading, PATIENCE)
        assert intake.held == 50_000  # the thread goes on
        work.go_on.set()
        await until_free(intake)

    asyncio.run(run())


def test_the_work_has_a_deadline() -> None:
    async def run() -> None:
        for limits in (Limits(queue_seconds=0.05), Limits(request_seconds=0.05)):
            intake, work = Intake(limits), Work()
            with pytest.raises(ApiError) as error:
                await intake.read(Client(body_of(50_000)).request, work)
            assert (error.value.status, error.value.code, error.value.retry_after) == (503, "queue_deadline", 2)
            assert intake.held == 50_000
            work.go_on.set()
            await until_free(intake)

    asyncio.run(run())


def test_a_cancelled_call_leaves_nothing() -> None:
    async def run() -> None:
        intake, work = Intake(Limits()), Work()
        reading = read(intake, 50_000, work)
        await work.until(1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        work.go_on.set()
        await until_free(intake)

    asyncio.run(run())


def test_threads_are_few_and_what_waits_for_one_can_still_be_given_up() -> None:
    async def run() -> None:
        intake, work, late = Intake(Limits()), Work(), Client(body_of(50_000))
        busy = [read(intake, 50_000, work) for _ in range(THREADS)]
        await work.until(THREADS)
        waiting = asyncio.create_task(intake.read(late.request, work))
        async with asyncio.timeout(PATIENCE):
            while intake.held < (THREADS + 1) * 50_000:
                await asyncio.sleep(0.005)
        late.leave()
        with pytest.raises(ClientDisconnect):
            await waiting
        async with asyncio.timeout(PATIENCE):
            while intake.held > THREADS * 50_000:  # at once: no thread had begun with it
                await asyncio.sleep(0.005)
        work.go_on.set()
        await asyncio.gather(*busy)
        assert work.begun == THREADS

    asyncio.run(run())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


ROUTES = ("/tokenize", "/v1/completions")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("end", ["leave", "wait"])
def test_routes_do_not_wait_for_ever(
    tokenizer: Tokenizer, path: str, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(PATIENCE)
        return []

    async def run() -> None:
        rig = Rig(tokenizer, limits=Limits(queue_seconds=60.0 if end == "leave" else 0.2))
        monkeypatch.setattr(tokenizer, "encode", slow)
        async with rig.call(path, {"prompt": "x" * 50_000}) as reply:
            await asyncio.to_thread(begun.wait, PATIENCE)
            if end == "leave":
                reply.leave()
            await reply.done()
        assert rig.metrics.answered == [(path, "POST", 499 if end == "leave" else 503)]
        if end == "wait":
            assert reply.error["code"] == "queue_deadline" and reply.headers["retry-after"] == "2"
        if path != "/tokenize":
            assert rig.metrics.reasons == ["client_gone" if end == "leave" else "deadline"]
        go_on.set()
        await until_free(rig.front.intake)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_text_that_is_encoded_in_a_thread_lets_the_loop_go_on(tokenizer: Tokenizer) -> None:
    async def run() -> int:
        turns, encoding = 0, asyncio.create_task(asyncio.to_thread(tokenizer.encode, "hello world " * 40_000))
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await encoding) == 480_000
        return turns

    assert asyncio.run(run()) > 25  # it takes half a second


def test_routes_share_the_bound(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        rig = Rig(tokenizer, limits=Limits(body_bytes=100_000, bodies=1))
        body = json.dumps({"prompt": "x" * 50_000}).encode()
        rig.front.intake.held = 100_000 - len(body) + 1
        reply = await rig.post("/tokenize", body)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "2")
        rig.front.intake.held -= 1
        assert (await rig.post("/tokenize", body)).status == 200
        await asyncio.sleep(0)
        assert rig.front.intake.held == 100_000 - len(body)

    asyncio.run(run())
