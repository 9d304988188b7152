"""The bodies that clients send: every field with its type, its bounds and what it does.

They make our OpenAPI document too. Types are strict: "1" is no number, true is none, and 1.0 is no whole number. Null
stands for the default. What only the configuration or the model can bound is checked in `validate`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from hookline.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MIN_REPETITION_PENALTY,
)
from hookline.serving.requests.bodies import Body, at_most
from hookline.serving.requests.constraints import ConstraintFields
from hookline.serving.requests.conversation import Message
from hookline.serving.requests.tools import Tool, ToolChoice

_MOST = 2**31 - 1
_MANY_IDS = 2**20
TokenId = Annotated[int, Field(ge=0, le=_MOST)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TemplateValue = (
    Annotated[str, Field(max_length=1024)] | bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | None
)
TemplateValues = Annotated[dict[str, TemplateValue], Field(max_length=32), at_most(32)]
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST}}
# A prompt may hold millions of ids, which are looked at once, by the encoder.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {**_IDS, "minItems": 1},
                {"type": "array", "minItems": 1, "items": {**_IDS, "minItems": 1}},
            ]
        }
    ),
]


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = Field(False, description="Send a last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(False, description="With `include_usage`: the usage in every chunk.")
    include_obfuscation: Any = Field(None, description="Left aside.")


class GenerationFields(ConstraintFields):
    """What chat and completions have in common."""

    model: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="A name that the server serves; its first if it is left out."
    )
    max_tokens: int | None = Field(
        None, ge=0, le=_MOST, description="Most new tokens; as many as the context leaves if it is left out."
    )
    min_tokens: int | None = Field(None, ge=0, le=_MOST, description="No end before so many tokens.")
    temperature: float | None = Field(1.0, ge=0, le=100, description="0 takes the likeliest token each time.")
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MOST, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Makes the draw repeatable.")
    n: int | None = Field(1, ge=1, le=MAX_N, description="Answers to each prompt.")
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Texts that end the answer and are no part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = Field(False, description="Make the stop text part of the answer.")
    ignore_eos: bool | None = Field(False, description="Go on behind the model's end tokens.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=100)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)] | None = Field(
        None, description="Token ids, as text, to what is added to their logits."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=_MANY_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS)] | None = None
    skip_special_tokens: bool | None = Field(
        True, description="Leave special tokens out of the text. Has no effect where they mark tool calls or reasoning."
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=_MOST, description="Keep so many of the prompt's last tokens; -1 keeps what the context takes."
    )
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.=+/-]{1,128}$")] | None = Field(
        None, description="Only requests with the same salt share cached prompts."
    )
    request_id: Annotated[str, Field(pattern=r"^[ -~]*$", max_length=4096)] | None = Field(
        None, description="A label for the server's log."
    )
    user: Any = Field(None, description="Left aside, as all fields below.")
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    priority: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None


class ChatBody(GenerationFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16384, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=0, le=_MOST, description="Wins over `max_tokens`.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs `logprobs`.")
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="`auto` if there are tools and nothing is said.")
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to the chat template where that reads it; `none` also switches thinking off there."
    )
    include_reasoning: bool | None = Field(True, description="False leaves reasoning out of the answer.")
    separate_reasoning: bool | None = Field(True, description="False leaves reasoning within the content.")
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="Variables that the model's chat template reads, such as `enable_thinking`."
    )
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with what opens the answer; true unless `continue_final_message` is."
    )
    continue_final_message: bool | None = Field(
        False, description="End the prompt with the last message's text, which the answer goes on with."
    )


class CompletionsBody(GenerationFields):
    """The body of `POST /v1/completions`."""

    prompt: PromptField = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = Field(False, description="Begin the answer's text with the prompt's.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many likeliest tokens to report; with `echo` of the prompt too."
    )


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a prompt or messages."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16384, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(True, description="Of a prompt: with the tokens put around it (BOS).")
    add_generation_prompt: bool | None = Field(None, description="Of messages, as in a chat.")
    continue_final_message: bool | None = Field(False, description="Of messages, as in a chat.")
    chat_template_kwargs: TemplateValues | None = Field(None, description="Of messages, as in a chat.")
    return_token_strs: bool | None = Field(False, description="Report each token's text too.")


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=_MANY_IDS, fail_fast=True)]
