"""F3: messages of any value at the engine's door, past all that the HTTP front checks: refused or served."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec

from hookline.serving.process import messages
from tests.suites.invariants import Census, Probe, idle_faults
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import MAX_MODEL_LEN, RUNNERS, VOCAB, DrivenLoop, grammars, small_engine, tiny_model

_PLANNED = {Tier.T1: 5_000, Tier.T2: 200_000}
_TOGETHER = 25
_KINDS = ("invalid", "memory", "fault")
_ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 21, 64, 65, 255, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63),
    10**30, 0.0, -0.0, 0.5, 1.0, 1e-30, 1e308, -1e308, math.nan, math.inf, -math.inf, "", "a", "1", "\0", "\ud800",
    "é" * 300, "x" * 5000, b"", b"\xff", [], [0], [1, 2, 3], [VOCAB], [-1], [1.5], [None], ["a"], ["a"] * 200, [[1]],
    {}, {"1": 1}, {1: 5}, {VOCAB: 1}, {-1: 1}, {1: math.nan}, {1: 1e308}, {"a": 1}, {None: 1}, {"1": "1"},
    (1, 2), object(),
)  # fmt: skip
# A sound value of each option, made from chance.
_SOUND: dict[str, Any] = {
    "max_tokens": lambda rng: rng.choice([1, 1, 2, 3, 5]),
    "min_tokens": lambda rng: rng.randint(0, 2),
    "allowed_token_ids": lambda rng: [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))],
    "bad_words": lambda rng: [rng.choice(["a", " b", "cd", "é"]) for _ in range(rng.randint(0, 3))],
    "logit_bias": lambda rng: {rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randint(0, 3))},
    "repetition_penalty": lambda rng: rng.choice([0.01, 1.0, 1.2, 100.0]),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "temperature": lambda rng: rng.choice([0, 1e-30, 0.7, 1.0, 100]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 5, 2**40]),
    "top_p": lambda rng: rng.choice([1e-9, 0.5, 1]),
    "min_p": lambda rng: rng.choice([0, 0.1, 1]),
    "seed": lambda rng: rng.choice([None, 0, 2**63 - 1]),
    "n": lambda rng: rng.choice([1, 1, 1, 2, 3]),
    "stop": lambda rng: rng.choice([[], ["a"], "b", ["é", "\0"]]),
    "stop_token_ids": lambda rng: [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))],
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "logprobs": lambda rng: rng.choice([None, 0, 1, 20]),
    "prompt_logprobs": lambda rng: rng.choice([None, 0, 2]),
    "skip_special_tokens": lambda rng: rng.random() < 0.5,
}


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["served", "refused as invalid", "aborts", "several continuations", "preemptions", "beyond the wire"]
    forced += ["grammars", "odd grammars"]
    tally = Tally("F3", tier, seed, _PLANNED[tier], [*forced, *(f"odd {name}" for name in _SOUND)])
    with tiny_model() as model:
        for options in RUNNERS.values():
            switches = options | {"preempt_every": 7}
            _one_engine(tally, model, switches, _PLANNED[tier] // len(RUNNERS) + 1)
    return tally.report()


def _one_engine(tally: Tally, model: Path, options: dict[str, Any], count: int) -> None:
    census = Census()
    engine = small_engine(model, **options)
    probe, loop, number, sound = Probe(engine), DrivenLoop(engine), 0, grammars(engine)
    for batch in range(0, count, _TOGETHER):
        for _ in range(min(_TOGETHER, count - batch)):
            number += 1
            command = _message(tally, tally.random, number, sound)
            with tally.case(f"{options} {command!r:.400}"):
                loop.command(command)
                if tally.random.random() < 0.05:
                    loop.turn()
                if tally.random.random() < 0.05:
                    loop.command(messages.Abort(tally.random.choice([number, 0, -5, number - 3])))
                    tally.event("aborts")
        try:
            loop.run()
        except Exception as error:
            tally.fail(f"the loop died: {type(error).__name__}: {error}, in a batch that ended with {command!r:.300}")
            return
        if batch // _TOGETHER % 20 == 0:
            for fault in [*probe.faults(loop), *idle_faults(loop)]:
                tally.fail(f"{options}, after {number} messages: {fault}")
    for fault in [*probe.faults(loop), *idle_faults(loop), *census.faults(allowed=1)]:
        tally.fail(f"{options}, at the end: {fault}")
    _count(tally, loop)


def _count(tally: Tally, loop: DrivenLoop) -> None:
    """What became of the messages."""
    for refused in loop.refused.values():
        tally.expect(refused.kind in _KINDS and bool(refused.message), f"a refusal without a reason: {refused}")
        tally.expect(refused.kind != "fault", f"request {refused.number} is no client's fault: {refused.message}")
        tally.event("refused as invalid", refused.kind == "invalid")
    tally.event("served", len(loop.ended))
    tally.event("several continuations", sum(index > 0 for _, index in loop.served))
    tally.event("preemptions", loop.engine.load.preemptions)
    for (number, index), served in loop.served.items():
        sound = served.finish_reason in (None, "stop", "length", "error") and len(served.token_ids) <= MAX_MODEL_LEN
        tally.expect(sound, f"request {number}/{index} was answered with {served}")


def _message(tally: Tally, rng: random.Random, number: int, sound: list[bytes]) -> messages.Submit:
    """A message of sound and odd values, as it comes off the wire where it can cross it."""
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 4])}
    for name in rng.sample(sorted(_SOUND), rng.randint(0, 5)):
        fields[name] = _SOUND[name](rng)
    odd = rng.random() < 0.6
    if odd:
        name = rng.choice([*_SOUND, "name", ""])
        fields[name] = rng.choice(_ODD)
        tally.event(f"odd {name or 'empty name'}")
    length = rng.choice([1, 2, 7, 8, 9, 30, 60, 200, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
    token_ids: Any = [rng.randrange(VOCAB) for _ in range(length if rng.random() < 0.1 else rng.randint(1, 12))]
    stream, salt, grammar, after = rng.random() < 0.5, rng.choice(["", "", "a", "é" * 500]), None, None
    if rng.random() < 0.1:
        token_ids = rng.choice(_ODD)
    if rng.random() < 0.05:
        cut = sound[0][: rng.randint(0, len(sound[0]))]
        grammar = rng.choice([*sound, *sound, cut, b"", b"\0" * 50, b"{}", rng.randbytes(200)])
        after = rng.choice([None, None, -1, 5, 2**40])
        tally.event("grammars" if grammar in sound else "odd grammars")
    message = messages.Submit(number, token_ids, fields, stream, salt, grammar, after)
    try:
        return msgspec.msgpack.decode(messages.encoder().encode(message), type=messages.Submit)
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError):
        tally.event("beyond the wire")
        return message
