"""What a client may ask for: one table, each limit with a small default, each checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hookline.errors import UsageError

# After so many seconds a client that a bound has turned away may come again.
RETRY_SECONDS = 2

_MOST = 2**40
# Of a time, which would otherwise be over before anything could happen: a stream would be comments without a pause.
_LEAST_SECONDS = 0.001
_MAY_BE_ZERO = ("drain_seconds", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server. Times are in seconds.

    Attributes:
        body_bytes: of a request's body.
        bodies: of that size, whose bytes may be received and worked on at a time, all bodies together.
        header_bytes, header_count: of a request's head, its first line included.
        json_depth: how deep lists and objects of a body may be nested.
        n: answers to one prompt.
        prompts: of one call to `/v1/completions`.
        prompt_logprobs: log probabilities in one answer of all its prompts' tokens, each with its likeliest.
        messages: of one conversation.
        tools: of one call.
        schema_bytes, schema_depth, schema_nodes: of a JSON schema, regular expression or grammar.
        tokenize_chars: of a text for `/tokenize`, whose tokens no context bounds.
        label_chars: of a client's own request id.
        waiting: answers that may wait for the engine; more are refused with 429.
        header_seconds, body_seconds: until a request's head and body must have come.
        queue_seconds: until a body that has come must have been worked on, and from then on until the request must have
            begun to run; then 503.
        request_seconds: until it must have ended, since it was worked on.
        step_seconds: that one step of the engine may take before the engine counts as dead.
        drain_seconds: that running requests get after SIGTERM.
        reader_seconds: that a client may let a stream's bytes lie.
        reader_values: that may wait for a client who reads slowly: tokens, and the likeliest ones reported of them.
        ping_seconds: between the comments that keep an idle stream alive.
        grammar_seconds, grammar_memory: processor time and bytes of memory for compiling one grammar.
        grammars: that may be compiled or wait for it at a time; more are refused with 503.
        grammar_cache_bytes: of compiled grammars that are kept.
    """

    body_bytes: int = 8 * 2**20
    bodies: int = 4
    header_bytes: int = 32 * 2**10
    header_count: int = 100
    json_depth: int = 64
    n: int = 16
    prompts: int = 256
    prompt_logprobs: int = 2**19
    messages: int = 2048
    tools: int = 128
    schema_bytes: int = 64 * 2**10
    schema_depth: int = 32
    schema_nodes: int = 4096
    tokenize_chars: int = 2**20
    label_chars: int = 256
    waiting: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    step_seconds: float = 30.0
    drain_seconds: float = 30.0
    reader_seconds: float = 30.0
    reader_values: int = 2**16
    ping_seconds: float = 15.0
    grammar_seconds: float = 2.0
    grammar_memory: int = 256 * 2**20
    grammars: int = 32
    grammar_cache_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_limit(entry.name, getattr(self, entry.name), f"the limit {entry.name}")


def check_limit(name: str, value: object, told: str) -> None:
    """Refuses what the limit `name` cannot be.

    Args:
        told: what the user calls it.

    Raises:
        UsageError: if it is no number of its kind, or too small.
    """
    is_seconds = name.endswith("_seconds")
    right = isinstance(value, int | float) if is_seconds else type(value) is int
    low: float = 0 if name in _MAY_BE_ZERO else _LEAST_SECONDS if is_seconds else 1
    if not right or isinstance(value, bool) or not low <= value <= _MOST:  # type: ignore[operator]
        kind = "a number of seconds" if is_seconds else "a whole number"
        raise UsageError(f"{told} is {value!r:.80}", hint=f"Give {kind} of at least {low}.")
