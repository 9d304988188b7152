"""X1: whatever tokens come, the deltas joined are the whole text, which is what decoding the tokens gives.

The engine, its scheduler and its loop are real; in place of the model stands a runner that repeats the prompt, so that
the output's tokens can be any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline import Engine
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.output_processor import OutputProcessor
from hookline.scheduling.request import ScheduledBatch
from hookline.tokenizer import Tokenizer
from tests.suites.invariants import idle_faults
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import DrivenLoop, small_engine, tiny_model
from tests.suites.tokens import byte_tokenizer, fallback_tokenizer, merged_tokenizer

_PLANNED = {Tier.T1: 500, Tier.T2: 50_000}
_BROKEN = "\ufffd"
_PIECES = (
    "a", " ", "word", "\n", "\0", "\ufeff", "\x1b[0m", "é", "e\u0301", "\u0301", "ß", "日本", "שלום", "\u202eאב\u202c",
    "😀", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "🏳️‍🌈", "👍🏽", "\U0010ffff", "\u200d", "\u2028", "�", "<|im_end|>", "𝕏",
)  # fmt: skip
# Bytes that no UTF-8 has in these places: alone, cut short, overlong, surrogates, above the last character.
_UNSOUND = (b"\x80", b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80")


class Echo(Runner):
    """Chooses the prompt's tokens, one after the other."""

    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        """See `Runner.launch`."""
        requests = (part.request for part in batch.requests if part.samples)
        return Flight(batch, StepResult([[r.prompt_token_ids[len(r.output_token_ids)]] for r in requests]))


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ("unsound bytes", "characters over several tokens", "every byte", "held back at the end", "special tokens")
    tally = Tally("X1", tier, seed, _PLANNED[tier], forced)
    chance = random.Random(seed)
    samples = ["".join(chance.choice(_PIECES) for _ in range(20)) for _ in range(40)]
    kinds = {"bytes": byte_tokenizer(), "merged": merged_tokenizer(samples), "fallback": fallback_tokenizer()}
    with tiny_model() as model:
        for kind, tokenizer in kinds.items():
            engine = _echoing(model, tokenizer)
            loop, number = DrivenLoop(engine), 0
            every = _texts(tally.random, _PLANNED[tier] // len(kinds) + 1)
            for text in every:
                ids = _ids(tokenizer, kind, text)[:120]
                with tally.case(f"{kind}: {text!r}"):
                    number += 2
                    _check(tally, loop, tokenizer, kind, ids, number)
            for fault in idle_faults(loop):
                tally.fail(f"{kind}: {fault}")
    return tally.report()


def _echoing(model: Path, tokenizer: Tokenizer) -> Engine:
    engine = small_engine(model)
    runner = engine._runner
    engine._runner = Echo(runner.model, runner.processor, runner.cache)
    engine._outputs = OutputProcessor(tokenizer)
    return engine


def _texts(rng: random.Random, count: int) -> Iterator[bytes]:
    """All bytes in a row and backwards, then random texts, many with unsound bytes or cut inside a character."""
    yield bytes(range(120))
    yield bytes(range(120, 240))
    yield bytes(range(255, 135, -1))
    for _ in range(count - 3):
        parts = [rng.choice(_PIECES).encode() for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.4:
            parts.insert(rng.randint(0, len(parts)), rng.choice(_UNSOUND))
        text = b"".join(parts)
        yield text[: rng.randint(1, len(text))] if rng.random() < 0.4 else text


def _ids(tokenizer: Tokenizer, kind: str, text: bytes) -> list[int]:
    """Tokens of the text; of its single bytes where it is no text."""
    if kind == "fallback":
        whole = text.decode("utf-8", "ignore")
        return tokenizer.encode(whole) if whole.encode() == text and whole else [byte + 1 for byte in text]
    if _is_sound(text):
        return tokenizer.encode(text.decode(), allow_special=True)
    alphabet = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [alphabet[bytes([byte])] for byte in text]


def _is_sound(text: bytes) -> bool:
    return text.decode("utf-8", "ignore").encode() == text


def _check(tally: Tally, loop: DrivenLoop, tokenizer: Tokenizer, kind: str, ids: list[int], number: int) -> None:
    skips = bool(number % 4)
    options: dict[str, Any] = {"max_tokens": len(ids), "ignore_eos": True, "skip_special_tokens": skips}
    loop.submit(number, ids, stream=True, **options)
    loop.submit(number + 1, ids, stream=False, **options)
    loop.run()
    streamed, whole = loop.served[number, 0], loop.served[number + 1, 0]
    expected = tokenizer.decode(ids, skip_special_tokens=skips)
    label = f"{kind}: {ids}"
    tally.expect(streamed.text == expected, f"{label}: streams {streamed.text!r}, decodes to {expected!r}")
    tally.expect(whole.text == expected, f"{label}: gives {whole.text!r}, decodes to {expected!r}")
    tally.expect(streamed.token_ids == ids == whole.token_ids, f"{label}: other tokens came")
    special = sum(token in tokenizer.special_ids for token in ids)
    if kind != "fallback" and not special:
        raw = b"".join(map(tokenizer.token_bytes, ids))
        tally.expect(expected == raw.decode("utf-8", "replace"), f"{label}: {expected!r} is not what the bytes say")
        sound = _is_sound(raw) and _BROKEN.encode() not in raw
        tally.expect(not sound or _BROKEN not in streamed.text, f"{label}: a broken character in {streamed.text!r}")
        tally.event("unsound bytes", not _is_sound(raw))
        tally.event("held back at the end", raw.decode("utf-8", "replace") != raw.decode("utf-8", "ignore"))
        tally.event("every byte", len(set(raw)) == len(raw) == 120)
    tally.event("characters over several tokens", len(expected) < len(ids))
    tally.event("special tokens", special)
