"""What Schemathesis is told beside our OpenAPI document, which cannot say which fields go together.

Without it almost every body is refused at the door, and nothing behind the door is tried. A quarter is left as it is.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis

# So few tokens end a call soon; what comes of more is no other reply.
_MOST_TOKENS = 4
_COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens")
_OF_ASSISTANTS = ("tool_calls", "reasoning", "reasoning_content")


@schemathesis.hook
def map_body(context: object, body: Any) -> Any:
    """Takes out what makes a body contradict itself, and leaves all else."""
    if not isinstance(body, dict) or zlib.crc32(json.dumps(body, default=repr).encode()) % 4 == 0:
        return body
    found = {name: _whole(value) for name, value in body.items() if name != "model"}
    if "prompt" in found or "messages" in found:
        found = {name: _few(value) if name in _COUNTS else value for name, value in found.items()}
        if found.get("max_tokens") is None and found.get("max_completion_tokens") is None:
            found["max_tokens"] = _MOST_TOKENS
    if not found.get("stream"):
        found.pop("stream_options", None)
    if not found.get("logprobs") and "messages" in found:
        found.pop("top_logprobs", None)
    if "prompt" in found and "messages" in found:
        del found["prompt"]
    if found.get("prompt") in ("", [], [""]):
        found["prompt"] = "The sea"
    if isinstance(found.get("messages"), list):
        found["messages"] = [_message(message) for message in found["messages"]]
    return found


def _few(value: Any) -> Any:
    return min(value, _MOST_TOKENS) if isinstance(value, int) else value


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    left_out = (() if role == "assistant" else _OF_ASSISTANTS) + (() if role == "tool" else ("tool_call_id",))
    found = {name: value for name, value in message.items() if name not in left_out}
    return found | {"content": "The sea"} if found.get("content") is None else found


def _whole(value: Any) -> Any:
    """JSON's schemas take 1.0 for a whole number, and we do not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_whole(entry) for entry in value] if isinstance(value, list) else value
