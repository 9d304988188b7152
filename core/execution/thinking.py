"""Whether a request thinks: between the token that begins it and the one that ends it."""

from __future__ import annotations

from collections.abc import Iterable

from hookline.scheduling.request import Request


class Thinking:
    """Follows the thinking phase of requests.

    Args:
        begin_id, end_id: the two tokens.
    """

    def __init__(self, begin_id: int, end_id: int) -> None:
        self._begin_id = begin_id
        self._end_id = end_id
        # Whether a request thinks after so many of its output tokens.
        self._known: dict[Request, tuple[bool, int]] = {}

    def is_thinking(self, request: Request) -> bool:
        """Whether a request's next token is a thought: the last of the two tokens in prompt and output decides."""
        known = self._known.get(request)
        if known is None:
            known = self._after(False, reversed(request.prompt_token_ids), first=True), 0
        flag, count = known
        outputs = request.output_token_ids
        if count < len(outputs):
            flag = self._after(flag, outputs[count:])
        self._known[request] = flag, len(outputs)
        return flag

    def forget(self, request: Request) -> None:
        """Drops what is known of a request."""
        self._known.pop(request, None)

    def _after(self, flag: bool, tokens: Iterable[int], first: bool = False) -> bool:
        for token in tokens:
            if token in (self._begin_id, self._end_id):
                flag = token == self._begin_id
                if first:
                    return flag
        return flag
