"""Drafts from the text itself, against a search that looks at every place."""

from __future__ import annotations

import random

import pytest

from hookline.execution.ngram import NgramIndex


def search(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The last place, before the end, where the longest run of last tokens stands; what follows it, repeated."""
    for size in range(min(most, len(tokens)), least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for place in range(count):
                    text.append(text[end + place])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_proposes_what_a_search_finds(least: int, most: int) -> None:
    rng = random.Random(least * 10 + most)
    for _ in range(60):
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        index, taken = NgramIndex(least, most), 0
        while taken < len(tokens):
            step = rng.randint(1, 9)
            index.extend(tokens[taken : taken + step])
            taken += step
            known = tokens[:taken]
            assert len(index) == len(known)
            assert index.propose(5) == search(known, least, most, 5)


def test_a_repeated_text_is_continued_past_its_end() -> None:
    index = NgramIndex(2, 4)
    index.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_new_text_has_no_drafts() -> None:
    index = NgramIndex(1, 3)
    assert index.propose(3) == []
    index.extend(list(range(20)))
    assert index.propose(3) == []
