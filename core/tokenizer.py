"""Text to token ids and back.

A *control token* is one that the tokenizer marks as special: `<|im_end|>`, `</s>`. Text from a user never becomes one;
only a chat template's own text does. See `Tokenizer.apply_chat_template`.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tokenizers

from hookline.chat_template import ChatTemplate
from hookline.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from hookline.checkpoint.reader import TokenizerSource

# Unicode's two planes of private characters, which belong to no script.
_ALIAS_PLANE, _STAND_IN_PLANE = 0xF0000, 0x100000
_UNKNOWN = chr(_STAND_IN_PLANE + 2**16 - 3)
_MAX_DEPTH = 64
# Fields whose values templates compare, and names of fields that they ask for: no stand-in may come there for a word.
_KNOWN_VALUES = frozenset({"role", "type"})
_KNOWN_KEYS = frozenset(
    {
        *("role", "content", "text", "type", "name", "id", "tool_calls", "tool_call_id", "function", "arguments"),
        *("reasoning", "reasoning_content", "parameters", "properties", "required", "description", "enum", "items"),
    }
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Byte-level vocabularies (GPT-2) spell a byte as itself where it prints, and the others as characters 256 and on.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNPRINTED = tuple(byte for byte in range(256) if byte not in _PRINTED)
_BYTE_OF_CHAR = MappingProxyType(
    {chr(byte): byte for byte in _PRINTED} | {chr(256 + number): byte for number, byte in enumerate(_UNPRINTED)}
)


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        tokenizer: is changed: truncation and padding are switched off, and the special tokens marked as such.
        chat_template: Jinja source.
        special_tokens: `bos_token`, `eos_token` and so on to their texts, as templates use them.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        known = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}
        unmarked = [
            tokenizers.AddedToken(text, normalized=False, special=True)
            for text in self.special_tokens.values()
            if text not in known and tokenizer.token_to_id(text) is not None
        ]
        tokenizer.add_special_tokens(unmarked)
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, added in self._added.items() if added.special)
        ends = {self.special_tokens.get(name) for name in ("bos_token", "eos_token")}
        # What stands for characters outside the vocabulary: any text may hold it.
        unknown = set(tokenizer.encode(_UNKNOWN, add_special_tokens=False).ids)
        self._control = {
            added.content: token_id
            for token_id, added in self._added.items()
            if added.special and (token_id not in unknown or added.content in ends)
        }
        self._control_ids = frozenset(self._control.values())
        # For each control token's text a private spelling that nobody outside can know. Made here, for several threads
        # encode: two that made it at their first need would not make the same.
        self._secret = "".join(chr(_ALIAS_PLANE + secrets.randbelow(2**12)) for _ in range(16))
        self._aliases = {
            text: f"{self._secret}{chr(_ALIAS_PLANE + 2**13 + number)}" for number, text in enumerate(self._control)
        }
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_source(cls, source: TokenizerSource) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            CheckpointError: if the source holds none, or it cannot be read.
            ModelConfigError: if its chat template is unsound.
        """
        built = source.tokenizer
        if built is None:
            if source.tokenizer_json is None:
                raise CheckpointError("the checkpoint has no tokenizer", hint="Put tokenizer.json beside the weights.")
            try:
                built = tokenizers.Tokenizer.from_buffer(source.tokenizer_json)
            except Exception as error:
                raise CheckpointError(f"tokenizer.json cannot be read: {str(error)[:500]}") from error
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        texts = {name: text for name in names if (text := getattr(source, name)) is not None}
        return cls(built, source.chat_template, texts)

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's logits may be wider."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The id of `eos_token`, if there is one."""
        text = self.special_tokens.get("eos_token")
        token_id = None if text is None else self._tokenizer.token_to_id(text)
        return frozenset() if token_id is None else frozenset({token_id})

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads beside the messages and the special tokens."""
        return frozenset() if self._template is None else self._template.variables

    def to_json(self) -> str:
        """The tokenizer without its template, as `tokenizer.json` has it."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: put the tokens around it that the checkpoint wants (BOS).
            allow_special: let the text's own control tokens be control tokens. Only for text of our own.

        Raises:
            InvalidRequestError: if the text is no valid Unicode.
        """
        encoding = _encode(self._tokenizer, text, add_special_tokens)
        token_ids: list[int] = encoding.ids
        if allow_special or self._control_ids.isdisjoint(token_ids):
            return token_ids
        put_around = encoding.special_tokens_mask
        if all(own or token_id not in self._control_ids for token_id, own in zip(token_ids, put_around, strict=True)):
            return token_ids
        return self._encode_ordinary(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know add nothing."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands within a text: with its leading space, and U+FFFD for half a character."""
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text that the chat template makes of a conversation; see `ChatTemplate.render`.

        Raises:
            InvalidRequestError: if there is no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the checkpoint has no chat template, so it does not take messages",
                field="messages",
                hint="Give a plain prompt, or a model tuned for chat.",
            )
        opening = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._template.render(messages, **opening, **variables)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, in which only the template's own text makes control tokens.

        Control tokens are made of signs, such as `<` and `|`, and words between them. If the request's texts hold no
        such sign and are no such word, all control tokens are the template's. If they do, the template is rendered
        once more with private stand-ins for the signs, and for a word's first letter, in all texts of the request,
        however deep they are nested; whatever the template does with its texts, joining, cutting or trimming them, or
        putting signs of its own around them, a control token in this second rendering is the template's. If both
        renderings have the same ones, the plain rendering is encoded as it is, and the ids are those of
        `transformers`. If not, the second one is: its control tokens as such, the rest as ordinary text.

        Args:
            messages: each with a `role`, and what else the template reads.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: end with the text of the last message's content.
            variables: what else the template reads, such as `tools`.

        Raises:
            InvalidRequestError: if there is no chat template, or it refuses the messages.
            ModelConfigError: if the template does what it must not.
        """
        plain = self.render_chat(messages, add_generation_prompt, continue_final_message, **variables)
        token_ids: list[int] = _encode(self._tokenizer, plain, False).ids
        found = [token_id for token_id in token_ids if token_id in self._control_ids]
        texts = list(_texts([messages, variables]))
        if not any(self._signs.search(text) or text.strip() in self._inner_words for text in texts):
            shielded, stand_ins = plain, {}
        else:
            stand_ins = self._stand_ins({*plain, *(self.chat_template or "")}.union(*texts))
            hide = partial(self._hide, {char: sign for sign, char in stand_ins.items()})
            safe = {name: _changed(value, hide, known=True) for name, value in variables.items()}
            shielded = self.render_chat(_changed(messages, hide), add_generation_prompt, continue_final_message, **safe)
        back = str.maketrans(stand_ins)
        own = [self._control[part] for part in self._added_text.findall(shielded) if part in self._control]
        same = shielded.translate(back) == plain or not any(map(self._names_control, texts))
        if found == own and same:
            return token_ids
        marked = self._added_text.sub(lambda part: self._aliases.get(part[0], part[0]), shielded)
        return self._encode_ordinary(marked.translate(back), False)

    # -- details -------------------------------------------------------------------------------------------------------

    @cached_property
    def _signs(self) -> re.Pattern[str]:
        """Matches every character of control tokens that is no part of a word, and whole ones that are but words."""
        signs, words = set[str](), list[str]()
        for text in self._control:
            own = {c for c in text if not c.isalnum() and not c.isspace() and c not in "_-"}
            signs.update(own)
            words.extend([] if own else [re.escape(text)])
        parts = [*(re.escape(sign) for sign in sorted(signs)), *sorted(words, key=len, reverse=True)]
        return re.compile("|".join(parts) or r"(?!)")

    @cached_property
    def _inner_words(self) -> frozenset[str]:
        """The words between the signs of control tokens, such as `im_end`."""
        return frozenset(word for text in self._control for word in re.findall(r"[\w-]+", text))

    def _hide(self, stand_ins: Mapping[str, str], text: str, known: bool) -> str:
        """`text` with stand-ins for what may be part of a control token; a word is left where templates compare it."""
        hidden = self._signs.sub(lambda match: stand_ins[match[0][0]] + match[0][1:], text)
        word = text.strip()
        if not known and word in self._inner_words:
            hidden = hidden.replace(word[0], stand_ins[word[0]], 1)
        return hidden

    @cached_property
    def _added_text(self) -> re.Pattern[str]:
        """Matches every added token's text, the longest first, as the tokenizer does."""
        texts = sorted((added.content for added in self._added.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _ordinary(self) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
        """A copy that reads control tokens' texts as ordinary text, and the ids of its private spellings of them."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        flags = {added.content: added for added in self._added.values()}
        copy.add_tokens(
            [
                tokenizers.AddedToken(
                    alias, lstrip=flags[text].lstrip, rstrip=flags[text].rstrip, normalized=False, special=False
                )
                for text, alias in self._aliases.items()
            ]
        )
        return copy, {alias: self._control[text] for text, alias in self._aliases.items()}

    def _names_control(self, text: str) -> bool:
        return any(part in self._control for part in self._added_text.findall(text))

    def _stand_ins(self, used: set[str]) -> dict[str, str]:
        """For each character of control tokens a private one that is not in use: private to own."""
        chars = sorted({char for text in self._control for char in text})
        codes = range(_STAND_IN_PLANE, _STAND_IN_PLANE + 2**16 - 2)
        free = list(islice((chr(code) for code in codes if chr(code) not in used), len(chars)))
        if len(free) < len(chars):
            raise InvalidRequestError("the texts use up Unicode's private characters", field="messages")
        return dict(zip(free, chars, strict=True))

    def _encode_ordinary(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes text in which only the private spellings make control tokens."""
        ordinary, controls = self._ordinary
        encoding = _encode(ordinary, text, add_special_tokens)
        token_ids: list[int] = encoding.ids
        if self._control_ids.isdisjoint(token_ids) and self._secret not in text:
            return token_ids
        answer: list[int] = []
        rows = zip(token_ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        for token_id, token, put_around, (start, end) in rows:
            if token in controls:
                answer.append(controls[token])
            elif token_id in self._control_ids and not put_around:
                answer.extend(self._spell_out(text[start:end]))
            else:
                answer.append(token_id)
        return answer

    def _spell_out(self, text: str) -> list[int]:
        """Encodes, in two halves, the text of a control token that the vocabulary itself would make one."""
        if len(text) < 2:
            raise InvalidRequestError(f"the text holds {text!r}, which this tokenizer cannot spell out", field="prompt")
        return [i for part in (text[:1], text[1:]) for i in self._encode_ordinary(part, False)]

    @cached_property
    def decoder_kinds(self) -> tuple[str, ...]:
        """Names of the decoder's parts in order, as `tokenizer.json` spells them."""
        decoder = self._tokenizer.decoder
        parts = [] if decoder is None else [json.loads(decoder.__getstate__())]
        while any(part["type"] == "Sequence" for part in parts):
            parts = [inner for part in parts for inner in (part["decoders"] if part["type"] == "Sequence" else [part])]
        return tuple(part["type"] for part in parts)

    def knows(self, token_id: int) -> bool:
        """Whether the id stands for a token; a model's logits may be wider than its tokenizer's vocabulary."""
        return self._tokenizer.id_to_token(token_id) is not None

    def find_token(self, text: str) -> int | None:
        """The id of the token that is spelled so, if there is one."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def is_byte_token(self, token_id: int) -> bool:
        """Whether a token is one raw byte (`<0x0A>`) that the decoder joins with its neighbours."""
        return "ByteFallback" in self.decoder_kinds and bool(_BYTE_TOKEN.fullmatch(self._spelling(token_id)))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in a byte-level vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            spelling = self._spelling(token_id)
            try:
                found = bytes(_BYTE_OF_CHAR[char] for char in spelling)
            except KeyError:
                found = spelling.encode()
            self._bytes[token_id] = found
        return found

    def _spelling(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""


class IncrementalDetokenizer:
    """The text of a growing output, piece by piece, in time linear in its length.

    The pieces joined are what `Tokenizer.decode` makes of all tokens, and no piece holds half a character: what could
    still become one is held back. A run of raw byte tokens is held back to its end, because the decoder reads the whole
    run as broken if any of it is.

    Args:
        tokenizer: decodes.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        byte_level = tokenizer.decoder_kinds == ("ByteLevel",)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if byte_level else None
        self._window: list[int] = []
        self._known = 0
        self._known_text = ""

    def push(self, token_id: int) -> str:
        """Takes in the next token and gives the text that is certain now and was not before."""
        if token_id in self._skipped or not self._tokenizer.knows(token_id):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        return "" if self._tokenizer.is_byte_token(token_id) else self._advance()

    def flush(self) -> str:
        """Gives the rest at the end of the output."""
        return self._utf8.decode(b"", final=True) if self._utf8 is not None else self._advance()

    def _advance(self) -> str:
        """Decodes the tokens since the last piece, after those of that piece, which tell how the new ones join on."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        if len(text) <= len(self._known_text):
            return ""
        piece = text[len(self._known_text) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._known_text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return piece


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is no valid Unicode at character {error.start}: half of a surrogate pair", field="prompt"
        ) from error
    # As a batch: alone it would be encoded under Python's lock, and no other thread could go on meanwhile.
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    """Every text in JSON-like data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if depth > _MAX_DEPTH:
            raise InvalidRequestError(f"the messages are nested more than {_MAX_DEPTH} deep", field="messages")
        for item in value:
            yield from _texts(item, depth + 1)
            if isinstance(value, Mapping):
                yield from _texts(value[item], depth + 1)


def _changed(value: Any, change: Callable[[str, bool], str], known: bool = False) -> Any:
    """A copy of JSON-like data with every text changed, keys too.

    Args:
        change: is given a text, and whether templates compare it with what they know.
        known: whether they do with `value`, where it is a text.
    """
    if isinstance(value, str):
        return change(value, known)
    if isinstance(value, Mapping):
        return {
            _changed(key, change, key in _KNOWN_KEYS): _changed(item, change, key in _KNOWN_VALUES)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return value
