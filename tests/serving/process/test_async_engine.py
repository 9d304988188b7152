"""`AsyncEngine`: a real engine process, driven from an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from hookline import AsyncEngine, Engine, EngineConfig, SamplingParams
from hookline.errors import HooklineError, InvalidRequestError, ServerError
from hookline.scheduling.output import OutputDelta, RequestOutput, Timing
from hookline.serving.process.answer import Answer
from hookline.serving.requests.validated import ValidatedRequest

Body = Callable[[AsyncEngine], Coroutine[Any, Any, Any]]


def run(config: EngineConfig, body: Body, **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncEngine(config, **options) as engine:
            return await body(engine)

    return asyncio.run(main())


def config_of(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), block_size=8, **options)


async def last(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def many_are_what_the_engine_alone_gives(engine: AsyncEngine, model: Path) -> None:
    prompts: list[Any] = [f"text {n}" * (n + 1) for n in range(12)] + [[1, 2, 3], [{"role": "user", "content": "Hi"}]]
    params = [SamplingParams(max_tokens=9 + n, n=1 + n % 2, logprobs=n % 3, stop=("q",)) for n in range(len(prompts))]
    assert engine.facts.plugin.startswith("hookline-llama") and engine.is_alive
    found = await asyncio.gather(*(last(engine, prompt, one) for prompt, one in zip(prompts, params, strict=True)))
    expected = Engine(config_of(model)).generate(prompts, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs == theirs.outputs
        assert (ours.prompt, ours.prompt_token_ids, ours.usage) == (
            theirs.prompt,
            theirs.prompt_token_ids,
            theirs.usage,
        )


async def leaving_the_iterator_aborts_and_frees(engine: AsyncEngine) -> None:
    stream = engine.generate("abc", SamplingParams(max_tokens=400, ignore_eos=True))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(last(engine, "abcd", SamplingParams(max_tokens=400, ignore_eos=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    done = await last(engine, "abc", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(done.outputs[0].token_ids) == 3
    while engine.load.used_blocks:
        await asyncio.sleep(0.01)
    assert engine.load.running == engine.load.waiting == 0


async def bad_requests_are_refused_and_harm_no_other(engine: AsyncEngine) -> None:
    for prompt, params in (("", None), ([10**6], None), ("a", SamplingParams(stop_token_ids=(10**5,)))):
        with pytest.raises(InvalidRequestError):
            await last(engine, prompt, params or SamplingParams())
    answer = engine.submit(ValidatedRequest((1,) * 10_000, SamplingParams(max_tokens=1)))  # past the door
    with pytest.raises(InvalidRequestError):
        await answer.deltas()
    assert (await last(engine, "a", SamplingParams(max_tokens=2, ignore_eos=True))).finished


def test_an_engine_from_its_start_to_its_end(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all that ends well, so that one engine is started; nothing of it is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stages: list[str] = []
    pids: list[int] = []

    async def body(engine: AsyncEngine) -> None:
        assert list(dict.fromkeys(stages)) == ["connected", "importing", "loading", "warming"]
        assert engine._process is not None
        pids.append(engine._process.pid)
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert psutil.Process(pids[0]).net_connections("inet") == []  # it speaks by that folder's socket alone
        await many_are_what_the_engine_alone_gives(engine, tiny_llama)
        await leaving_the_iterator_aborts_and_frees(engine)
        await bad_requests_are_refused_and_harm_no_other(engine)

    run(config_of(tiny_llama), body, on_stage=lambda stage: stages.append(stage.name))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_killed_engine_is_known_at_once(tiny_llama: Path, moment: str) -> None:
    async def body(engine: AsyncEngine) -> None:
        assert engine._process is not None
        answers = [engine.submit(ValidatedRequest((1, 2), SamplingParams(max_tokens=500, ignore_eos=True)))]
        await answers[0].deltas()
        if moment == "idle":
            answers.pop().abort()
        start = time.monotonic()
        os.kill(engine._process.pid, signal.SIGKILL)
        failed = await engine.wait_dead()
        assert time.monotonic() - start < 5 and "signal 9" in failed.message and not engine.is_alive
        for answer in answers:
            with pytest.raises(ServerError):
                while True:
                    await answer.deltas()
        with pytest.raises(ServerError):
            engine.submit(ValidatedRequest((1,), SamplingParams(max_tokens=1)))

    run(config_of(tiny_llama), body)


def test_what_keeps_it_from_starting_is_told_with_its_exit_code(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        raise AssertionError("it started")

    with pytest.raises(HooklineError, match="no model or file") as caught:
        run(config_of(tmp_path / "nothing", offline=True), body)
    assert caught.value.exit_code == 3
    with pytest.raises(HooklineError, match="exit code 7"):
        run(config_of(tmp_path), body, command=(sys.executable, "-c", "import sys; sys.exit(7)"))


def test_one_that_says_it_failed_and_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.serving.process.async_engine._PATIENCE", 0.1)
    code = (
        "import sys, time, zmq\n"
        "from hookline.serving.process import messages\n"
        "socket = zmq.Context().socket(zmq.PAIR)\n"
        "socket.connect(f'ipc://{sys.argv[1]}')\n"
        "encode = messages.encoder().encode\n"
        "socket.send(encode(messages.Stage('connected')))\n"
        "socket.recv()\n"
        "socket.send(encode(messages.Failed('no room', exit_code=4)))\n"
        "time.sleep(600)\n"
    )

    async def start() -> None:
        await asyncio.wait_for(AsyncEngine(config_of(tmp_path), command=(sys.executable, "-c", code)).start(), 60)

    with pytest.raises(HooklineError, match="no room") as caught:
        asyncio.run(start())
    assert caught.value.exit_code == 4


def test_a_socket_without_a_place_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    async def body(engine: AsyncEngine) -> None:
        raise AssertionError("it started")

    with pytest.raises(ServerError, match="a socket's path at most") as caught:
        run(config_of(tmp_path), body)
    assert "TMPDIR" in caught.value.hint
    assert not list(long.iterdir())


def test_deltas_that_come_before_they_are_read_are_joined() -> None:
    async def body() -> None:
        answer = Answer(1, None)  # type: ignore[arg-type]
        answer.take(OutputDelta("r", 0, "a", [1]))
        answer.take(OutputDelta("r", 1, "x", [9]))
        answer.take(OutputDelta("r", 0, "b", [2, 3], finish_reason="stop", stop_reason="z", timing=Timing()))
        joined = await answer.deltas()
        assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in joined] == [
            (0, "ab", [1, 2, 3], "stop"),
            (1, "x", [9], None),
        ]
        assert answer.finished
        with pytest.raises(RuntimeError, match="taken already"):
            await answer.deltas()

    asyncio.run(body())


def test_an_error_comes_behind_news_that_nobody_had_read() -> None:
    async def body() -> None:
        answer = Answer(1, None)  # type: ignore[arg-type]
        answer.take(OutputDelta("r", 0, "a", [1]))
        answer.fail(ServerError("the engine has ended"))
        assert [delta.text for delta in await answer.deltas()] == ["a"]
        assert not answer.finished  # who stopped here would take a piece for the whole
        with pytest.raises(ServerError):
            await answer.deltas()
        assert answer.finished

    asyncio.run(body())
