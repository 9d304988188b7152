"""How one request wants its tokens chosen. Frozen, validated when made; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hookline.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of a request, applied in fp32 in the order in which they stand here.

    Attributes:
        max_tokens: most new tokens; None for as many as the context leaves.
        min_tokens: end tokens and stop token ids are out of reach until so many tokens are there.
        allowed_token_ids: only these can be chosen; None allows all.
        bad_words: texts that must not appear; each is tokenised with and without a leading space.
        logit_bias: added to the logits of these token ids, -100 to 100.
        repetition_penalty: over 1 discourages tokens of prompt and output (CTRL, Keskar et al. 2019).
        presence_penalty, frequency_penalty: -2 to 2, over output tokens only, as OpenAI defines them.
        temperature: 0 is greedy. Applied before top-k, top-p and min-p.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p.
        min_p: keep tokens of at least min_p times the likeliest's probability.
        seed: makes the draw repeatable whatever else runs; None takes one from the engine's seed and the request's number.
        n: how many independent continuations.
        stop: texts that end the output; not part of it.
        stop_token_ids: token ids that end the output beside the model's own end tokens.
        ignore_eos: do not stop at the model's end tokens.
        logprobs: how many likeliest tokens to report with each output token; 0 reports the chosen one alone.
        prompt_logprobs: the same for each prompt token after the first.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
