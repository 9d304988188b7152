"""Prompt lookup: drafts copied from where the last tokens came before. Needs no weights and works for every model.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The tokens of one request, and where each run of `least` to `most` of them was followed by another last.

    Every token costs the same, however long the text is.
    """

    __slots__ = ("_ends", "_least", "_most", "_tokens")

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens."""
        known = self._tokens
        for token in tokens:
            # A run enters once something follows it, so that the last tokens never find themselves.
            for size in range(self._least, min(self._most, len(known)) + 1):
                self._ends[tuple(known[-size:])] = len(known)
            known.append(token)

    def propose(self, count: int) -> list[int]:
        """`count` tokens that followed the longest run at the end when it came last; none if it is new.

        Where the copy comes to the end of the text, it goes on with what it has copied.
        """
        known = self._tokens
        for size in range(min(self._most, len(known)), self._least - 1, -1):
            place = self._ends.get(tuple(known[-size:]))
            if place is not None:
                period = len(known) - place
                copied = known[place : place + count]
                while len(copied) < count:
                    copied.append(copied[len(copied) - period])
                return copied
        return []
