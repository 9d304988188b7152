"""From what a user gives as a prompt to token ids: text, chat messages, or ids as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from hookline.errors import InvalidRequestError
from hookline.scheduling.admission import wrong_token_ids
from hookline.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class PromptEncoder:
    """Encodes for one model.

    Args:
        tokenizer: None where the checkpoint has none; prompts must then be token ids.
        vocab_size: width of the model's logits, which bounds every id.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, checked against the vocabulary.

        Raises:
            InvalidRequestError: for an empty prompt, ids outside the vocabulary, text without a tokenizer, or what is
                no prompt at all.
        """
        given: object = prompt
        ids: list[int]
        if isinstance(given, str):
            ids = self._require_tokenizer().encode(given)
        elif not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
            raise InvalidRequestError(
                f"prompt is of type {type(given).__name__}; it must be text, token ids or a list of chat messages",
                field="prompt",
            )
        elif given and isinstance(given[0], Mapping):
            ids = self._require_tokenizer().apply_chat_template(cast(Sequence[Message], given))
        else:
            ids = list(given)
        if wrong := wrong_token_ids(ids, self._vocab_size):
            raise InvalidRequestError(
                f"prompt holds {str(wrong[:3])[:80]}; token ids are whole numbers from 0 to {self._vocab_size - 1}",
                field="prompt",
                hint="The ids may come from another model's tokenizer.",
            )
        if not ids:
            raise InvalidRequestError("the prompt is empty", field="prompt", hint="Give at least one token of text.")
        return ids

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word's token ids, at the start of a text and after a space.

        Raises:
            InvalidRequestError: if there are words and no tokenizer.
        """
        if not words:
            return []
        encode = self._require_tokenizer().encode
        spellings = (text for word in words for text in (word, f" {word}"))
        return [ids for text in spellings if (ids := encode(text, add_special_tokens=False))]

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "the checkpoint has no tokenizer, so the prompt cannot be text",
                field="prompt",
                hint="Give token ids, or put tokenizer.json beside the weights.",
            )
        return self._tokenizer


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one, and so is what is no prompt, for `encode` to refuse; several as they are."""
    given: object = prompts
    if isinstance(given, str) or not isinstance(given, Sequence) or (given and not isinstance(given[0], Sequence)):
        return [cast(Prompt, given)]
    return list(given)
