"""Texts of single tokens, and the log probabilities of both routes, which show tokens by their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.scheduling.output import TokenLogprob
from hookline.tokenizer import Tokenizer

# JSON has no minus infinity; OpenAI's API writes this in its place.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token.

    Attributes:
        text: as it stands within a text; half a character is U+FFFD.
        raw: its bytes, which make whole characters when joined with its neighbours'.
        chars: how many characters begin in it.
    """

    text: str
    raw: list[int]
    chars: int


class TokenTexts:
    """Remembers what each token looks like: at most one entry a token of the vocabulary.

    Args:
        tokenizer: None where the checkpoint has none; a token is then shown by its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def find(self, text: str) -> int | None:
        """The id of the token that is spelled so, if there is one."""
        return None if self._tokenizer is None else self._tokenizer.find_token(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens)

    def _read(self, token_id: int) -> TokenText:
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.knows(token_id):
            text = f"token_id:{token_id}"
            return TokenText(text, list(text.encode()), len(text))
        text = tokenizer.token_text(token_id)
        raw = text.encode()
        if tokenizer.is_byte_token(token_id):
            raw = bytes([int(tokenizer.token_bytes(token_id)[3:5], 16)])  # spelled <0x0A>
        elif tokenizer.decoder_kinds == ("ByteLevel",):
            raw = tokenizer.token_bytes(token_id)
        return TokenText(text, list(raw), sum(byte & 0xC0 != 0x80 for byte in raw))


def chat_logprobs(entries: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/chat/completions`."""
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_chat_token(token_id, logprob, texts) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Iterable[TokenLogprob | None], token_ids: Iterable[int], texts: TokenTexts, offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/completions`.

    The likeliest tokens stand in order, and the chosen one among them, as evaluation tools expect: greedy is what has
    the highest value of all. Where two tokens look the same the likelier one is shown.

    Args:
        entries: of each token; None for a prompt's first, which nothing comes before.
        token_ids: of the same tokens.
        offset: characters of the answer's text before them.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        shown = texts[token_id]
        tokens.append(shown.text)
        offsets.append(offset)
        offset += shown.chars
        logprobs.append(None if entry is None else finite(entry.logprob))
        top: dict[str, float] | None = None
        if entry is not None:
            top = {}
            for other, logprob in (*entry.top, (token_id, entry.logprob)):
                top.setdefault(texts[other].text, finite(logprob))
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], texts: TokenTexts) -> list[Any]:
    """`prompt_logprobs` as the field's servers give them: for each token the likeliest ids and its own."""
    shown: list[Any] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            shown.append(None)
            continue
        rows = {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top, 1)}
        rows[token_id] = entry.logprob, entry.rank
        shown.append(
            {
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts[other].text}
                for other, (logprob, rank) in rows.items()
            }
        )
    return shown


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def _chat_token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    shown = texts[token_id]
    return {"token": shown.text, "logprob": finite(logprob), "bytes": shown.raw}
