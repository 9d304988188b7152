"""Text to token ids and back.

A *control token* is one that the tokenizer marks as special: `<|im_end|>`, `</s>`. Text from a user never becomes one;
only a chat template's own text does. See `Tokenizer.apply_chat_template`.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from hookline.chat_template import ChatTemplate
from hookline.errors import CheckpointError, InvalidRequestError, ModelConfigError

if TYPE_CHECKING:
    from hookline.checkpoint.reader import TokenizerSource

_PRIVATE = 0xF0000  # Unicode's private use plane 15: no script's characters
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


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
        own = {self.special_tokens.get(name) for name in ("bos_token", "eos_token")}
        unknown = self.special_tokens.get("unk_token")
        self._control = {
            added.content: token_id
            for token_id, added in self._added.items()
            if added.special and (added.content != unknown or unknown in own)
        }
        self._control_ids = frozenset(self._control.values())
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

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: put the tokens around it that the checkpoint wants (BOS).
            allow_special: let the text's own control tokens be control tokens. Only for text of our own.

        Raises:
            InvalidRequestError: if the text is no valid Unicode.
        """
        if allow_special:
            return list(_encode(self._tokenizer, text, add_special_tokens).ids)
        return self._encode_ordinary(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know add nothing."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands within a text: with its leading space, and U+FFFD for half a character."""
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            InvalidRequestError: if there is no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the checkpoint has no chat template, so it does not take messages",
                field="messages",
                hint="Give a plain prompt, or a model tuned for chat.",
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, in which only the template's own text makes control tokens.

        Every control token holds some opening character, such as `<`. If the request's texts hold none, all control
        tokens are the template's. If they do, the template is rendered once more with private stand-ins for those
        characters in all texts of the request, however deep they are nested; whatever the template does with its
        texts, joining, cutting or trimming them, a control token in this second rendering is the template's. If both
        renderings have the same ones, the plain rendering is encoded as it is, and the ids are those of
        `transformers`. If not, the second one is: its control tokens as such, the rest as ordinary text.

        Args:
            messages: each with a `role`, and what else the template reads.
            add_generation_prompt: end with what opens the assistant's turn.
            variables: what else the template reads, such as `tools`.

        Raises:
            InvalidRequestError: if there is no chat template, or it refuses the messages.
            ModelConfigError: if the template does what it must not.
        """
        plain = self.render_chat(messages, add_generation_prompt, **variables)
        token_ids: list[int] = _encode(self._tokenizer, plain, False).ids
        found = [token_id for token_id in token_ids if token_id in self._control_ids]
        texts = list(_texts([messages, variables]))
        if not any(self._opening.search(text) for text in texts):
            shielded, stand_ins = plain, {}
        else:
            stand_ins = self._stand_ins({*plain, *(self.chat_template or "")}.union(*texts))
            safe = _shield([messages, variables], self._opening, {char: sign for sign, char in stand_ins.items()})
            shielded = self.render_chat(safe[0], add_generation_prompt, **safe[1])
        back = str.maketrans(stand_ins)
        own = [self._control[part] for part in self._added_text.findall(shielded) if part in self._control]
        same = shielded.translate(back) == plain or not any(map(self._names_control, texts))
        if found == own and same:
            return token_ids
        marked = self._added_text.sub(lambda part: self._aliases.get(part[0], part[0]), shielded)
        return self._encode_ordinary(marked.translate(back), False)

    # -- details -------------------------------------------------------------------------------------------------------

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Matches in each control token's text, at one character if that has one that is neither letter nor space."""
        signs, words = set(), []
        for text in self._control:
            sign = next((c for c in text if not c.isalnum() and not c.isspace() and c not in "_-"), None)
            signs.update(sign or "")
            words.extend([] if sign else [re.escape(text)])
        parts = [*(re.escape(sign) for sign in sorted(signs)), *sorted(words, key=len, reverse=True)]
        return re.compile("|".join(parts) or r"(?!)")

    @cached_property
    def _added_text(self) -> re.Pattern[str]:
        """Matches every added token's text, the longest first, as the tokenizer does."""
        texts = sorted((added.content for added in self._added.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """For each control token's text a private spelling that nobody outside can know."""
        secret = "".join(chr(_PRIVATE + secrets.randbelow(2**12)) for _ in range(16))
        return {text: f"{secret}{chr(_PRIVATE + 2**13 + number)}" for number, text in enumerate(self._control)}

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        """A copy that reads control tokens' texts as ordinary text, and knows their private spellings."""
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
        return copy

    def _names_control(self, text: str) -> bool:
        return any(part in self._control for part in self._added_text.findall(text))

    def _stand_ins(self, used: set[str]) -> dict[str, str]:
        """For each first character of an opening a private one that is not in use: private to original."""
        free = (chr(code) for code in range(_PRIVATE, _PRIVATE + 2**16 - 2) if chr(code) not in used)
        openings = sorted({char for text in self._control for char in text})
        return dict(zip(free, openings, strict=False))

    def _encode_ordinary(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes text in which only the private spellings make control tokens."""
        encoding = _encode(self._ordinary, text, add_special_tokens)
        controls = {alias: self._control[spelled] for spelled, alias in self._aliases.items()}
        token_ids: list[int] = encoding.ids
        if not any(token_id in self._control_ids for token_id in token_ids) and self._secret not in text:
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
        """Encodes a control token's text that the vocabulary itself would read as one, in two halves."""
        if len(text) < 2:
            raise InvalidRequestError(f"the text holds {text!r}, which this tokenizer cannot spell out", field="prompt")
        return [i for part in (text[:1], text[1:]) for i in self._encode_ordinary(part, False)]
