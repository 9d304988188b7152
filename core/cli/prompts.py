"""From what a user writes, a text or a row of a file, to what the engine takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hookline.engine import Engine
    from hookline.prompt_encoder import Prompt

_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")


def has_chat_template(engine: Engine) -> bool:
    """Whether the checkpoint says how messages become a text."""
    return engine.tokenizer is not None and engine.tokenizer.chat_template is not None


def as_prompt(engine: Engine, text: str, *, system: str | None = None, raw: bool = False) -> Prompt:
    """`text` as a user's message where the checkpoint has a chat template, and as it is elsewhere.

    Raises:
        InvalidRequestError: if there is a system message and nothing to put it into.
    """
    if not raw and has_chat_template(engine):
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": text}]
    if system is not None:
        raise InvalidRequestError(
            f"{engine.config.model} has no chat template, which --system needs",
            field="system",
            hint="Put the instruction into the prompt, or choose an instruct model.",
        )
    return text


class RowReader:
    """Reads the rows of a file of prompts.

    Args:
        engine: serves them; knows the chat template.
        base: sampling options that a row's own stand before.
        system, raw: as for a single prompt; they touch rows with `prompt` alone.
    """

    def __init__(self, engine: Engine, base: SamplingParams, *, system: str | None = None, raw: bool = False) -> None:
        self._engine = engine
        self._base = base
        self._system = system
        self._raw = raw

    def read(self, line: bytes, number: int) -> tuple[str, Prompt, SamplingParams]:
        """Which field of line `number` has the prompt, the prompt, and how its tokens are to be chosen.

        Raises:
            InvalidRequestError: naming the field at fault, or the line where it is no JSON object.
        """
        row = _parse(line, number)
        given = [name for name in _PROMPT_FIELDS if name in row]
        if len(given) != 1:
            raise InvalidRequestError(
                f"the row has {' and '.join(given) or 'no prompt'}; it must have one of {', '.join(_PROMPT_FIELDS)}",
                field=given[-1] if given else "prompt",
            )
        value = row.pop(given[0])
        return given[0], self._prompt(given[0], value), SamplingParams.from_dict(row, self._base)

    def _prompt(self, field: str, value: Any) -> Prompt:
        if field == "prompt":
            if isinstance(value, str) and (value if self._raw else value.strip()):
                return as_prompt(self._engine, value, system=self._system, raw=self._raw)
            wanted = "a text that is not empty"
        elif field == "messages":
            if isinstance(value, list) and value and all(map(_is_message, value)):
                return value
            wanted = "a list of at least one object with role and content, both texts"
        else:
            if isinstance(value, list) and value and all(type(token) is int for token in value):
                return value
            wanted = "a list of at least one whole number"
        raise InvalidRequestError(f"{field} is {value!r:.80}; it must be {wanted}", field=field)


def _is_message(value: object) -> bool:
    """Whether a chat template can make a text of it; without a content only where the message calls tools instead."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or "content" not in value:
        return False
    return isinstance(value["content"], str) or (value["content"] is None and bool(value.get("tool_calls")))


def _parse(line: bytes, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line {number} is no sound JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRequestError(f"line {number} is no JSON object, but {line.decode().strip():.80}")
    return row
