"""X1: whatever tokens come, the deltas joined are the whole text, which is what decoding the tokens gives.

The engine, its scheduler and its loop are real; in place of the model stands a runner that repeats the prompt, so that
the output's tokens can be any. The last of the texts go over HTTP to a whole server, streamed and not: it repeats each,
and goes on with tokens of its own choice out of those that the text consists of.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from hookline import Engine
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.output_processor import OutputProcessor
from hookline.scheduling.request import ScheduledBatch
from hookline.tokenizer import Tokenizer
from tests.suites.beside import several, watched
from tests.suites.invariants import idle_faults
from tests.suites.raw_client import Reply, ask, stream
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import DrivenLoop, small_engine, tiny_model
from tests.suites.tokens import byte_tokenizer, fallback_tokenizer, merged_tokenizer
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 500, Tier.T2: 50_000}
# Over HTTP: texts, and how many at a time; tokens of a text, and those that the model adds.
_SERVED = {Tier.T1: 24, Tier.T2: 500}
_TOGETHER, _MOST, _ADDED = 6, 120, 20
_BROKEN = "\ufffd"
_PIECES = (
    "a", " ", "word", "\n", "\0", "\ufeff", "\x1b[0m", "é", "e\u0301", "\u0301", "ß", "日本", "שלום", "\u202eאב\u202c",
    "😀", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "🏳️‍🌈", "👍🏽", "\U0010ffff", "\u200d", "\u2028", "�", "<|im_end|>", "𝕏",
)  # fmt: skip
# Halves of surrogate pairs as JSON writes them: alone, in a text, in the wrong order, and as if UTF-8 had them.
_HALVES = (rb'"\ud83d"', rb'"a\ude00b"', rb'"\ude00\ud83d"', b'"\xed\xa0\xbd"')
_EMOJI, _ESCAPED = '"😀"'.encode(), rb'"\ud83d\ude00"'
# Where such a text may stand.
_PLACES = (
    ("/v1/completions", b'{"prompt": %b, "max_tokens": 2, "temperature": 0, "echo": true}'),
    ("/v1/completions", b'{"prompt": %b, "max_tokens": 2, "temperature": 0, "echo": true, "stream": true}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "temperature": 0, "stop": [%b]}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "temperature": 0, "user": %b}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": %b}], "max_tokens": 2, "temperature": 0}'),
    ("/tokenize", b'{"prompt": %b}'),
)
# Bytes that no UTF-8 has in these places: alone, cut short, overlong, surrogates, above the last character.
_UNSOUND = (b"\x80", b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80")


class Echo(Runner):
    """Chooses the prompt's tokens, one after the other."""

    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        """See `Runner.launch`."""
        requests = (part.request for part in batch.requests if part.samples)
        return Flight(batch, StepResult([[r.prompt_token_ids[len(r.output_token_ids)]] for r in requests]))


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["unsound bytes", "characters over several tokens", "every byte", "held back at the end", "special tokens"]
    forced += [f"over HTTP: {kind}" for kind in ("texts", "tokens", "broken characters", "halves refused", "pairs")]
    planned = _PLANNED[tier] + _SERVED[tier] + len(_PLACES) * (len(_HALVES) + 1)
    tally = Tally("X1", tier, seed, planned, forced)
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
        asyncio.run(_over_http(tally, tier, model, kinds["bytes"]))
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


async def _over_http(tally: Tally, tier: Tier, model: Path, tokenizer: Tokenizer) -> None:
    """All that a client sees: of texts and tokens of all kinds, and of what is no text."""
    texts = [(text, tally.random.randrange(2**31)) for text in _texts(tally.random, _SERVED[tier])]
    async with watched(tally, model, grammars=False) as watch:
        await several(_TOGETHER, partial(_serve, tally, watch, tokenizer), texts)
        await several(_TOGETHER, partial(_serve_halves, tally, watch), _PLACES)


async def _serve(tally: Tally, watch: Watch, tokenizer: Tokenizer, asked: tuple[bytes, int]) -> None:
    """A text, or tokens that are none, and a seed."""
    text, seed = asked
    port, ids = watch.served.port, _ids(tokenizer, "bytes", text)[:_MOST]
    is_text = _is_sound(text) and len(text) <= _MOST
    sent: dict[str, Any] = {"prompt": text.decode() if is_text else ids, "echo": True, "skip_special_tokens": False}
    sent |= {
        "allowed_token_ids": sorted(set(ids)),
        "max_tokens": _ADDED,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": seed,
    }
    with tally.case(f"over HTTP: {text!r}"):
        reply, told = await ask(port, "/v1/completions", sent), await stream(port, sent)
        for answer in (reply, told):
            watch.reply(f"{sent}", answer)
        [choice] = reply.json["choices"]
        known, added = choice["prompt_token_ids"], choice["token_ids"]
        due = tokenizer.encode(text.decode()) if is_text else ids
        tally.expect(known == due and len(added) == _ADDED, f"{sent}: the tokens are {known} and {added}")
        begins = sent["prompt"] if is_text else tokenizer.decode(ids, skip_special_tokens=False)
        ends = tokenizer.decode(added, skip_special_tokens=False)
        tally.expect(choice["text"] == begins + ends, f"{sent}: {choice['text']!r} is not {begins!r} and {ends!r}")
        tally.expect(told.text() == choice["text"], f"{sent}: streams {told}, else {choice['text']!r}")
        for tokens, whole in ((known, begins), (added, ends)):
            found = (await _sent(watch, "/detokenize", {"tokens": tokens})).json
            tally.expect(found == {"prompt": whole}, f"{tokens} are {found}, not {whole!r}")
        tally.event("over HTTP: texts" if is_text else "over HTTP: tokens")
        tally.event("over HTTP: broken characters", _BROKEN in ends)


async def _serve_halves(tally: Tally, watch: Watch, place: tuple[str, bytes]) -> None:
    """Half a surrogate pair is no character, and refused wherever it stands. Both halves are one."""
    path, form = place
    for half in _HALVES:
        with tally.case(f"{path}: {form % half!r}"):
            reply = await _sent(watch, path, form % half)
            refused = reply.status == 400 and "error" in reply.json
            tally.expect(refused, f"{form % half!r} gets {reply.status}: {reply.body!r}")
            tally.event("over HTTP: halves refused", refused)
    with tally.case(f"{path}: {form % _ESCAPED!r}"):
        found, due = [_said(await _sent(watch, path, form % text)) for text in (_ESCAPED, _EMOJI)]
        tally.expect(found == due, f"{form % _ESCAPED!r}: {found}, not {due}")
        tally.event("over HTTP: pairs")


async def _sent(watch: Watch, path: str, body: object) -> Reply:
    reply = await ask(watch.served.port, path, body)
    watch.reply(f"{path}: {body!r}", reply)
    return reply


def _said(reply: Reply) -> str:
    """The text of an answer, streamed or not, or the tokens.

    Raises:
        KeyError: if it is an error.
    """
    lines = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line not in (b"", b"data: [DONE]")]
    answers = [orjson.loads(line) for line in lines]
    choices = [choice for answer in answers for choice in answer.get("choices", ())]
    return "".join(str(choice.get("text", choice.get("message"))) for choice in choices) or str(answers[0]["tokens"])
