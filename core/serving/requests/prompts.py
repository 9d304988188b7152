"""From the prompts and messages of a body to token ids. Nothing that a client writes becomes a control token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.errors import InvalidRequestError
from hookline.prompt_encoder import PromptEncoder
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts
from hookline.serving.requests.bodies import shorten
from hookline.serving.requests.conversation import Message, template_messages
from hookline.serving.requests.sampling import check_prompt_length
from hookline.tokenizer import Tokenizer

# A text so many times longer than the context, in characters, is measured by its beginning before all of it is encoded.
_CHARS = 16
# How many times more tokens than the context holds that beginning may have, and if the prompt is to be cut.
_SLACK, _SLACK_TO_CUT = 2, 16
# Variables of chat templates that are ours to give.
_OURS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class Prompts:
    """Encodes what clients send, for one model.

    Args:
        tokenizer: None where the checkpoint has none; prompts must then be token ids.
    """

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._limits = limits
        self._encoder = PromptEncoder(tokenizer, facts.vocab_size)
        found = frozenset[str]() if tokenizer is None else tokenizer.template_variables
        # A special token that the checkpoint lacks is a variable like any other to its template.
        self._variables = frozenset(name for name in found - _OURS if not name.endswith("_token"))

    def split(self, prompt: object) -> list[str | list[Any]]:
        """The single prompts of completions' `prompt`: texts, or lists that should hold token ids.

        Raises:
            ApiError: 400 if it is neither, is empty, mixes kinds, or has too many.
        """
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            what = "an empty list" if isinstance(prompt, list) else "neither text nor a list"
            raise _wrong_prompt(f"prompt is {what}; give text, token ids, or a list of either.")
        kinds = {str if isinstance(part, str) else list if isinstance(part, list) else int for part in prompt}
        if len(kinds) > 1:
            raise _wrong_prompt("prompt mixes texts, token ids and lists of them; give one kind.")
        if kinds == {int}:
            return [prompt]
        if len(prompt) > self._limits.prompts:
            raise _wrong_prompt(f"prompt has {len(prompt)} prompts; at most {self._limits.prompts} are allowed.")
        return prompt

    def encode(self, prompt: str | list[Any], keep: int | None = None) -> list[int]:
        """Token ids of one of `split`.

        Args:
            keep: leave out all but so many of the last ones.

        Raises:
            ApiError, InvalidRequestError: if it is empty, too long or has what are no token ids of the model.
        """
        if not isinstance(prompt, str):
            if keep is None:
                check_prompt_length(len(prompt), self._facts, "prompt")  # before its ids are looked at
            if any(isinstance(part, Mapping) for part in prompt[:1]):
                raise _wrong_prompt("prompt holds an object; send messages to /v1/chat/completions.")
        else:
            self._check_text(prompt, keep, "prompt")
        return self._cut(self._encoder.encode(prompt), keep)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        keep: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            tools: as the chat template reads them.
            variables: of `template_variables`.
            add_generation_prompt: end with what opens the answer; None does so unless the final message is continued.
            continue_final_message: end with the text of the last message.
            keep: as of `encode`.

        Raises:
            ApiError, InvalidRequestError: if a message is not sound, or the template refuses the conversation.
            ModelConfigError: if the template had to be stopped.
        """
        if len(messages) > self._limits.messages:
            what = f"messages has {len(messages)} entries; at most {self._limits.messages} are allowed."
            raise ApiError(400, what, param="messages")
        if continue_final_message and add_generation_prompt:
            what = "continue_final_message and add_generation_prompt cannot both be true: the answer goes on with the "
            raise ApiError(400, f"{what}last message, or opens one of its own.", param="continue_final_message")
        shown = template_messages(messages)
        if continue_final_message and messages[-1].content is None:
            what = "continue_final_message needs a last message with text in its content."
            raise ApiError(400, what, param="continue_final_message")
        if self._tokenizer is None:
            hint = "Send token ids to /v1/completions."
            raise InvalidRequestError(
                "the checkpoint has no tokenizer, so it does not chat", field="messages", hint=hint
            )
        self._check_text("".join(message["content"] for message in shown), keep, "messages")
        given = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
        try:
            ids = self._tokenizer.apply_chat_template(
                shown,
                add_generation_prompt is not False and not continue_final_message,
                bool(continue_final_message),
                **given,
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field="messages", hint=error.hint) from error
        if not ids:
            raise InvalidRequestError("the chat template makes nothing of these messages", field="messages")
        return self._cut(ids, keep)

    def template_variables(self, given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """Those that a client sets: its `chat_template_kwargs`, checked, and its `reasoning_effort` where it is read.

        An effort of `none` switches thinking off in a template with such a switch. Templates without either know
        nothing of effort, which is then left aside: SDKs send it to every model.

        Raises:
            ApiError: 400, naming one that is ours to set, or that the template does not read.
        """
        for name in given:
            if name not in self._variables:
                param = f"chat_template_kwargs.{shorten(name)}"
                known = ", ".join(sorted(self._variables)[:20]) or "none"
                raise ApiError(
                    400, f"{param} is no variable that a client may set. Those of this model are: {known}.", param=param
                )
        variables = dict(given)
        if effort is not None and "reasoning_effort" in self._variables:
            variables.setdefault("reasoning_effort", effort)
        if effort == "none" and "enable_thinking" in self._variables:
            variables.setdefault("enable_thinking", False)
        return variables

    def _check_text(self, text: str, keep: int | None, param: str) -> None:
        """Refuses a text that is much too long, at a small part of what encoding it would cost.

        A beginning's tokens are no strict bound of the whole's, for its last word is cut; hence the slack.
        """
        if self._tokenizer is None:
            return
        size = _CHARS * self._facts.max_model_len
        while size < len(text):
            found = len(self._tokenizer.encode(text[:size], add_special_tokens=False))
            if found > (_SLACK if keep is None else _SLACK_TO_CUT) * self._facts.max_model_len:
                check_prompt_length(found, self._facts, param, least=True)
            size *= 4

    @staticmethod
    def _cut(ids: list[int], keep: int | None) -> list[int]:
        return ids if keep is None else ids[-keep:]


def _wrong_prompt(message: str) -> ApiError:
    return ApiError(400, message, param="prompt", code="invalid_value")
