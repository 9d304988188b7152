"""The engine process: the only one that touches the device. Commands come in, steps run, reports go out.

    python -m hookline.serving.process.engine_process PATH_OF_THE_SOCKET PARENT

It ends when the process that started it ends, however that comes: a thread looks whether it is still there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from hookline.config import expand_home
from hookline.errors import HooklineError, InvalidRequestError, NotEnoughMemoryError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import OutputDelta
from hookline.serving.process import messages

if TYPE_CHECKING:
    from hookline.engine import Engine

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# Seconds between signs of life where nothing else is to be said.
BEAT = 1.0
# Messages that may wait for the other process before this one waits as well.
_MOST_WAITING = 10_000
# Seconds between looks at whether the parent is there, and whether those that are held can go on.
_LOOK_AGAIN, _LOOK_SOON = 0.5, 0.02
# Seconds of a turn that go into taking requests; then those that run have their step, however many more there are.
_MOST_TAKING = 0.05


class Channel:
    """The engine's end of the pair of sockets.

    Args:
        path: of the Unix socket, which the parent has made.
    """

    def __init__(self, path: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, _MOST_WAITING)
        self._socket.set(zmq.RCVHWM, _MOST_WAITING)
        self._socket.set(zmq.LINGER, 2000)
        self._socket.connect(f"ipc://{path}")
        self._encoder = messages.encoder()
        self._decoder = messages.decoder(messages.ToEngine)

    def send(self, message: messages.FromEngine) -> None:
        """Says something to the parent."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, seconds: float) -> Iterator[messages.ToEngine]:
        """What the parent has said; waits so long for a first message.

        What has not been taken after a while is left for the next call, so that the engine goes on meanwhile.
        """
        if self._socket.poll(int(seconds * 1000), zmq.POLLIN):
            deadline = time.monotonic() + _MOST_TAKING
            yield self._decoder.decode(self._socket.recv())
            while time.monotonic() < deadline and self._socket.poll(0, zmq.POLLIN):
                yield self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Sends what is left to send, for two seconds at most."""
        self._socket.close()
        self._context.term()


class EngineLoop:
    """Serves one engine over a channel.

    Attributes:
        ended: whether the parent has asked for the end.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._load = engine.load
        self._steps = 0
        self._step_tokens: list[int] = []
        self._said = time.monotonic()
        self._held: list[messages.Submit] = []
        self._preparing: threading.Thread | None = None
        self.ended = False

    def run(self) -> None:
        """Until the parent asks for the end; raises what the engine does after several failures in a row."""
        while not self.ended:
            self.turn()

    def turn(self) -> None:
        """Takes commands, steps once where there is work, and reports."""
        wait = 0.0 if self._engine.has_work else _LOOK_SOON if self._held else BEAT
        for command in self._channel.receive(wait):
            self._take(command)
        if self._held and self._knows_grammars():
            deadline = time.monotonic() + _MOST_TAKING
            while self._held and time.monotonic() < deadline:
                self._submit(self._held.pop(0))
        started, deltas = list[str](), list[OutputDelta]()
        if self._engine.has_work:
            started, deltas = self._step()
        if started or deltas or time.monotonic() - self._said >= BEAT:
            self._report(started, deltas)

    def _step(self) -> tuple[list[str], list[OutputDelta]]:
        before = self._load.computed_tokens
        news = self._engine.step_deltas()
        self._load = self._engine.load
        self._steps += 1
        self._step_tokens.append(self._load.computed_tokens - before)
        if not self._engine.has_work:
            self._rest()
        return news

    def _rest(self) -> None:
        """Nothing runs: no block may be held."""
        self._engine.settle()
        self._load = self._engine.load
        if self._load.used_blocks:
            _log.error("nothing runs, but %d cache blocks are held", self._load.used_blocks)

    def _take(self, command: messages.ToEngine) -> None:
        if isinstance(command, messages.Submit):
            if command.grammar is None or self._knows_grammars():
                self._submit(command)
            else:
                self._held.append(command)
        elif isinstance(command, messages.Abort):
            self._held = [submit for submit in self._held if submit.number != command.number]
            request_id = self._ids.pop(command.number, None)
            if request_id is not None:
                del self._numbers[request_id]
                self._engine.abort(request_id)
        elif isinstance(command, messages.Shutdown):
            self.ended = True

    def _knows_grammars(self) -> bool:
        """Whether grammars can be read. The first need of it begins what takes seconds, beside the steps of others."""
        if self._preparing is None:
            self._preparing = threading.Thread(target=self._prepare_grammars, name="grammars", daemon=True)
            self._preparing.start()
        return not self._preparing.is_alive()

    def _prepare_grammars(self) -> None:
        try:
            self._engine.grammar_vocabulary  # noqa: B018
        except Exception:
            _log.exception("grammars cannot be read")  # and the request that needs one is refused

    def _submit(self, command: messages.Submit) -> None:
        try:
            request_id = self._engine.add_request(
                command.token_ids,
                SamplingParams.from_dict(command.params),
                stream=command.stream,
                cache_salt=command.cache_salt,
                grammar=command.grammar,
                grammar_after=command.grammar_after,
            )
        except InvalidRequestError as error:
            self._channel.send(messages.Refused(command.number, "invalid", error.message, error.field))
        except NotEnoughMemoryError as error:
            self._channel.send(messages.Refused(command.number, "memory", error.message))
        except Exception as error:  # a fault of ours: it ends this request, and no other
            _log.exception("request %d cannot be taken", command.number)
            self._channel.send(messages.Refused(command.number, "fault", f"{type(error).__name__}: {error}"))
        else:
            self._numbers[request_id] = command.number
            self._ids[command.number] = request_id

    def _report(self, started: list[str], deltas: list[OutputDelta]) -> None:
        numbers = self._numbers
        known = [delta for delta in deltas if delta.request_id in numbers]
        self._channel.send(
            messages.Report(
                load=self._load,
                steps=self._steps,
                step_tokens=self._step_tokens,
                started=[numbers[request_id] for request_id in started if request_id in numbers],
                numbers=[numbers[delta.request_id] for delta in known],
                deltas=known,
            )
        )
        for delta in known:
            if delta.timing is not None:
                del self._ids[numbers.pop(delta.request_id)]
        self._step_tokens = []
        self._said = time.monotonic()


def facts(engine: Engine) -> messages.Facts:
    """What the HTTP process must know of the model."""
    opened, tokenizer, config = engine.loaded.opened, engine.tokenizer, engine.config
    record, claim = opened.architecture.record, opened.architecture.claim
    return messages.Facts(
        name=expand_home(config.model).name or config.model,
        architecture=record.name,
        plugin=claim.title,
        device=config.device,
        dtype=config.dtype,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        block_size=config.block_size,
        num_blocks=engine.pool.num_blocks,
        max_running=config.max_running,
        max_batch_tokens=config.max_batch_tokens,
        prefix_caching=config.prefix_caching,
        eos_token_ids=sorted(engine.loaded.eos_token_ids),
        special_tokens={} if tokenizer is None else tokenizer.special_tokens,
        tokenizer_json=None if tokenizer is None else tokenizer.to_json().encode(),
        chat_template=None if tokenizer is None else tokenizer.chat_template,
        structured_output_backend=record.structured_output_backend,
    )


def start(channel: Channel) -> Engine:
    """The engine that the parent's first message asks for, with what it does said on the way."""
    channel.send(messages.Stage(messages.CONNECTED))
    while (command := next(channel.receive(BEAT), None)) is None:
        continue
    if not isinstance(command, messages.Start):
        raise HooklineError(f"the first message is {type(command).__name__}; Start was expected")
    channel.send(messages.Stage("importing"))
    from hookline.engine import Engine

    channel.send(messages.Stage("loading"))
    engine = Engine(
        command.config,
        progress=_Notice(channel, "loading"),
        starting=_Notice(channel, "starting"),
    )
    channel.send(messages.Stage("warming"))
    _warm_up(engine)
    return engine


def _warm_up(engine: Engine) -> None:
    """One token, so that what is made at the first use is there before the first request."""
    engine.generate([[0]], SamplingParams(max_tokens=1))


class _Notice:
    """Says how far a stage is, at most ten times a second."""

    def __init__(self, channel: Channel, stage: str) -> None:
        self._channel = channel
        self._stage = stage
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._said >= 0.1:
            self._said = now
            self._channel.send(messages.Stage(self._stage, done, total))


def watch_parent(parent: int, path: str) -> None:
    """Ends this process at once when its parent has gone, whatever it is doing: nobody would hear it.

    Args:
        parent: the process that started this one; it may have gone already.
        path: of its socket, which is removed then, and its folder: who was killed could not do it.
    """

    _wake_at_the_end_of_parent()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_AGAIN)
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)
            Path(path).parent.rmdir()  # which fails, as it should, where there is anything else in it
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


def _wake_at_the_end_of_parent() -> None:
    """Has Linux resume this process, should it be stopped, when its parent ends: else nobody would look any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main(path: str, parent: int) -> int:
    """Serves until the parent asks for the end or goes; answers with the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's to hear, which then lets requests end
        signal.signal(number, signal.SIG_IGN)
    # The parent has tried it. Python would try it by a file, which `watch_parent` may leave there.
    tempfile.tempdir = str(Path(path).parent.parent)
    watch_parent(parent, path)
    channel = Channel(path)
    try:
        engine = start(channel)
        channel.send(facts(engine))
        EngineLoop(engine, channel).run()
    except Exception as error:
        ours = error if isinstance(error, HooklineError) else HooklineError(f"{type(error).__name__}: {error}")
        if ours is not error:
            sys.excepthook(type(error), error, error.__traceback__)
        channel.send(messages.Failed(ours.message, ours.hint, ours.exit_code))
        return ours.exit_code
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
