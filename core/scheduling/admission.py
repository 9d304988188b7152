"""Whether a request could run at all: asked once, when it comes, so that none waits for what can never be."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.errors import InvalidRequestError
from hookline.scheduling.block_pool import BlockPool


def wrong_token_ids(values: Sequence[object], vocab_size: int) -> list[object]:
    """Those of `values` that are no token ids of a vocabulary of this size."""
    return [i for i in values if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size]


def most_new_tokens(*, prompt: int, max_tokens: int | None, context: int, pool: BlockPool, lookahead: int = 0) -> int:
    """How many tokens a request may get, from all limits together.

    Args:
        prompt: how many tokens its prompt has.
        max_tokens: how many new ones it asks for; None for as many as the context leaves.
        context: most tokens, prompt plus output.
        pool: the cache, which has to hold the worst case when nothing else is in it.
        lookahead: places that the cache has to hold beyond them.

    Raises:
        InvalidRequestError: if the request could not run even alone in an empty engine.
    """
    if prompt < 1:
        raise InvalidRequestError("the prompt is empty; it must have at least one token", field="prompt")
    if prompt >= context:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens; the context holds {context}, one of them for the output",
            field="prompt",
            hint="Shorten the prompt, or give the engine a larger max_model_len and a cache (kv_cache_memory) for it, "
            "if the model allows that.",
        )
    most = context - prompt if max_tokens is None else min(max_tokens, context - prompt)
    if most < 1:
        raise InvalidRequestError(f"max_tokens is {max_tokens}; it must be at least 1", field="max_tokens")
    needed = pool.blocks_for(prompt + most + lookahead)
    if needed > pool.num_blocks:
        drafts = f" and {lookahead} drafts" if lookahead else ""
        raise InvalidRequestError(
            f"{prompt} prompt tokens and up to {most} new ones{drafts} need {needed} cache blocks of "
            f"{pool.block_size} tokens; the cache has {pool.num_blocks}",
            field="prompt" if max_tokens is None else "max_tokens",
            hint="Shorten the prompt, lower max_tokens, or give the cache more memory (kv_cache_memory).",
        )
    return most
