"""The process that compiles clients' grammars: what it keeps, whom it serves, how it ends. Suite G1 abuses it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import InvalidRequestError, PluginError, ServerError
from hookline.grammar import GrammarSpec
from hookline.serving.limits import Limits
from hookline.serving.requests.grammars import GrammarCompiler
from tests.suites.grammar_abuse import facts


class Serving:
    """A compiler and the loop that it lives in, for many tests: its process takes seconds to start."""

    def __init__(self, limits: Limits) -> None:
        self.runner = asyncio.Runner()
        self.compiler = GrammarCompiler(facts(), limits)

    def run(self, use: Callable[[GrammarCompiler], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(use(self.compiler))


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    made = Serving(Limits(grammar_seconds=1.0))
    yield made
    process = made.compiler._process
    made.runner.run(made.compiler.close())
    assert process is None or process.returncode is not None
    made.runner.close()


def test_a_plugin_that_wants_another_backend_is_refused_at_the_start() -> None:
    for name in ("", "xgrammar"):
        GrammarCompiler(facts(structured_output_backend=name), Limits())
    with pytest.raises(PluginError, match="'outlines'"):
        GrammarCompiler(facts(structured_output_backend="outlines"), Limits())


SMALL = [GrammarSpec("regex", f"[a-c]{{{i},9}}") for i in range(1, 7)]


def test_grammars_are_kept_and_shared(serving: Serving) -> None:
    """Those that were asked for longest ago are let go when there is no room."""

    async def use(compiler: GrammarCompiler) -> None:
        together = await asyncio.gather(*(compiler.compile(SMALL[0]) for _ in range(20)))
        assert all(data is together[0] for data in together)
        compiler._kept.clear()
        kept = [await compiler.compile(spec) for spec in SMALL[:3]]
        compiler._limits = Limits(grammar_seconds=1.0, grammar_cache_bytes=compiler.kept_bytes)
        assert await compiler.compile(SMALL[0]) is kept[0]
        await compiler.compile(SMALL[3])
        assert SMALL[1] not in compiler._kept and {SMALL[0], SMALL[3]} <= compiler._kept.keys()
        assert compiler.kept_bytes <= compiler._limits.grammar_cache_bytes
        compiler._limits = Limits(grammar_seconds=1.0)

    serving.run(use)


def test_who_leaves_does_not_disturb_the_others(serving: Serving) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        waiting = [asyncio.create_task(compiler.compile(spec)) for spec in SMALL]
        same = asyncio.create_task(compiler.compile(SMALL[0]))
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        found = await asyncio.gather(*waiting, same, return_exceptions=True)
        left = [isinstance(each, asyncio.CancelledError) for each in found]
        assert left == [True, False] * 3 + [False]
        # Each answer is its own grammar's, not the one before's.
        for spec, data in zip(SMALL, found, strict=False):
            compiler._kept.clear()
            assert isinstance(data, asyncio.CancelledError) or await compiler.compile(spec) == data

    serving.run(use)


def test_what_nobody_waits_for_any_more_is_not_begun(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        begun, go_on, ready = list[GrammarSpec | None](), asyncio.Event(), compiler._ready

        async def wait_first() -> asyncio.subprocess.Process:
            begun.append(compiler._at_work)
            await go_on.wait()
            return await ready()

        monkeypatch.setattr(compiler, "_ready", wait_first)
        asked = [asyncio.create_task(compiler.compile(spec)) for spec in SMALL]
        again = asyncio.create_task(compiler.compile(SMALL[1]))
        await asyncio.sleep(0)
        for task in asked[:5]:
            task.cancel()
        await asyncio.gather(*asked[:5], return_exceptions=True)
        anew = asyncio.create_task(compiler.compile(SMALL[2]))  # after the one before it was given up
        go_on.set()
        assert all(await asyncio.gather(again, asked[5], anew))
        assert begun == [SMALL[0], SMALL[1], SMALL[5], SMALL[2]]
        assert not compiler._running and not compiler._askers

    serving.run(use)


def test_only_so_many_wait(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for what another waits for already is no more to do."""

    async def use(compiler: GrammarCompiler) -> None:
        compiler._kept.clear()
        monkeypatch.setattr(compiler, "_limits", Limits(grammars=2))
        asked = [asyncio.create_task(compiler.compile(spec)) for spec in (SMALL[0], SMALL[1], SMALL[0])]
        await asyncio.sleep(0)
        with pytest.raises(ServerError, match="2 grammars are being compiled or wait"):
            await compiler.compile(SMALL[2])
        assert all(await asyncio.gather(*asked))
        assert await compiler.compile(SMALL[2])

    serving.run(use)


def test_a_process_that_is_gone_is_started_anew(serving: Serving) -> None:
    """Whoever waits for it hears that it was no fault of his; the next is served."""

    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        process = compiler._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        task = asyncio.create_task(compiler.compile(SMALL[0]))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="has died"):
            await task
        assert await compiler.compile(SMALL[1])
        assert compiler._process is not process
        await process.wait()

    serving.run(use)


def test_one_that_hangs_is_killed(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.serving.requests.grammars._GRACE_SECONDS", -3.9)

    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        compiler._kept.clear()
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequestError, match="it takes too long"):
            await compiler.compile(SMALL[0])
        assert compiler._process is None

    serving.run(use)


def test_what_cannot_start_is_told() -> None:
    async def run(**changes: Any) -> None:
        await GrammarCompiler(facts(**changes), Limits()).compile(SMALL[0])

    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        asyncio.run(run(tokenizer_json=None))
    with pytest.raises(ServerError, match="does not start"):
        asyncio.run(run(tokenizer_json=b"nothing"))


def test_closing_ends_those_who_wait_and_what_is_at_work(serving: Serving) -> None:
    async def use(compiler: GrammarCompiler) -> None:
        await compiler.start()
        process = compiler._process
        assert process is not None
        task = asyncio.create_task(compiler.compile(GrammarSpec("regex", "a?" * 3000 + "a" * 3000)))
        forks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := forks.read_text().split()):
            await asyncio.sleep(0.001)
        os.kill(int(found[0]), signal.SIGSTOP)  # no limit on its time ends it now
        await compiler.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert process.returncode is not None
        deadline = time.monotonic() + 10
        while _is_alive(int(found[0])):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    serving.run(use)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
