"""What has passed the one door: all that the engine and the answer need, and nothing that was not checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hookline.grammar import GrammarSpec
from hookline.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """One prompt for the engine.

    Attributes:
        token_ids: within the model's logits, at least one, and short enough for the context.
        params: checked against the model; `max_tokens` is set.
        prompt: its text, where it came as text.
        cache_salt: only requests of the same salt share cached prefixes.
        grammar: what the answer must look like.
        grammar_after: the token id behind which `grammar` begins to hold; None for the answer's start.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    cache_salt: str = ""
    grammar: GrammarSpec | None = None
    grammar_after: int | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a call.

    Attributes:
        tools: OpenAI's objects.
        choice: `auto`, `required`, or a function's name. (`none` means that there is no ToolUse.)
        parallel: whether several calls may be made.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: str
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ValidatedCall:
    """A client's call: what the engine is to do, and what the answer is to look like.

    Attributes:
        kind: which route it came by.
        model: the served name that the client used.
        prompts: one of a chat, one or more of completions.
        stream: answer with server-sent events.
        include_usage: send a last chunk with the usage.
        continuous_usage: send the usage with every chunk.
        echo: of completions: begin the answer's text with the prompt's.
        prompt_only: of completions with `max_tokens` 0 and `echo`: the one token that the engine makes is left out.
        logprobs: report them in the answer, as each route does.
        include_stop: leave the stop string in the text.
        return_token_ids: report token ids beside the text.
        tools: None where no tool may be called.
        reasoning: `separate` gives it in fields of its own, `drop` leaves it out, `content` leaves it in the text.
        reasoning_fields: the names of those fields; each holds the same.
        starts_in_reasoning: whether the answer begins inside reasoning.
        grammar_field: the client's field that the prompts' grammar comes from, for errors; "" where there is none.
        label: the client's own id of the request, for logs alone.
    """

    kind: Literal["chat", "completions"]
    model: str
    prompts: tuple[ValidatedRequest, ...]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_only: bool = False
    logprobs: bool = False
    include_stop: bool = False
    return_token_ids: bool = False
    tools: ToolUse | None = None
    reasoning: Literal["separate", "drop", "content"] = "separate"
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    starts_in_reasoning: bool = False
    grammar_field: str = ""
    label: str = ""
