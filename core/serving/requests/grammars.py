"""Grammars of clients, compiled in a process that can be killed, and kept for the next who asks for the same."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import OrderedDict
from contextlib import suppress

import msgspec

from hookline.errors import InvalidRequestError, PluginError, ServerError
from hookline.grammar import GrammarSpec
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts
from hookline.serving.requests.grammar_worker import Answer, Compile, Compiled, Ready, Setup, frame, longest_wait
from hookline.structured_output import refusal

_BACKEND = "xgrammar"
# Of the kept grammars' bytes, how much one may have: the engine reads it between two steps.
_SHARE_OF_ONE = 16
# Seconds until the process must have its vocabulary ready, and that its answer may be on its way.
_START_SECONDS, _GRACE_SECONDS = 120.0, 2.0

_log = logging.getLogger(__name__)
_answers = msgspec.msgpack.Decoder(Answer)


class GrammarCompiler:
    """Compiles one grammar at a time, in a process that is started with the first, or by `start`.

    Args:
        facts: the model's vocabulary.
        limits: time, memory and size of one grammar, and the bytes of those that are kept.

    Raises:
        PluginError: if the architecture's record asks for another backend than there is.
    """

    def __init__(self, facts: Facts, limits: Limits) -> None:
        if facts.structured_output_backend not in ("", _BACKEND):
            raise PluginError(
                f"{facts.plugin} has structured_output_backend={facts.structured_output_backend!r:.80} in its record",
                hint=f"The backend that there is, is {_BACKEND!r}.",
            )
        self._facts = facts
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[GrammarSpec, bytes] = OrderedDict()
        self._running: dict[GrammarSpec, asyncio.Task[bytes]] = {}
        self._askers: dict[GrammarSpec, int] = {}  # how many wait for each of `_running`
        self._at_work: GrammarSpec | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept."""
        return sum(map(len, self._kept.values()))

    async def start(self) -> None:
        """Starts the process and waits until it is ready.

        Raises:
            InvalidRequestError: if the model has no tokenizer.
            ServerError: if it cannot be started.
        """
        async with self._turn:
            await self._ready()

    async def compile(self, spec: GrammarSpec) -> bytes:
        """See `structured_output.compile_grammar` and `CompiledGrammar.to_bytes`.

        Who is cancelled while it waits leaves the others who ask for the same alone. What nobody waits for any more
        is not begun: else who asks and leaves, again and again, would keep all others waiting for hours.

        Raises:
            InvalidRequestError: if the grammar is unsound or takes more than the limits allow.
            ServerError: if the process cannot be started, or has died, or too many grammars wait for it.
        """
        data = self._kept.get(spec)
        if data is not None:
            self._kept.move_to_end(spec)
            return data
        task = self._running.get(spec)
        if task is None and len(self._running) >= self._limits.grammars:
            raise ServerError(f"{len(self._running)} grammars are being compiled or wait for it; no more may wait")
        if task is None:
            task = self._running[spec] = asyncio.create_task(self._compile(spec))
            task.add_done_callback(lambda done: self._take(spec, done))
            self._askers[spec] = 0
        self._askers[spec] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._leave(spec, task)
            raise

    async def close(self) -> None:
        """Ends the process, and all who wait with an error."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    def _leave(self, spec: GrammarSpec, task: asyncio.Task[bytes]) -> None:
        if self._running.get(spec) is not task:
            return
        self._askers[spec] -= 1
        if not self._askers[spec] and spec != self._at_work:
            del self._running[spec], self._askers[spec]
            task.cancel()

    def _take(self, spec: GrammarSpec, task: asyncio.Task[bytes]) -> None:
        """Keeps a grammar, and lets go those that nobody has asked for longest."""
        if self._running.get(spec) is task:
            del self._running[spec], self._askers[spec]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[spec] = task.result()
        total = self.kept_bytes
        while total > self._limits.grammar_cache_bytes:
            _, dropped = self._kept.popitem(last=False)
            total -= len(dropped)

    async def _compile(self, spec: GrammarSpec) -> bytes:
        async with self._turn:
            self._at_work = spec
            process = await self._ready()
            wait = longest_wait(self._limits.grammar_seconds) + _GRACE_SECONDS
            try:
                answer = _answers.decode(await asyncio.wait_for(_ask(process, Compile(spec.kind, spec.source)), wait))
            except TimeoutError as error:
                _log.warning("the grammar process takes too long and is started anew")
                await self._kill()
                raise refusal(spec, "it takes too long") from error
            except (OSError, asyncio.IncompleteReadError) as error:
                await self._kill()
                raise ServerError("the process that compiles grammars has died; the next one starts it anew") from error
            except BaseException:
                await self._kill()  # its answer would be taken for the next one's
                raise
        if isinstance(answer, Compiled):
            return answer.data
        raise InvalidRequestError(answer.message, field=answer.field, hint=answer.hint)

    async def _ready(self) -> asyncio.subprocess.Process:
        """The process, started if there is none."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        facts, limits = self._facts, self._limits
        if facts.tokenizer_json is None:
            raise InvalidRequestError("the model has no tokenizer, so its output cannot be held to a grammar")
        setup = Setup(
            tokenizer_json=facts.tokenizer_json,
            special_tokens=facts.special_tokens,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            seconds=limits.grammar_seconds,
            memory=limits.grammar_memory,
            most_bytes=limits.grammar_cache_bytes // _SHARE_OF_ONE,
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hookline.serving.requests.grammar_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal is the server's to take
        )
        try:
            msgspec.msgpack.decode(await asyncio.wait_for(_ask(self._process, setup), _START_SECONDS), type=Ready)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            await self._kill()
            raise ServerError(
                f"the process that compiles grammars does not start: {error or type(error).__name__}",
                hint="Its own message stands above, on standard error.",
            ) from error
        except BaseException:
            await self._kill()
            raise
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its fork too, which would go on for seconds
            await process.wait()


async def _ask(process: asyncio.subprocess.Process, message: msgspec.Struct) -> bytes:
    """Sends a message and gives the bytes of the one that answers it."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    process.stdin.write(frame(message))
    await process.stdin.drain()
    length = await process.stdout.readexactly(4)
    return await process.stdout.readexactly(int.from_bytes(length, "little"))
