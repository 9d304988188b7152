"""What the suites run on: a tiny model of fixed weights, a pool that is always short, and an engine driven by hand."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hookline import Engine, EngineConfig
from hookline.config import SpeculativeConfig
from hookline.grammar import GrammarSpec
from hookline.scheduling.output import OutputDelta, TokenLogprob
from hookline.serving.process import messages
from hookline.serving.process.engine_process import EngineLoop
from tests.conftest import TINY, make_checkpoint
from tests.glm5_2.models import GOLDEN_MODEL

BLOCK = 8
BLOCKS = 64
MAX_MODEL_LEN = 256
VOCAB = int(TINY["vocab_size"])
# Keys and values of two heads of 16 numbers, in fp32, in two layers.
TOKEN_BYTES = 2 * 2 * 16 * 4 * 2
_SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory": BLOCKS * BLOCK * TOKEN_BYTES,
    "max_batch_tokens": 64,
    "max_running": 16,
}
# What differs where the tiny Llama is run in another way.
RUNNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap": True},
    "n-gram": {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, ngram_min=1)},
}


@contextmanager
def tiny_model() -> Iterator[Path]:
    """The folder of the tiny Llama."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        yield make_checkpoint(Path(folder), max_position_embeddings=MAX_MODEL_LEN)


def small_config(model: Path, **options: Any) -> EngineConfig:
    """64 blocks of 8 tokens, a context of 256."""
    return EngineConfig(str(model), **_SMALL | options)


def small_engine(model: Path, **options: Any) -> Engine:
    """An engine of `small_config`; the scheduler's fault switches are options too."""
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    return Engine(small_config(model, **options), **switches)


def tiny_glm(**options: Any) -> Engine:
    """The tiny trained GLM, which drafts for itself: on the device, where `overlap` is on."""
    drafts = SpeculativeConfig(num_speculative_tokens=2)
    known = {"overlap": True, "speculative": drafts, "kv_cache_memory": 2**20}
    return small_engine(GOLDEN_MODEL, **known | options)


def engines(model: Path) -> dict[str, Callable[[], Engine]]:
    """Each way of running, by name."""
    made = {name: partial(small_engine, model, **options) for name, options in RUNNERS.items()}
    return {**made, "tiny GLM": tiny_glm}


def grammars(engine: Engine) -> list[bytes]:
    """Grammars of several kinds, as a request brings them."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    specs = GrammarSpec("regex", "[a-f]{2,9}"), GrammarSpec("choice", '["no", "nothing", "yes"]')
    return [engine.compile_grammar(spec).to_bytes() for spec in (*specs, GrammarSpec("json_schema", schema))]


@dataclass(slots=True)
class Served:
    """What one continuation has given."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    deltas: int = 0

    def take(self, delta: OutputDelta) -> None:
        """Puts a delta behind what is there."""
        if self.finish_reason is not None:
            raise RuntimeError(f"a delta came after the end: {delta}")
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.deltas += 1


class DrivenLoop:
    """The loop of an engine process, whose other end is the suite. All that it says crosses the wire's encoding.

    Attributes:
        served: what came of each request, by its number and the continuation's index.
        refused: the refusals.
        ended: numbers whose last delta has come.
        aborted: numbers that the suite has aborted.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served: dict[tuple[int, int], Served] = {}
        self.refused: dict[int, messages.Refused] = {}
        self.ended: set[int] = set()
        self.aborted: set[int] = set()
        self.sent: set[int] = set()
        self.steps: list[int] = []
        self._commands: deque[messages.ToEngine] = deque()
        self._encode = messages.encoder().encode
        self._decode = messages.decoder(messages.FromEngine).decode
        self._loop = EngineLoop(engine, self)  # type: ignore[arg-type]

    def receive(self, seconds: float) -> list[messages.ToEngine]:
        """As `Channel.receive`, but it never waits."""
        found = list(self._commands)
        self._commands.clear()
        return found

    def send(self, message: messages.FromEngine) -> None:
        """As `Channel.send`."""
        message = self._decode(self._encode(message))
        if isinstance(message, messages.Refused):
            if message.number in self.refused or message.number in self.ended:
                raise RuntimeError(f"request {message.number} ended twice")
            self.refused[message.number] = message
        elif isinstance(message, messages.Report):
            self.steps += message.step_tokens
            for number, delta in zip(message.numbers, message.deltas, strict=True):
                if number in self.aborted or number in self.ended:
                    raise RuntimeError(f"a delta of request {number} came after its end")
                self.served.setdefault((number, delta.index), Served()).take(delta)
                if delta.timing is not None:
                    self.ended.add(number)

    def submit(
        self, number: int, token_ids: Any, *, stream: Any = True, grammar: bytes | None = None, **params: Any
    ) -> None:
        """A request, taken at the next turn."""
        self.command(messages.Submit(number, token_ids, params, stream=stream, grammar=grammar))

    def command(self, message: messages.Submit | messages.Abort) -> None:
        """Any message, taken at the next turn."""
        if isinstance(message, messages.Submit):
            self.sent.add(message.number)
        elif message.number in self.sent - self.ended - self.refused.keys():
            self.aborted.add(message.number)
        self._commands.append(message)

    def turn(self) -> None:
        """One turn of the loop."""
        self._loop.turn()

    def run(self, turns: int = 4000) -> None:
        """Turns until nothing is left to do.

        Raises:
            RuntimeError: if that takes longer than the work can, or a step gives nothing.
        """
        for _ in range(turns):
            if not self._commands and not self.engine.has_work and not self._loop._held:
                return
            if self._loop._held and self._loop._preparing is not None:
                self._loop._preparing.join()  # the first grammar waits for a thread
            self.turn()
        load = self.engine.load
        raise RuntimeError(f"no end after {turns} turns: {load.running} running, {load.waiting} waiting")

    def open_numbers(self) -> set[int]:
        """Requests that have come and have not ended in any way."""
        return self.sent - self.ended - self.aborted - self.refused.keys()

    def serve(self, prompts: Sequence[Sequence[int]], *, first: int = 1, **params: Any) -> list[Served]:
        """Runs prompts of one continuation to their ends, under numbers from `first` on."""
        for number, ids in enumerate(prompts, first):
            self.submit(number, list(ids), **params)
        self.run()
        return [self.served[number, 0] for number in range(first, first + len(prompts))]
