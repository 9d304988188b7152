"""A validator on the tiny tokenizer of conftest, with formats of tool calls and reasoning that need no model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from hookline.config import EngineConfig
from hookline.errors import InvalidRequestError, ModelConfigError
from hookline.grammar import GrammarSpec
from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.serving.api_errors import ApiError, api_error
from hookline.serving.limits import Limits
from hookline.serving.process.messages import Facts
from hookline.serving.requests.schema import ChatBody, CompletionsBody
from hookline.serving.requests.validate import Validator
from hookline.serving.requests.validated import ValidatedCall, ValidatedRequest
from hookline.serving.server_config import ServerConfig
from hookline.tokenizer import Tokenizer
from tests.conftest import CHAT_TEMPLATE, write_tokenizer
from tests.serving.values import CHAT, COMPLETIONS

# Reads what GLM's and Qwen's templates read. `think` opens the answer, unless thinking is switched off.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}{% if bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning %}[{{ message.reasoning }}|{{ message.reasoning_content }}]{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)
THINK, END_THINK = 259, 260


def small_tokenizer(template: str | None = CHAT_TEMPLATE, *, bos: bool = False) -> Tokenizer:
    """Tokens 256 to 258 are special, and 259 and 260 open and close reasoning."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        built = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    built.add_tokens([tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>")])
    special_tokens = {"eos_token": "<|endoftext|>"}
    if bos:
        parts = ("<|im_start|> $A", "<|im_start|> $A $B", [("<|im_start|>", 256)])
        built.post_processor = tokenizers.processors.TemplateProcessing(*parts)
        special_tokens["bos_token"] = "<|im_start|>"
    return Tokenizer(built, template, special_tokens)


class CallFormat:
    """Calls between markers, which are special tokens if the test says so."""

    def __init__(self, markers: Sequence[str] = ("<call>", "</call>"), *, forces: bool = True) -> None:
        self.markers = markers
        self._forces = forces

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        raise NotImplementedError

    def constraint(self, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> GrammarSpec | None:
        names = [tool["function"]["name"] for tool in tools] if name is None else [name]
        return GrammarSpec("regex", f"<call>({'|'.join(names)})</call>{'+' * parallel}") if self._forces else None


class ThinkFormat:
    """Reasoning between `<think>` and `end`."""

    def __init__(self, markers: Sequence[str] = ("<think>", "</think>"), end: str = "</think>") -> None:
        self.markers = markers
        self.end = end

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: Callable[[str], int | None]) -> bool:
        marks = (find_token("<think>"), find_token("</think>"))
        last = next((token_id for token_id in reversed(prompt_token_ids) if token_id in marks), None)
        return last is not None and last == marks[0]

    def parser(self, starts_inside: bool) -> Any:
        raise NotImplementedError


def small_door(
    tokenizer: Tokenizer | None = None,
    *,
    tool_format: ToolFormat | None = None,
    reasoning_format: ReasoningFormat | None = None,
    limits: Limits | None = None,
    strict: bool = False,
    **facts: Any,
) -> Validator:
    """Of a model of 320 tokens with a context of 256; a tokenizer of `small_tokenizer()` if none is given."""
    config = ServerConfig(
        engine=EngineConfig(model="tiny"),
        served_model_names=("tiny", "other"),
        strict_api=strict,
        limits=limits or Limits(),
    )
    names = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "plugin": "llama 1",
        "device": "cpu",
        "dtype": "float32",
    }
    sizes = {"vocab_size": 320, "max_model_len": 256, "block_size": 8, "num_blocks": 64, "max_running": 8}
    others = {"max_batch_tokens": 256, "prefix_caching": True, "eos_token_ids": [258], "special_tokens": {}}
    tokenizer = tokenizer or small_tokenizer()
    return Validator(Facts(**{**names, **sizes, **others, **facts}), tokenizer, config, tool_format, reasoning_format)


def chat(door: Validator, **fields: Any) -> ValidatedCall:
    return door.chat(ChatBody.parse({**CHAT, **fields}), "")


def complete(door: Validator, **fields: Any) -> ValidatedCall:
    return door.completions(CompletionsBody.parse({**COMPLETIONS, **fields}), "")


def only(call: ValidatedCall) -> ValidatedRequest:
    (request,) = call.prompts
    return request


def refused(door: Validator, route: str = "completions", **fields: Any) -> ApiError:
    """The error of a body that must be refused."""
    with pytest.raises((ApiError, InvalidRequestError, ModelConfigError)) as caught:
        (chat if route == "chat" else complete)(door, **fields)
    error = api_error(caught.value)
    assert len(error.message) < 1000
    return error
