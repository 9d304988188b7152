"""What stands behind `/tokenize`, `/detokenize` and `/tokenizer_info`: from a body to the answer's object."""

from __future__ import annotations

from typing import Any

from hookline.errors import InvalidRequestError
from hookline.scheduling.admission import wrong_token_ids
from hookline.serving.api_errors import ApiError
from hookline.serving.requests.bodies import check_fields, show
from hookline.serving.requests.schema import DetokenizeBody, TokenizeBody
from hookline.serving.requests.tools import checked_tools, template_tools
from hookline.serving.requests.validate import Validator
from hookline.tokenizer import Tokenizer


def tokenize(body: TokenizeBody, validator: Validator) -> dict[str, Any]:
    """Token ids of a prompt or of messages, as a request with them would have.

    A prompt that is one special token's text, and nothing else, asks for that token's id; evaluation harnesses find
    the end token so. Within a longer text it is ordinary text, as everywhere.

    Raises:
        ApiError, InvalidRequestError: as `Validator.chat`.
    """
    tokenizer, limits = _tokenizer(validator), validator.config.limits
    check_fields(body, strict=validator.config.strict_api)
    validator.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        tools = template_tools(checked_tools(body.tools or (), limits))
        variables = validator.prompts.template_variables(body.chat_template_kwargs or {}, None)
        ids = validator.prompts.encode_chat(
            body.messages,
            tools,
            variables,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    elif body.tools or body.chat_template_kwargs:
        name = "tools" if body.tools else "chat_template_kwargs"
        raise ApiError(400, f"{name} goes with messages, not with a prompt.", param=name)
    else:
        text = body.prompt or ""
        if len(text) > limits.tokenize_chars:
            what = f"prompt has {len(text)} characters; at most {limits.tokenize_chars} are allowed."
            raise ApiError(400, what, param="prompt")
        special = tokenizer.find_token(text) if text in tokenizer.special_tokens.values() else None
        ids = tokenizer.encode(text, body.add_special_tokens is not False) if special is None else [special]
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": validator.facts.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
    return answer


def detokenize(body: DetokenizeBody, validator: Validator) -> dict[str, Any]:
    """The text of token ids, special tokens included.

    Raises:
        ApiError: 400 if there is no tokenizer, or an id is none of the model's.
    """
    tokenizer, vocab_size = _tokenizer(validator), validator.facts.vocab_size
    check_fields(body, strict=validator.config.strict_api)
    validator.check_model(body.model)
    if wrong := wrong_token_ids(body.tokens, vocab_size):
        what = f"tokens holds {show(wrong[0])}; token ids are whole numbers from 0 to {vocab_size - 1}."
        raise ApiError(400, what, param="tokens")
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def tokenizer_info(validator: Validator) -> dict[str, Any]:
    """What a client needs to render the chat template itself, under the names of `tokenizer_config.json`.

    Raises:
        InvalidRequestError: if there is no tokenizer.
    """
    tokenizer = _tokenizer(validator)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": validator.facts.max_model_len,
        **{name: tokenizer.special_tokens.get(name) for name in names},
    }


def _tokenizer(validator: Validator) -> Tokenizer:
    if validator.tokenizer is None:
        hint = "Send token ids to /v1/completions."
        raise InvalidRequestError("the checkpoint has no tokenizer", hint=hint)
    return validator.tokenizer
