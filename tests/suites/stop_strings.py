"""X2: stop strings against an oracle on the full text, whatever pieces the text and the tokens come in.

The last of them go over HTTP, streamed and not, against the text that the same request gives without them.
"""

from __future__ import annotations

import asyncio
import codecs
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hookline.output_processor import OutputProcessor
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import StopStringMatcher, TokenLogprob
from hookline.scheduling.request import FinishReason, Request, RequestStatus
from hookline.tokenizer import Tokenizer
from tests.suites.beside import several, watched
from tests.suites.raw_client import Connection, Told, ask
from tests.suites.report import SuiteReport, Tally, Tier
from tests.suites.rig import tiny_model
from tests.suites.tokens import byte_tokenizer
from tests.suites.watch import Watch

_PLANNED = {Tier.T1: 5_000, Tier.T2: 500_000}
# Few different characters, so that stop strings begin often and are complete now and then.
_ALPHABETS = ("ab", "abc", "aä😀", "\U0001f468\u200d\U0001f469x", "é\u0301e ")
# Of these cases, how many cross the output processor as tokens.
_TOKENS_EVERY = 2
# Over HTTP: all cases, those of one text, and texts at a time.
_SERVED = {Tier.T1: 30, Tier.T2: 1_000}
_OF_ONE, _TOGETHER = 5, 6
_BROKEN = "\ufffd"


def oracle(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first complete stop string starts, and the longest that is complete there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def run(tier: Tier, seed: int) -> SuiteReport:
    forced = ["matches", "no matches", "matches over a cut", "stops inside a character's bytes", "tokens taken away"]
    forced += [f"over HTTP: {kind}" for kind in ("matches", "no matches", "characters of several tokens", "told too")]
    tally = Tally("X2", tier, seed, _PLANNED[tier] + _SERVED[tier], forced)
    tokenizer = byte_tokenizer()
    for number in range(_PLANNED[tier]):
        rng = random.Random(tally.random.random())
        alphabet = rng.choice(_ALPHABETS)
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40)))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        with tally.case(f"case {number} of {text!r} and {stops}"):
            if number % _TOKENS_EVERY:
                _by_text(tally, rng, text, stops)
            else:
                _by_tokens(tally, rng, tokenizer, text, stops)
    asyncio.run(_over_http(tally, tier, tokenizer))
    return tally.report()


def _by_text(tally: Tally, rng: random.Random, text: str, stops: list[str]) -> None:
    """The matcher alone: the text in random pieces."""
    matcher, shown, at = StopStringMatcher(stops), "", 0
    expected = oracle(text, stops)
    whole = text if expected is None else text[: expected[0]]
    while at < len(text):
        size = rng.randint(0, 6)
        shown, at = shown + matcher.push(text[at : at + size]), at + size
        due = whole if matcher.matched is not None else text[: _certain(text[:at], stops)]
        tally.expect(shown == due, f"{text!r}, {stops}: shows {shown!r} after {at} characters, not {due!r}")
        over_cut = expected is not None and at - size > expected[0] and matcher.matched is not None
        if over_cut:
            tally.event("matches over a cut")
            break
    if matcher.matched is None:
        shown += matcher.flush()
    found = None if matcher.matched is None else (len(shown), matcher.matched)
    tally.expect((shown, found) == (whole, expected), f"{text!r}, {stops}: {found} instead of {expected}")
    tally.event("no matches" if expected is None else "matches")


def _certain(text: str, stops: list[str]) -> int:
    """How much of `text` can be part of no stop string that more text completes."""
    return next(at for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in stops))


def _by_tokens(tally: Tally, rng: random.Random, tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """The output processor: the text's bytes as tokens, several a step, at cuts that no character minds."""
    ids = tokenizer.encode(text) or [1]
    stream, reports = rng.random() < 0.5, rng.random() < 0.7
    params = SamplingParams(max_tokens=len(ids), stop=tuple(stops), logprobs=0 if reports else None)
    request = Request("x/0", [1], params, 1000)
    request.max_output_tokens, request.status = len(ids), RequestStatus.RUNNING
    outputs = OutputProcessor(tokenizer)
    outputs.add("x", None, [request], stream=stream)
    at, stopped, pieces, told = 0, False, "", list[int]()
    logprobs, entries = [TokenLogprob(token, -float(place), 1) for place, token in enumerate(ids)], list[TokenLogprob]()
    reason: str | int | None = None
    while at < len(ids) and not stopped:
        size = rng.randint(1, 5)
        new = ids[at : at + size]
        request.output_token_ids += new
        stopped = outputs.take_tokens(request, new, logprobs[at : at + size] if reports else ())
        at += size
        if stopped or at >= len(ids):
            request.status = RequestStatus.FINISHED
            request.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            outputs.finish(request)
        for delta in outputs.take_deltas()[1]:
            pieces, told, entries = pieces + delta.text, told + delta.token_ids, entries + (delta.logprobs or [])
            reason = delta.stop_reason
    full, expected = tokenizer.decode(ids), oracle(tokenizer.decode(ids), stops)
    kept = len(ids) if expected is None else _completing(ids, tokenizer, full[: expected[0] + len(expected[1])])
    label = f"{text!r}, {stops}, stream {stream}"
    due = (full, None) if expected is None else (full[: expected[0]], expected[1])
    tally.expect((pieces, reason) == due, f"{label}: {pieces!r} with {reason!r} instead of {due}")
    tally.expect(told == ids[:kept] == request.output_token_ids, f"{label}: {len(told)} tokens told, {kept} expected")
    tally.expect(entries == (logprobs[:kept] if reports else []), f"{label}: logprobs are not those of the tokens")
    if expected is not None:
        tally.event("matches")
        tally.event("tokens taken away", kept < at and kept < len(ids))
        tally.event("stops inside a character's bytes", (at - size) not in _borders(full) and at - size > 0)
    else:
        tally.event("no matches")


def _completing(ids: list[int], tokenizer: Tokenizer, text: str) -> int:
    """How many of the tokens it takes until `text` is there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = ""
    for count, token in enumerate(ids, 1):
        found += decoder.decode(tokenizer.token_bytes(token))
        if len(found) >= len(text):
            return count
    return len(ids)


def _borders(text: str) -> set[int]:
    """Places, in bytes, between two characters."""
    return {len(text[:end].encode()) for end in range(len(text) + 1)}


@dataclass(slots=True)
class _Told(Told):
    """A stream, and the stop string that it tells of."""

    stop_reason: str | int | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        Told.take(self, event)  # `super()` does not know a class that was made anew for its slots
        for choice in event.get("choices", ()):
            self.stop_reason = choice["stop_reason"] if choice["finish_reason"] is not None else self.stop_reason


async def _over_http(tally: Tally, tier: Tier, tokenizer: Tokenizer) -> None:
    chances = [random.Random(tally.random.random()) for _ in range(_SERVED[tier] // _OF_ONE)]
    with tiny_model() as model:
        async with watched(tally, model) as watch:
            await several(_TOGETHER, partial(_one_text, tally, watch, tokenizer), chances)


async def _one_text(tally: Tally, watch: Watch, tokenizer: Tokenizer, rng: random.Random) -> None:
    """A text without a stop string, then with several kinds of them."""
    alphabet = rng.choice(_ALPHABETS)
    # Whole characters alone, bytes of them in any order, any bytes.
    ways: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": f"[{alphabet}]+"}},
        {"allowed_token_ids": sorted(set(tokenizer.encode(alphabet)))},
        {},
    ]
    body = {"prompt": "Say it, ", "temperature": 1, "seed": rng.randrange(2**31), "ignore_eos": True}
    body |= {"max_tokens": rng.randint(20, 40), **rng.choice(ways)}
    reply = await ask(watch.served.port, "/v1/completions", body)
    watch.reply("without a stop string", reply)
    for _ in range(_OF_ONE):
        stops = [_stop(rng, reply.text) for _ in range(rng.choice([1, 1, 2, 3]))]
        sent = {**body, "stop": stops, "include_stop_str_in_output": rng.random() < 0.3}
        with tally.case(f"over HTTP: {reply.text!r} and {stops}"):
            await _stopped(tally, watch, sent, reply.text)


def _stop(rng: random.Random, text: str) -> str:
    """A part of the text, or what is almost one."""
    start = rng.randrange(len(text))
    part = text[start : start + rng.randint(1, 6)]
    return part if rng.random() < 0.5 else part + rng.choice(text)


async def _stopped(tally: Tally, watch: Watch, sent: dict[str, Any], whole: str) -> None:
    port, expected = watch.served.port, oracle(whole, sent["stop"])
    due: tuple[str, str, str | None] = (whole, "length", None)
    if expected is not None:
        start, stop = expected
        due = (whole[:start] + (stop if sent["include_stop_str_in_output"] else ""), "stop", stop)
    reply, told = await ask(port, "/v1/completions", sent), _Told()
    async with Connection(port) as connection:
        connection.send("POST", "/v1/completions", {**sent, "stream": True, "stream_options": {"include_usage": True}})
        await connection.follow(told)
    for answer in (reply, told):
        watch.reply(f"{sent}", answer)
    [choice] = reply.json["choices"]
    found = choice["text"], choice["finish_reason"], choice["stop_reason"]
    tally.expect(found == due, f"{sent}: {found} instead of {due}")
    streamed = told.text(), told.finish.get(0), told.stop_reason
    tally.expect(streamed == due, f"{sent}: streams {streamed} instead of {due}: {told.error or told.broken}")
    counts = [(usage or {}).get("completion_tokens") for usage in (reply.json["usage"], told.usage)]
    right = counts[0] == counts[1] and (counts[0] == sent["max_tokens"] if expected is None else bool(counts[0]))
    tally.expect(right, f"{sent}: I12: the usage says {counts[0]} tokens, and {counts[1]} in the stream")
    tally.event("over HTTP: no matches" if expected is None else "over HTTP: matches")
    tally.event("over HTTP: told too", expected is not None and sent["include_stop_str_in_output"])
    over = expected is not None and any(not char.isascii() and char != _BROKEN for char in expected[1])
    tally.event("over HTTP: characters of several tokens", over)
