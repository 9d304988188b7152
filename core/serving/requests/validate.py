"""The one door: a body becomes a `ValidatedCall` here or is refused, and nothing else reaches the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from hookline.grammar import GrammarSpec
from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.serving.api_errors import ApiError
from hookline.serving.process.messages import Facts
from hookline.serving.requests.bodies import check_fields, show
from hookline.serving.requests.constraints import requested_grammar
from hookline.serving.requests.continuation import ends_in_call, ends_in_reasoning
from hookline.serving.requests.conversation import text_of
from hookline.serving.requests.prompts import Prompts
from hookline.serving.requests.sampling import fitted, most_tokens, sampling_params
from hookline.serving.requests.schema import ChatBody, CompletionsBody, GenerationFields
from hookline.serving.requests.tools import template_tools, tool_use
from hookline.serving.requests.validated import ToolUse, ValidatedCall, ValidatedRequest
from hookline.serving.server_config import REASONING_FIELDS, ServerConfig
from hookline.tokenizer import Tokenizer


class Validator:
    """Checks calls against the limits and the model. It holds no state of a call and may be used by several threads.

    Special tokens and formats: the engine leaves special tokens out of the text, and where a format's markers are
    special it must not, or the parsers would not see them. Then all special tokens stand in the text, whatever
    `skip_special_tokens` says; those that end the answer never do, so that others are rare.

    Args:
        facts: what the engine serves.
        tokenizer: None where the checkpoint has none.
        tool_format, reasoning_format: how the model writes tool calls and reasoning; None where that is not known.

    Attributes:
        prompts: encodes; also for `/tokenize`.
        model_names: by which clients may name the model; the first is shown.
    """

    def __init__(
        self,
        facts: Facts,
        tokenizer: Tokenizer | None,
        config: ServerConfig,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.config = config
        self.prompts = Prompts(facts, tokenizer, config.limits)
        self.model_names = config.served_model_names or (facts.name,)
        self._tool_format = tool_format
        self._reasoning_format = None if tokenizer is None else reasoning_format
        self._special_tools = tool_format is not None and self._any_special(tool_format.markers)
        self._special_reasoning = reasoning_format is not None and self._any_special(reasoning_format.markers)

    def chat(self, body: ChatBody, salt: str) -> ValidatedCall:
        """What a body of `/v1/chat/completions` asks for.

        Args:
            salt: of the client's key; only requests of the same one share cached prefixes.

        Raises:
            ApiError: 400, or 404 for a model that is not served, with the field at fault.
            InvalidRequestError: the same, of the parts that the engine shares with us.
            ModelConfigError: if the chat template had to be stopped.
        """
        model = self._check_common(body)
        if not body.logprobs and body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens: int | None = getattr(body, name)
        if max_tokens == 0:
            raise ApiError(400, f"{name} is 0; it must be at least 1.", param=name)
        parallel = body.parallel_tool_calls is not False
        tools = tool_use(body.tools or (), body.tool_choice, parallel, self._tool_format, self.config.limits)
        grammar, grammar_field = self._chat_grammar(body, tools)
        variables = self.prompts.template_variables(body.chat_template_kwargs or {}, body.reasoning_effort)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        continued = self._continued(body, tools)
        reasoning = "content" if continued is False else self._reasoning(body)
        visible = self._visible(reasoning, tools)
        params = sampling_params(body, self.config.limits, logprobs=logprobs, **visible)
        ids = self.prompts.encode_chat(
            body.messages,
            () if tools is None else template_tools(tools.tools),
            variables,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            keep=self._kept(body, max_tokens),
        )
        # A prompt that does not open the answer opens no thought either.
        opened = body.add_generation_prompt is not False and self._starts_in_reasoning(ids)
        inside = opened if continued is None else continued
        request = ValidatedRequest(
            token_ids=tuple(ids),
            params=fitted(params, len(ids), max_tokens, self.facts, prompt="messages", limit=name),
            cache_salt=_joined_salt(salt, body.cache_salt),
            grammar=grammar,
            grammar_after=self._end_of_reasoning() if grammar is not None and inside else None,
        )
        self._check_reported([request])
        return ValidatedCall(
            kind="chat",
            model=model,
            prompts=(request,),
            logprobs=bool(body.logprobs),
            tools=tools,
            reasoning=reasoning,
            reasoning_fields=REASONING_FIELDS[self.config.reasoning_fields],
            starts_in_reasoning=inside,
            grammar_field=grammar_field,
            **_answer_fields(body),
        )

    def _check_reported(self, requests: Sequence[ValidatedRequest]) -> None:
        """Refuses an answer with too many log probabilities of prompts: each takes memory until it is sent."""
        most, tops = self.config.limits.prompt_logprobs, requests[0].params.prompt_logprobs
        total = 0 if tops is None else (tops + 1) * sum(len(request.token_ids) for request in requests)
        if total > most:
            what = f"The prompts have {total:,} log probabilities to report; at most {most:,} go into one answer."
            raise ApiError(400, f"{what} Ask for fewer of each, or for fewer prompts.", param="prompt_logprobs")

    def completions(self, body: CompletionsBody, salt: str) -> ValidatedCall:
        """What a body of `/v1/completions` asks for. See `chat`.

        With `echo`, `max_tokens` may be 0: the prompt alone is scored. The engine makes one token for that, so that
        the prompt has to leave room for it.
        """
        model = self._check_common(body)
        echo, max_tokens = bool(body.echo), body.max_tokens
        if max_tokens == 0 and not echo:
            raise ApiError(400, "max_tokens is 0; it must be at least 1, or echo true.", param="max_tokens")
        grammar, grammar_field = requested_grammar(body, self.config.limits)
        reported = [count for count in (body.prompt_logprobs, body.logprobs if echo else None) if count is not None]
        params = sampling_params(
            body, self.config.limits, logprobs=body.logprobs, prompt_logprobs=max(reported, default=None)
        )
        asked = 1 if max_tokens == 0 else max_tokens
        keep = self._kept(body, asked)
        requests = []
        for prompt in self.prompts.split(body.prompt):
            ids = self.prompts.encode(prompt, keep)
            requests.append(
                ValidatedRequest(
                    token_ids=tuple(ids),
                    params=fitted(params, len(ids), asked, self.facts, prompt="prompt", limit="max_tokens"),
                    prompt=prompt if isinstance(prompt, str) and keep is None else None,
                    cache_salt=_joined_salt(salt, body.cache_salt),
                    grammar=grammar,
                )
            )
        self._check_reported(requests)
        return ValidatedCall(
            kind="completions",
            model=model,
            prompts=tuple(requests),
            echo=echo,
            prompt_only=max_tokens == 0,
            logprobs=body.logprobs is not None,
            reasoning="content",
            grammar_field=grammar_field,
            **_answer_fields(body),
        )

    def check_model(self, name: str | None) -> str:
        """The served name that a client means.

        Raises:
            ApiError: 404 if there is none such.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"The model {show(name)} is not served here. The served models are: {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    # -- details -------------------------------------------------------------------------------------------------------

    def _check_common(self, body: GenerationFields) -> str:
        """Checks what needs no prompt; gives the model's served name."""
        check_fields(body, strict=self.config.strict_api)
        model = self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            what = "prompt_logprobs needs stream to be false: chunks have no place for them."
            raise ApiError(400, what, param="prompt_logprobs")
        if body.truncate_prompt_tokens == 0:
            what = "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what the context takes."
            raise ApiError(400, what, param="truncate_prompt_tokens")
        if len(body.request_id or "") > (most := self.config.limits.label_chars):
            raise ApiError(400, f"request_id is longer than {most} characters.", param="request_id")
        return model

    def _chat_grammar(self, body: ChatBody, tools: ToolUse | None) -> tuple[GrammarSpec | None, str]:
        """The constraint of the answer, and the field that it comes from."""
        grammar, param = requested_grammar(body, self.config.limits)
        if tools is None:
            return grammar, param
        if grammar is not None:
            # It would bind the whole answer, so that no tool could be called.
            what = f'{param} and tools bind the same answer. Give tool_choice "none", or leave {param} out.'
            raise ApiError(400, what, param=param)
        if tools.choice == "auto" or self._tool_format is None:
            return None, ""
        name = None if tools.choice == "required" else tools.choice
        forced = self._tool_format.constraint(tools.tools, name, tools.parallel)
        if forced is None:
            what = 'this model\'s tool calls cannot be forced. Give tool_choice "auto".'
            raise ApiError(400, f"tool_choice asks for a call, but {what}", param="tool_choice")
        return forced, "tools"

    def _reasoning(self, body: ChatBody) -> Literal["separate", "drop", "content"]:
        if self._reasoning_format is None or body.separate_reasoning is False:
            return "content"
        return "drop" if body.include_reasoning is False else "separate"

    def _continued(self, body: ChatBody, tools: ToolUse | None) -> bool | None:
        """Whether the last message, which the answer goes on with, breaks off in reasoning; None if it opens its own.

        One without text leaves the turn at its beginning, where it is the prompt's tokens that tell.
        """
        message = body.messages[-1]
        text, inside = text_of(message), False
        if not body.continue_final_message or (message.role == "assistant" and not text.strip()):
            return None
        if message.role == "assistant" and self._reasoning_format is not None:
            inside, text = ends_in_reasoning(text, self._reasoning_format)
        if tools is not None and self._tool_format is not None and ends_in_call(text, self._tool_format, tools.tools):
            what = "continue_final_message goes on with a message that breaks off within a tool call, which cannot be "
            raise ApiError(400, f'{what}read then. Give tool_choice "none".', param="continue_final_message")
        return inside

    def _visible(self, reasoning: str, tools: ToolUse | None) -> dict[str, bool]:
        """Sees to it that the parsers of this call get to see their markers."""
        parses_tools = tools is not None and self._special_tools
        parses_reasoning = reasoning != "content" and self._special_reasoning
        return {"skip_special_tokens": False} if parses_tools or parses_reasoning else {}

    def _starts_in_reasoning(self, ids: Sequence[int]) -> bool:
        if self._reasoning_format is None or self.tokenizer is None:
            return False
        return self._reasoning_format.starts_inside(ids, self.tokenizer.find_token)

    def _end_of_reasoning(self) -> int:
        end = "" if self._reasoning_format is None else self._reasoning_format.end
        token_id = None if self.tokenizer is None else self.tokenizer.find_token(end)
        if token_id is None:
            what = "the answer begins with reasoning whose end is not one token, so that no constraint can begin there"
            raise ApiError(400, f"{what}. Switch reasoning off, or ask for free text.", param="response_format")
        return token_id

    def _kept(self, body: GenerationFields, max_tokens: int | None) -> int | None:
        """How many of the prompt's last tokens to keep; None for all."""
        if body.truncate_prompt_tokens == -1:
            return max(most_tokens(self.facts) - (max_tokens or 1), 1)
        return body.truncate_prompt_tokens

    def _any_special(self, markers: Sequence[str]) -> bool:
        tokenizer = self.tokenizer
        return tokenizer is not None and any(tokenizer.find_token(text) in tokenizer.special_ids for text in markers)


def _answer_fields(body: GenerationFields) -> dict[str, Any]:
    """Fields of `ValidatedCall` that only shape the answer."""
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return {
        "stream": bool(body.stream),
        "include_usage": include_usage,
        "continuous_usage": include_usage and options is not None and bool(options.continuous_usage_stats),
        "include_stop": bool(body.include_stop_str_in_output),
        "return_token_ids": bool(body.return_token_ids),
        "label": body.request_id or "",
    }


def _joined_salt(salt: str, own: str | None) -> str:
    """Of a key and of its client; no two pairs give the same, for a client's own holds no colon."""
    return salt if own is None else f"{salt}:{own}"
