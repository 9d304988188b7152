"""Whether a request thinks, token by token."""

from __future__ import annotations

import random

from hookline.execution.thinking import Thinking
from hookline.sampling_params import SamplingParams
from hookline.scheduling.request import Request

BEGIN, END = 8, 9


def ask(*prompt: int) -> Request:
    return Request("a", list(prompt), SamplingParams(), 100)


def test_the_prompts_last_marker_says_how_it_begins() -> None:
    for prompt, thinks in (
        ((1,), False),
        ((BEGIN,), True),
        ((BEGIN, 1, 2), True),
        ((BEGIN, 1, END), False),
        ((BEGIN, 1, END, 2, BEGIN), True),
        ((END, 1), False),
    ):
        assert Thinking(BEGIN, END).is_thinking(ask(*prompt)) is thinks


def test_committed_tokens_toggle_in_their_order() -> None:
    rng = random.Random(0)
    for _ in range(50):
        thinking, request = Thinking(BEGIN, END), ask(rng.choice((1, BEGIN)))
        for _ in range(20):
            request.output_token_ids += [rng.choice((1, 2, BEGIN, END)) for _ in range(rng.randint(1, 4))]
            markers = [
                token for token in [*request.prompt_token_ids, *request.output_token_ids] if token in (BEGIN, END)
            ]
            assert thinking.is_thinking(request) is (bool(markers) and markers[-1] == BEGIN)
            if rng.random() < 0.2:
                thinking.forget(request)
