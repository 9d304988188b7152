"""GLM's reasoning (`glm45`): the prompt opens it, and `</think>` or the first tool call ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hookline.parsers.think import ThinkFormat, last_marker


class Glm45ReasoningFormat(ThinkFormat):
    """`<think>...</think>`, of which a call of a tool ends an open one and belongs to what follows."""

    def __init__(self) -> None:
        super().__init__(also_end=("<tool_call>",))

    def starts_inside(self, prompt_token_ids: Sequence[int], find_token: Callable[[str], int | None]) -> bool:
        """Whether the prompt's last marker opens reasoning; without any, the answer begins inside too.

        What came before the assistant's turn says nothing: where the turn begins without a marker, the model opens its
        reasoning itself or has none.
        """
        markers = (self.begin, self.end, *self.also_end, "<|assistant|>")
        return last_marker(prompt_token_ids, markers, find_token) in (self.begin, None)
