"""What a client reads: OpenAI's objects of both routes, whole and in chunks, made of the engine's deltas."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from hookline.scheduling.output import OutputDelta, TokenLogprob
from hookline.serving.replies.choice import AnswerContext, Choice, Piece
from hookline.serving.replies.token_texts import chat_logprobs, completion_logprobs, prompt_logprobs
from hookline.serving.requests.validated import ValidatedCall, ValidatedRequest

DONE = b"data: [DONE]\n\n"
_IDS = {"chat": "chatcmpl", "completions": "cmpl"}
_OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(value)


class Answer:
    """Base of all answers: whose they are, and what they cost.

    Attributes:
        call_id: ours, never the client's.
        choices: of all prompts: prompt times n plus the continuation's index.
        of_prompts: log probabilities of each prompt's tokens; empty until they come.
        prompt_tokens: of all prompts, each counted once.
        completion_tokens: so far, of all choices.
    """

    def __init__(self, call: ValidatedCall, context: AnswerContext) -> None:
        self.call_id = f"{_IDS[call.kind]}-{secrets.token_hex(12)}"
        self.call = call
        self.texts = context.texts
        self.n = call.prompts[0].params.n
        self.choices = [Choice(index, call, context) for index in range(self.n * len(call.prompts))]
        self._created = int(time.time())
        self._cached = [0] * len(call.prompts)
        self.of_prompts: list[list[TokenLogprob | None]] = [[] for _ in call.prompts]
        # Counted as they come: a stream may show them with every chunk, and have thousands of choices.
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in call.prompts)
        self.completion_tokens = self._reasoning_tokens = 0

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of every object."""
        return {"id": self.call_id, "object": kind, "created": self._created, "model": self.call.model}

    def read(self, number: int, delta: OutputDelta) -> tuple[Choice, Piece]:
        """Whose delta of prompt `number` it is, and what it adds."""
        if not delta.index:  # what the others find in the cache may be their own sibling's
            self._cached[number] = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.of_prompts[number] = delta.prompt_logprobs
        choice = self.choices[number * self.n + delta.index]
        tokens, reasoning_tokens = choice.tokens, choice.reasoning_tokens
        piece = choice.take(delta)
        self.completion_tokens += choice.tokens - tokens
        self._reasoning_tokens += choice.reasoning_tokens - reasoning_tokens
        return choice, piece

    def prompt_of(self, choice: Choice) -> ValidatedRequest:
        """The prompt that a choice continues."""
        return self.call.prompts[choice.index // self.n]

    def echoed(self, choice: Choice) -> str:
        """The prompt's text where the answer is to begin with it."""
        if not self.call.echo:
            return ""
        prompt = self.prompt_of(choice)
        if prompt.prompt is not None:
            return prompt.prompt
        return self.texts.decode(prompt.token_ids, prompt.params.skip_special_tokens)

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }


class _Gathered:
    """What a choice of a whole answer has so far."""

    __slots__ = ("content", "entries", "reasoning", "token_ids", "tool_calls")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.token_ids: list[int] = []
        self.entries: list[TokenLogprob] = []

    def add(self, piece: Piece, delta: OutputDelta) -> None:
        self.content.append(piece.content)
        self.reasoning.append(piece.reasoning)
        self.token_ids += delta.token_ids
        self.entries += delta.logprobs or []
        for entry in piece.tool_calls:
            if "id" in entry:
                self.tool_calls[entry["index"]] = {key: entry[key] for key in ("id", "type", "function")}
            else:
                self.tool_calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]


class WholeAnswer(Answer):
    """An answer that is sent at its end."""

    def __init__(self, call: ValidatedCall, context: AnswerContext) -> None:
        super().__init__(call, context)
        self._gathered = [_Gathered() for _ in self.choices]

    def take(self, number: int, deltas: Sequence[OutputDelta]) -> None:
        """More of the prompt `number`'s continuations."""
        for delta in deltas:
            choice, piece = self.read(number, delta)
            self._gathered[choice.index].add(piece, delta)

    def body(self) -> bytes:
        """The object, when all choices have ended."""
        shown = self._chat_choice if self.call.kind == "chat" else self._completions_choice
        answer = self.head(_OBJECTS[self.call.kind])
        answer["choices"] = [
            shown(choice, gathered) for choice, gathered in zip(self.choices, self._gathered, strict=True)
        ]
        answer["usage"] = self.usage()
        if self.call.kind == "chat":
            answer |= self._of_the_prompt(0)
        return orjson.dumps(answer)

    def _chat_choice(self, choice: Choice, gathered: _Gathered) -> dict[str, Any]:
        content: str | None = "".join(gathered.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.separates_reasoning:
            message |= dict.fromkeys(self.call.reasoning_fields, "".join(gathered.reasoning) or None)
        if gathered.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = list(gathered.tool_calls.values())
        logprobs = chat_logprobs(gathered.entries, self.texts) if self.call.logprobs else None
        shown = {"index": choice.index, "message": message, "logprobs": logprobs, **_end_of(choice)}
        if self.call.return_token_ids:
            shown["token_ids"] = gathered.token_ids
        return shown

    def _completions_choice(self, choice: Choice, gathered: _Gathered) -> dict[str, Any]:
        number, call, logprobs = choice.index // self.n, self.call, None
        if call.logprobs:
            token_ids, entries = list(gathered.token_ids), list[TokenLogprob | None](gathered.entries)
            if call.prompt_only:
                token_ids, entries = [], []
            if call.echo:
                token_ids = [*call.prompts[number].token_ids, *token_ids]
                entries = [*self.of_prompts[number], *entries]
            logprobs = completion_logprobs(entries, token_ids, self.texts)
        text = self.echoed(choice) + "".join(gathered.content)
        shown = {"index": choice.index, "text": text, "logprobs": logprobs, **_end_of(choice)}
        shown |= self._of_the_prompt(number)
        if call.return_token_ids:
            shown["token_ids"] = [] if call.prompt_only else gathered.token_ids
        return shown

    def _of_the_prompt(self, number: int) -> dict[str, Any]:
        """What a client asked for of the prompt itself."""
        shown: dict[str, Any] = {}
        prompt, entries = self.call.prompts[number], self.of_prompts[number]
        if self.call.return_token_ids:
            shown["prompt_token_ids"] = prompt.token_ids
        if entries and not (self.call.echo and self.call.logprobs):
            shown["prompt_logprobs"] = prompt_logprobs(entries, prompt.token_ids, self.texts)
        return shown


class StreamedAnswer(Answer):
    """An answer that is sent in chunks, each a server-sent event."""

    def __init__(self, call: ValidatedCall, context: AnswerContext) -> None:
        super().__init__(call, context)
        self._begun = [False] * len(self.choices)
        self._offsets = [0] * len(self.choices)  # characters of each choice's text so far, for `text_offset`
        kind = "chat.completion.chunk" if call.kind == "chat" else "text_completion"
        self._head = self.head(kind)
        if call.include_usage:
            self._head["usage"] = None

    def take(self, number: int, deltas: Sequence[OutputDelta]) -> bytes:
        """The events of more of the prompt `number`'s continuations; b"" if there is nothing to show."""
        parts = self._chat_parts if self.call.kind == "chat" else self._completions_parts
        events: list[bytes] = []
        for delta in deltas:
            choice, piece = self.read(number, delta)
            events += [self._chunk(part) for part in parts(choice, piece, delta)]
        return b"".join(events)

    def end(self) -> bytes:
        """The last events, when all choices have ended."""
        if not self.call.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self.usage()}) + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self.call.continuous_usage:
            chunk["usage"] = self.usage()
        if "prompt_token_ids" in choice and self.call.kind == "chat":
            chunk["prompt_token_ids"] = choice.pop("prompt_token_ids")
        return event(chunk)

    def _chat_parts(self, choice: Choice, piece: Piece, delta: OutputDelta) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta makes.

        Reasoning, content and tool calls never share a chunk: some clients look at the first of them alone.
        """
        call, parts = self.call, list[dict[str, Any]]()
        if piece.reasoning:
            parts.append({"delta": dict.fromkeys(call.reasoning_fields, piece.reasoning)})
        if piece.content:
            parts.append({"delta": {"content": piece.content}})
        if piece.tool_calls:
            parts.append({"delta": {"tool_calls": piece.tool_calls}})
        tells = delta.token_ids and (call.logprobs or call.return_token_ids)
        if not parts and (tells or choice.finish_reason is not None):
            parts.append({"delta": {}})
        parts = [{"index": choice.index, **part, "logprobs": None, "finish_reason": None} for part in parts]
        if tells:
            parts[0] |= self._tokens(delta)
        if choice.finish_reason is not None:
            parts[-1] |= _end_of(choice)
        if parts and not self._begun[choice.index]:
            self._begun[choice.index] = True
            role = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            role |= {"finish_reason": None}
            if call.return_token_ids:
                role["prompt_token_ids"] = call.prompts[0].token_ids
            parts.insert(0, role)
        return parts

    def _tokens(self, delta: OutputDelta) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self.call.logprobs:
            shown["logprobs"] = chat_logprobs(delta.logprobs or [], self.texts)
        if self.call.return_token_ids:
            shown["token_ids"] = delta.token_ids
        return shown

    def _completions_parts(self, choice: Choice, piece: Piece, delta: OutputDelta) -> list[dict[str, Any]]:
        call, text, begins = self.call, piece.content, not self._begun[choice.index]
        token_ids = [] if call.prompt_only else delta.token_ids
        entries: list[TokenLogprob | None] = [] if call.prompt_only else list(delta.logprobs or [])
        shown: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        if begins:
            shown["text"] = self.echoed(choice) + text
        tells = call.logprobs or call.return_token_ids
        if not shown["text"] and choice.finish_reason is None and not (token_ids and tells):
            return []
        if call.return_token_ids:
            shown["token_ids"] = token_ids
        if begins:
            self._begun[choice.index] = True
            if call.return_token_ids:
                shown["prompt_token_ids"] = self.prompt_of(choice).token_ids
            if call.echo:
                token_ids = [*self.prompt_of(choice).token_ids, *token_ids]
                entries = [*self.of_prompts[choice.index // self.n], *entries]
        if call.logprobs:
            shown["logprobs"] = completion_logprobs(entries, token_ids, self.texts, self._offsets[choice.index])
            self._offsets[choice.index] += sum(self.texts[token_id].chars for token_id in token_ids)
        if choice.finish_reason is not None:
            shown |= _end_of(choice)
        return [shown]


def _end_of(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
