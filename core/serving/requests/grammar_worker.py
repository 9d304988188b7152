"""The process that compiles grammars of clients: `python -m hookline.serving.requests.grammar_worker`.

It has xgrammar and the vocabulary ready, and compiles each grammar in a fork of itself with limits of its own. What a
client's grammar does there, take all the time, all the memory, or crash, ends the fork and nothing else.

It takes a `Setup`, which a `Ready` answers, and then one `Compile` at a time, which a `Compiled` or a `Rejected`
answers, each as msgpack behind its length in 4 bytes, on standard input and output. It ends with its input.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from hookline.errors import InvalidRequestError
from hookline.grammar import GrammarKind, GrammarSpec
from hookline.structured_output import GrammarVocabulary, compile_grammar, refusal

# Of wall time to processor time: how much longer it may take where the machine is busy.
_WALL = 4
_TOO_LARGE = "it takes too much memory, or more than the compiler can stand"
_LENGTH_BYTES = 4


class Setup(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The vocabulary and the limits.

    Attributes:
        special_tokens: as of `Tokenizer`.
        seconds: of processor time for one grammar.
        memory: bytes for one grammar, beyond what the process has.
        most_bytes: of one compiled grammar.
    """

    tokenizer_json: bytes
    special_tokens: dict[str, str]
    vocab_size: int
    eos_token_ids: list[int]
    seconds: float
    memory: int
    most_bytes: int


class Compile(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A `GrammarSpec`."""

    kind: GrammarKind
    source: str


class Ready(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The vocabulary is ready."""


class Compiled(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """See `CompiledGrammar.to_bytes`."""

    data: bytes


class Rejected(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """An `InvalidRequestError`."""

    message: str
    field: str
    hint: str


Answer = Compiled | Rejected
_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes through the pipe."""
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def longest_wait(seconds: float) -> float:
    """Seconds by the clock that a grammar may take whose processor time is limited to `seconds`."""
    return _WALL * max(seconds, 0.1)


class _Forks:
    """Compiles each grammar in a fork.

    Args:
        setup: the limits.
        vocabulary: what to compile for.
    """

    def __init__(self, setup: Setup, vocabulary: GrammarVocabulary) -> None:
        self._setup = setup
        self._vocabulary = vocabulary

    def compile(self, spec: GrammarSpec) -> bytes:
        """The answer, encoded."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            self._run(spec, writer)
        os.close(writer)
        try:
            answer, is_late = _read_all(reader, longest_wait(self._setup.seconds))
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if answer:
            return answer
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        slow = is_late or ended_by in (signal.SIGXCPU, signal.SIGALRM)
        return _rejected(spec, f"it takes more than {self._setup.seconds:g} s" if slow else _TOO_LARGE)

    def _run(self, spec: GrammarSpec, writer: int) -> None:
        """Compiles in the fork, writes the answer and ends."""
        exit_code = 1
        try:
            notes = os.memfd_create("notes")
            os.dup2(notes, sys.stdout.fileno())
            os.dup2(notes, sys.stderr.fileno())
            self._limit()
            answer = self._answer(spec, notes)
            with os.fdopen(writer, "wb") as stream:
                stream.write(answer)
            exit_code = 0
        finally:
            os._exit(exit_code)  # whatever happened: what the fork shares with its parent is not its to close

    def _limit(self) -> None:
        seconds = max(1, math.ceil(self._setup.seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        signal.setitimer(signal.ITIMER_REAL, longest_wait(self._setup.seconds))  # should the parent have gone
        most = _address_space() + self._setup.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def _answer(self, spec: GrammarSpec, notes: int) -> bytes:
        try:
            data = compile_grammar(spec, self._vocabulary).to_bytes()
        except InvalidRequestError as error:
            if "bad_alloc" in error.message:
                return _rejected(spec, _TOO_LARGE)
            return _encode(Rejected(error.message, error.field, error.hint))
        except MemoryError:
            return _rejected(spec, _TOO_LARGE)
        warning = _warning(notes)
        if warning:
            return _rejected(spec, f"it cannot be held to exactly: {warning}")
        if len(data) > self._setup.most_bytes:
            most = self._setup.most_bytes
            return _rejected(spec, f"compiled it has {len(data):,} bytes; {most:,} are allowed")
        return _encode(Compiled(data))


def _address_space() -> int:
    """Bytes of memory that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _warning(notes: int) -> str:
    """What the compiler says that it left out."""
    text = os.pread(notes, 2**12, 0).decode(errors="replace")
    found = next((line for line in text.splitlines() if "Warning: " in line), "")
    return found.partition("Warning: ")[2][:300]


def _rejected(spec: GrammarSpec, reason: str) -> bytes:
    error = refusal(spec, reason)
    return _encode(Rejected(error.message, error.field, error.hint))


def _read_all(reader: int, seconds: float) -> tuple[bytes, bool]:
    """All that comes until the other end is closed, nothing if that takes longer than `seconds`, and whether it did."""
    parts, deadline = list[bytes](), time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return b"", True
        part = os.read(reader, 2**16)
        if not part:
            return b"".join(parts), False
        parts.append(part)


def _receive(stream: BinaryIO) -> bytes:
    """The next message's bytes; none at the end."""
    head = stream.read(_LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "little")) if len(head) == _LENGTH_BYTES else b""


def _vocabulary(setup: Setup) -> GrammarVocabulary:
    import tokenizers

    from hookline.tokenizer import Tokenizer

    built = tokenizers.Tokenizer.from_str(setup.tokenizer_json.decode())
    tokenizer = Tokenizer(built, special_tokens=setup.special_tokens)
    return GrammarVocabulary(tokenizer, setup.vocab_size, setup.eos_token_ids)


def main() -> None:
    """Serves until the input ends."""
    source = sys.stdin.buffer
    target = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between the messages
    setup = msgspec.msgpack.decode(_receive(source), type=Setup)
    forks = _Forks(setup, _vocabulary(setup))
    target.write(frame(Ready()))
    target.flush()
    decoder = msgspec.msgpack.Decoder(Compile)
    while data := _receive(source):
        asked = decoder.decode(data)
        answer = forks.compile(GrammarSpec(asked.kind, asked.source))
        target.write(len(answer).to_bytes(_LENGTH_BYTES, "little") + answer)
        target.flush()


if __name__ == "__main__":
    main()
