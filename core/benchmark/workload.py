"""What is asked of the engine in a benchmark: lengths, prompts and arrivals, all fixed by a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hookline.errors import UsageError

# Chat-like lengths: mean before clipping and sigma of the logarithm, of prompts and of outputs.
_PROMPT_MEAN, _PROMPT_SIGMA = 240.0, 1.3
_OUTPUT_MEAN, _OUTPUT_SIGMA = 190.0, 1.0
_SHORTEST, _LONGEST = 4, 1024


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request: of its prompt, and of its output."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens of the whole request."""
        return self.prompt + self.output


def fixed_lengths(count: int, prompt: int, output: int) -> list[Lengths]:
    """`count` requests of one size."""
    return [Lengths(prompt, output)] * count


def lognormal_lengths(count: int, seed: int = 0) -> list[Lengths]:
    """`count` requests with lengths as chats have them: 4 to 1,024 tokens, mean about 206 in and 182 out.

    One generator draws for each request the prompt's length, then the output's.
    """
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        length = int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))
        return min(_LONGEST, max(_SHORTEST, length))

    return [Lengths(draw(_PROMPT_MEAN, _PROMPT_SIGMA), draw(_OUTPUT_MEAN, _OUTPUT_SIGMA)) for _ in range(count)]


def make_prompts(lengths: Sequence[Lengths], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, one prompt for each of `lengths`; no two of them share a beginning but by chance."""
    rng = random.Random(seed)
    ids = range(vocab_size)
    return [rng.choices(ids, k=length.prompt) for length in lengths]


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests come, `rate` of them a second on average.

    Raises:
        UsageError: if the rate is no positive number.
    """
    if not 0 < rate < math.inf:
        raise UsageError(f"the rate is {rate}", hint="Give --rate a positive number of requests a second.")
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))
