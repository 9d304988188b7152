"""What the HTTP process and the engine process say to each other: records of a fixed shape, as msgpack by msgspec.

A message that is not of these shapes is refused when it is decoded. Nothing here can name code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hookline.config import EngineConfig
from hookline.scheduling.output import Load, OutputDelta

# The stage that the engine process begins with: it hears what it is told from then on.
CONNECTED = "connected"


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# -- to the engine -----------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message: what to load.

    It is decoded as the dataclass that it is, whose own checks run then.
    """

    config: EngineConfig


class Submit(Message):
    """A validated request.

    Attributes:
        number: the HTTP process's own, under which the engine reports.
        params: the fields of `SamplingParams` that differ from its defaults.
        stream: whether to report it at each token, not only at its end.
        grammar: compiled; see `structured_output.CompiledGrammar`.
        grammar_after: the token id behind which `grammar` holds.
    """

    number: int
    token_ids: list[int]
    params: dict[str, Any]
    stream: bool = True
    cache_salt: str = ""
    grammar: bytes | None = None
    grammar_after: int | None = None


class Abort(Message):
    """End a request at once; one that is not known, or has ended, is left aside."""

    number: int


class Shutdown(Message):
    """End all requests and the process."""


# -- to the HTTP process -----------------------------------------------------------------------------------------------


class Stage(Message):
    """A stage of the start goes on.

    Attributes:
        name: `connected`, `importing`, `loading`, `starting`, `warming`.
        done, total: how far it is, in units of its own; total 0 where that is not known.
    """

    name: str
    done: int = 0
    total: int = 0


class Facts(Message):
    """The engine is ready; what it serves.

    Attributes:
        name: of the model, as it was given, without its folder.
        plugin: its plugin's name and version.
        special_tokens: `bos_token` and so on to their texts.
        tokenizer_json: the tokenizer; None where the checkpoint has none.
        structured_output_backend: of the architecture's record.
    """

    name: str
    architecture: str
    plugin: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_running: int
    max_batch_tokens: int
    prefix_caching: bool
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    tokenizer_json: bytes | None = None
    chat_template: str | None = None
    structured_output_backend: str = ""


class Report(Message):
    """What a step gave; without anything in it, a sign of life.

    Attributes:
        load: of the engine.
        steps: how many there were so far.
        step_tokens: tokens of each step since the last report.
        started: numbers of requests that run since this step.
        numbers: of the request of each of `deltas`.
    """

    load: Load
    steps: int = 0
    step_tokens: list[int] = []
    started: list[int] = []
    numbers: list[int] = []
    deltas: list[OutputDelta] = []


class Refused(Message):
    """The engine does not take a request.

    Attributes:
        kind: `invalid` for the client's fault, `memory` where the device has no room for its options, `fault` for ours.
    """

    number: int
    kind: str
    message: str
    field: str = ""


class Failed(Message):
    """The engine ends, or never started.

    Attributes:
        exit_code: as the command line ends with it.
    """

    message: str
    hint: str = ""
    exit_code: int = 1


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Stage | Facts | Report | Refused | Failed


def encoder() -> msgspec.msgpack.Encoder:
    """Of any message."""
    return msgspec.msgpack.Encoder()


def decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """Of `ToEngine` or `FromEngine`; raises `msgspec.ValidationError` for all else."""
    return msgspec.msgpack.Decoder(messages)
