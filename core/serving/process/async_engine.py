"""The engine in a process of its own, for asyncio: what the HTTP front stands on, and Python programs may use as well.

async with AsyncEngine(EngineConfig(model="smollm2-135m-instruct")) as engine:
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgspec
import tokenizers
import zmq

from hookline.config import EngineConfig, engine_environment
from hookline.errors import HooklineError, InvalidRequestError, NotEnoughMemoryError, ServerError
from hookline.prompt_encoder import Prompt, PromptEncoder
from hookline.sampling_params import SamplingParams, check_params
from hookline.scheduling.output import Load, OutputDelta, RequestOutput
from hookline.serving.process import messages
from hookline.serving.process.answer import Answer
from hookline.serving.process.growing_output import GrowingOutput
from hookline.serving.requests.validated import ValidatedRequest
from hookline.tokenizer import Tokenizer

ENGINE_COMMAND = (sys.executable, "-m", "hookline.serving.process.engine_process")

_STDERR = 2
# Seconds that the process gets to end by itself.
_PATIENCE = 5.0


class AsyncEngine:
    """An engine that runs in a process of its own. Its methods belong to one event loop.

    Args:
        config: how to load and run the model.
        on_stage: is told of the stages of the start.
        on_report: is told what each step gave, before those who wait for it.
        command: starts the engine process; the path of its socket and this process's number are put behind.

    Attributes:
        facts: what it serves, once it has started.
        tokenizer: None where the checkpoint has none.
        load: what it has to do, as of the last report.
        reported: `time.monotonic()` when it last gave a sign of life.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_stage: Callable[[messages.Stage], None] | None = None,
        on_report: Callable[[messages.Report], None] | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.load = Load()
        self.reported = time.monotonic()
        self._on_stage = on_stage
        self._on_report = on_report
        self._command = command
        self._facts: messages.Facts | None = None
        self._prompts: PromptEncoder | None = None
        self._folder: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._failed: messages.Failed | None = None
        self._ready: asyncio.Future[messages.Facts] | None = None
        self._dead: asyncio.Future[messages.Failed] | None = None
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._encoder = messages.encoder()
        self._decoder = messages.decoder(messages.FromEngine)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def facts(self) -> messages.Facts:
        if self._facts is None:
            raise ServerError("the engine has not started", hint="Write `async with AsyncEngine(...)`.")
        return self._facts

    @property
    def is_alive(self) -> bool:
        """Whether it serves: it has started, and has neither died nor been closed."""
        return self._facts is not None and self._dead is not None and not self._dead.done()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> messages.Facts:
        """Starts the process and waits until the model is loaded.

        Raises:
            HooklineError: what kept the engine from starting, with its exit code.
        """
        self._loop = loop = asyncio.get_running_loop()
        self._ready, self._dead = loop.create_future(), loop.create_future()
        try:
            path = self._listen(loop)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(path),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,  # our own may be a program's output
                env=engine_environment(),
            )
            self._watcher = asyncio.create_task(self._watch(self._process))
            self._take_facts(await self._ready)
        except BaseException:
            await self.close()
            raise
        return self.facts

    def _listen(self, loop: asyncio.AbstractEventLoop) -> Path:
        """Makes the socket, in a folder that none but this user may enter.

        Raises:
            ServerError: if there is no place for it.
        """
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="hookline-"))
            path = self._folder / "engine"
            if (size := len(os.fsencode(path))) > zmq.IPC_PATH_MAX_LEN:
                raise OSError(f"{path} has {size} bytes, and a socket's path at most {zmq.IPC_PATH_MAX_LEN}")
            self._context = zmq.Context(io_threads=1)
            self._socket = self._context.socket(zmq.PAIR)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.SNDHWM, 0)
            self._socket.set(zmq.RCVHWM, 0)
            self._socket.bind(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as error:
            hint = "Set TMPDIR to a folder that can be written to, with a short path."
            raise ServerError(f"the engine's socket cannot be made: {error.strerror or error}", hint=hint) from error
        self._descriptor = int(self._socket.get(zmq.FD))
        loop.add_reader(self._descriptor, self._receive)
        return path

    async def close(self) -> None:
        """Ends the process and every answer; does nothing the second time."""
        process = self._process
        if process is not None and process.returncode is None:
            self._say(messages.Shutdown())
            if self._facts is None:  # it does not listen while it starts
                self.kill()
            try:
                await asyncio.wait_for(process.wait(), _PATIENCE)
            except TimeoutError:
                self.kill()
                await process.wait()
        if self._watcher is not None:
            await self._watcher
        if self._loop is not None and self._socket is not None and self._context is not None:
            if self._descriptor >= 0:
                self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._socket = self._context = self._folder = None

    def kill(self) -> None:
        """Ends the process at once, such as one that hangs; it counts as dead then."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def wait_dead(self) -> messages.Failed:
        """Returns when the process has ended, with the reason."""
        if self._dead is None:
            raise ServerError("the engine has not started", hint="Write `async with AsyncEngine(...)`.")
        return await asyncio.shield(self._dead)

    def _take_facts(self, facts: messages.Facts) -> None:
        self._facts = facts
        if facts.tokenizer_json is not None:
            built = tokenizers.Tokenizer.from_str(facts.tokenizer_json.decode())
            self.tokenizer = Tokenizer(built, facts.chat_template, facts.special_tokens)
        self._prompts = PromptEncoder(self.tokenizer, facts.vocab_size)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _say(self, message: messages.ToEngine) -> None:
        """Queues a message, for which there is always room: only so many requests are let in."""
        if self._socket is not None and self._loop is not None:
            with suppress(zmq.Again):  # the process has gone, or has not come yet: `_watch` tells those who wait
                self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            self._loop.call_soon(self._receive)  # sending looks at the socket too: see `_receive`

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Takes note of the process's end, and of what it said last."""
        code = await process.wait()
        self._receive()
        failed = self._failed or messages.Failed(f"the engine process ended with {_exit_text(code)}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(_error_of(failed))
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(failed)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(ServerError("the engine has ended", hint="It has to be started again."))
            answer.wake()

    def _receive(self) -> None:
        """Takes all that has come, and then wakes those who have news: once, however much it is.

        The socket's descriptor tells only of what is new since the last look: so everything is taken at each.
        """
        woken: dict[int, Answer] = {}
        while self._socket is not None:
            try:
                message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            except msgspec.DecodeError as error:
                self._failed = messages.Failed(f"the engine process is not understood: {error}")
                self.kill()
                break
            self.reported = time.monotonic()
            self._take(message, woken)
        for answer in woken.values():
            answer.wake()

    def _take(self, message: messages.FromEngine, woken: dict[int, Answer]) -> None:
        if isinstance(message, messages.Report):
            self._take_report(message, woken)
        elif isinstance(message, messages.Refused):
            self._refuse(message, woken)
        elif isinstance(message, messages.Stage):
            if message.name == messages.CONNECTED:
                self._say(messages.Start(self.config))
            if self._on_stage is not None:
                self._on_stage(message)
        elif isinstance(message, messages.Facts):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        else:
            self._failed = message
            if self._loop is not None:  # it ends by itself now, unless something in it hangs
                self._loop.call_later(_PATIENCE, self.kill)

    def _take_report(self, report: messages.Report, woken: dict[int, Answer]) -> None:
        self.load = report.load
        answers = self._answers
        for number in report.started:
            if number in answers:
                answers[number].started = self.reported
        for number, delta in zip(report.numbers, report.deltas, strict=True):
            answer = answers.get(number)
            if answer is not None:
                answer.take(delta)
                woken[number] = answer
                if delta.timing is not None:
                    del answers[number]
        if self._on_report is not None:
            self._on_report(report)

    def _refuse(self, refused: messages.Refused, woken: dict[int, Answer]) -> None:
        answer = self._answers.pop(refused.number, None)
        if answer is not None:
            answer.fail(_REFUSALS[refused.kind](refused))
            woken[refused.number] = answer

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: ValidatedRequest,
        *,
        stream: bool = True,
        grammar: bytes | None = None,
        on_news: Callable[[OutputDelta], None] | None = None,
    ) -> Answer:
        """Hands a request to the engine.

        Args:
            stream: whether to be told of each token, not only of the end.
            grammar: `request.grammar`, compiled.
            on_news: see `Answer`.

        Raises:
            ServerError: the engine is not there.
        """
        if not self.is_alive:
            raise ServerError("the engine is not there", hint="It has to be started again.")
        answer = Answer(next(self._numbers), self, on_news)
        self._answers[answer.number] = answer
        self._say(
            messages.Submit(
                number=answer.number,
                token_ids=list(request.token_ids),
                params=_differing(request.params),
                stream=stream,
                cache_salt=request.cache_salt,
                grammar=grammar,
                grammar_after=request.grammar_after,
            )
        )
        return answer

    def forget(self, answer: Answer) -> None:
        """Ends a request; see `Answer.abort`."""
        if self._answers.pop(answer.number, None) is not None:
            self._say(messages.Abort(answer.number))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """One prompt, reported whenever there is news; the last report is finished. Leaving it aborts the request.

        Args:
            prompt: text, token ids, or chat messages.
            params: how to choose tokens; greedy by default.

        Raises:
            InvalidRequestError: if it can never be served as it stands.
            NotEnoughMemoryError: if the device has no room for what its options need.
            ServerError: if the engine has died.
        """
        params, facts = check_params(params), self.facts
        if self._prompts is None:
            raise ServerError("the engine has not started", hint="Write `async with AsyncEngine(...)`.")
        ids = self._prompts.encode(prompt)
        params.check_against(facts.vocab_size, len(ids), facts.max_model_len)
        text = prompt if isinstance(prompt, str) else None
        answer = self.submit(ValidatedRequest(tuple(ids), params, text))
        growing = GrowingOutput(f"request-{answer.number}", text, tuple(ids), params)
        try:
            while not answer.finished:
                yield growing.take(await answer.deltas())
        finally:
            answer.abort()


def _differing(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    values = {entry.name: getattr(params, entry.name) for entry in dataclasses.fields(params)}
    values["logit_bias"] = dict(params.logit_bias)
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


_REFUSALS: Mapping[str, Callable[[messages.Refused], Exception]] = MappingProxyType(
    {
        "invalid": lambda refused: InvalidRequestError(refused.message, field=refused.field),
        "memory": lambda refused: NotEnoughMemoryError(refused.message),
        "fault": lambda refused: HooklineError(refused.message),
    }
)
_DEFAULTS = {entry.name: getattr(SamplingParams(), entry.name) for entry in dataclasses.fields(SamplingParams)}


def _error_of(failed: messages.Failed) -> HooklineError:
    error = HooklineError(failed.message, hint=failed.hint)
    error.exit_code = failed.exit_code
    return error


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
