"""What is a prompt and what is none, whatever a caller hands over."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.errors import InvalidRequestError
from hookline.prompt_encoder import PromptEncoder, as_prompts


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (None, "NoneType"),
        (5, "int"),
        (1.5, "float"),
        (b"bytes", "bytes"),
        ({"role": "user", "content": "hello"}, "dict"),
        ({1, 2}, "set"),
        ([], "empty"),
        ([-1], r"\[-1\]"),
        ([1.0], r"\[1.0\]"),
        ([True], r"\[True\]"),
        ([320], r"\[320\]"),
        ([1, "a" * 10_000], "token ids are whole numbers from 0 to 319"),
        (["a"], "token ids"),
        ([None], "token ids"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "hello"}], "no tokenizer"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named) as caught:
        PromptEncoder(None, 320).encode(prompt)
    assert caught.value.field == "prompt"
    assert len(str(caught.value)) < 400


def test_bad_words_need_a_tokenizer() -> None:
    assert PromptEncoder(None, 320).bad_word_ids(()) == []
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        PromptEncoder(None, 320).bad_word_ids(("a",))


@pytest.mark.parametrize("prompt", ["text", [1, 2], [{"role": "user", "content": "a"}], [1.0], None, 7, {"a": 1}, b"a"])
def test_one_prompt_or_what_is_none_is_a_list_of_one(prompt: Any) -> None:
    assert as_prompts(prompt) == [prompt]


@pytest.mark.parametrize("prompts", [[], ["a", "b"], [[1], [2, 3]], ["a", [1]], ["a", 1], [[{"role": "user"}]]])
def test_several_prompts_stay_as_they_are(prompts: Any) -> None:
    assert as_prompts(prompts) == prompts
