"""Sampling options as a body has them, and how many tokens the context leaves for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hookline.sampling_params import SamplingParams
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts
from hookline.serving.requests.schema import GenerationFields

# OpenAI's default, where ours is greedy.
_BASE = SamplingParams(temperature=1.0)
# Fields of the same name and meaning in both.
_SHARED = (
    *("min_tokens", "allowed_token_ids", "bad_words", "logit_bias", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "temperature", "top_k", "top_p", "min_p", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("prompt_logprobs", "skip_special_tokens"),
)
_MOST_SEED = 2**63 - 1


def sampling_params(body: GenerationFields, limits: Limits, **own: Any) -> SamplingParams:
    """The options of `body`, without `max_tokens`, which depends on the prompt.

    Args:
        own: options that the route finds by itself, such as `logprobs`.

    Raises:
        ApiError: 400 if `n` is above the limit.
        InvalidRequestError: if an option is not allowed.
    """
    values: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if values.get("n", 1) > limits.n:
        raise ApiError(400, f"n is {body.n}; at most {limits.n} answers are allowed.", param="n")
    if body.seed is not None:
        values["seed"] = body.seed & _MOST_SEED  # OpenAI's seeds have a sign, ours have none
    return SamplingParams.from_dict({**values, **own}, base=_BASE)


def fitted(
    params: SamplingParams, prompt_len: int, max_tokens: int | None, facts: Facts, *, prompt: str, limit: str
) -> SamplingParams:
    """`params` with the `max_tokens` that a prompt of this length leaves, checked against the model.

    Args:
        max_tokens: what the client asks for; None for all that is left.
        prompt, limit: names of the fields that the prompt and `max_tokens` came in.

    Raises:
        ApiError: 400 if the request could never run.
        InvalidRequestError: if an option is not allowed with this model.
    """
    room = most_tokens(facts) - prompt_len
    if room < 1:
        check_prompt_length(prompt_len, facts, prompt)
    if max_tokens is not None and max_tokens > room:
        total = prompt_len + max_tokens
        raise _too_long(
            facts,
            f"you asked for {total} tokens ({prompt_len} in the prompt, {max_tokens} in {limit}). Shorten the prompt "
            f"or lower {limit} to {room}.",
            limit,
        )
    fitting = dataclasses.replace(params, max_tokens=room if max_tokens is None else max_tokens)
    fitting.check_against(facts.vocab_size, prompt_len, facts.max_model_len)
    return fitting


def most_tokens(facts: Facts) -> int:
    """Tokens that prompt and answer may have together: what the context and an empty cache hold."""
    return min(facts.max_model_len, facts.num_blocks * facts.block_size)


def check_prompt_length(prompt_len: int, facts: Facts, prompt: str, *, least: bool = False) -> None:
    """Refuses a prompt that leaves no room for one new token.

    Args:
        prompt: the field that it came in.
        least: it may have more tokens than `prompt_len`.

    Raises:
        ApiError: 400 with both numbers.
    """
    if prompt_len >= most_tokens(facts):
        has = f"more than {prompt_len}" if least else str(prompt_len)
        raise _too_long(facts, f"the prompt has {has}, and an answer needs at least one. Shorten it.", prompt)


def _too_long(facts: Facts, what: str, param: str) -> ApiError:
    # Clients look for OpenAI's words.
    cache = facts.num_blocks * facts.block_size
    also = f", and its cache holds {cache}" if cache < facts.max_model_len else ""
    text = f"This model's maximum context length is {facts.max_model_len} tokens{also}; {what}"
    return ApiError(400, text, param=param, code="context_length_exceeded")
