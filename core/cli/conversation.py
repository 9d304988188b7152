"""A conversation as messages, and as a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hookline.cli.output_file import check_output, is_stream
from hookline.config import expand_home
from hookline.errors import HooklineError, ModelNotFoundError, UsageError

Message = dict[str, str]
_ROLES = ("system", "user", "assistant")


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        system: the system message; it may change at any time.
        turns: messages of user and assistant, in order.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def asked(self, text: str) -> list[Message]:
        """All messages with a question that is not part of the conversation yet."""
        return [*self.messages(), {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Makes a question and its answer part of the conversation."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def save_conversation(conversation: Conversation, name: str) -> None:
    """Writes the messages as JSON; what was in the file stays if that fails.

    Raises:
        UsageError: if no file can be written there.
    """
    path = check_output(name, "/save")
    partial = path if is_stream(path) else path.with_name(f"{path.name}.partial")
    try:
        text = json.dumps({"messages": conversation.messages()}, ensure_ascii=False, indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
        if partial != path:
            partial.replace(path)
    except (OSError, ValueError) as error:
        if partial != path:
            partial.unlink(missing_ok=True)
        raise HooklineError(f"{name} cannot be written: {error}") from None


def load_conversation(name: str) -> Conversation:
    """Reads what `save_conversation` wrote.

    Raises:
        ModelNotFoundError: if there is no such file.
        UsageError: if it holds something else.
    """
    try:
        value = json.loads(expand_home(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no sound JSON: {error}", hint="Give a file that /save wrote.") from None
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"{name} is no conversation", hint="Give a file that /save wrote.")
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if any(message["role"] == "system" for message in messages):
        raise UsageError(f"{name} has a system message that is not the first", hint="Give a file that /save wrote.")
    return Conversation(system, messages)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )
