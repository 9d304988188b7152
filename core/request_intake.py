"""From what a user asks to requests with their sampling states; whatever is wrong with it comes to light here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, lru_cache
from hashlib import sha256

from hookline.errors import InvalidRequestError
from hookline.execution.sampling_state import SamplingState, derive_seed
from hookline.execution.token_masks import DelayedMatcher, TokenMatcher
from hookline.grammar import GrammarSpec
from hookline.loading import LoadedModel
from hookline.prompt_encoder import Prompt, PromptEncoder
from hookline.sampling_params import SamplingParams, check_params
from hookline.scheduling.request import Request
from hookline.structured_output import CompiledGrammar, GrammarVocabulary, compile_grammar

# A grammar to compile, one that is compiled, or one as `CompiledGrammar.to_bytes` gives it.
Grammar = GrammarSpec | CompiledGrammar | bytes

_KEPT_GRAMMARS = 32


class RequestIntake:
    """Makes the requests of one engine.

    Args:
        loaded: the model.
        vocab_size: width of its logits.
        max_model_len: most tokens of prompt and output together.
        seed: fixes the draws of requests that have no seed of their own.
    """

    def __init__(self, loaded: LoadedModel, vocab_size: int, max_model_len: int, seed: int) -> None:
        self._loaded = loaded
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seed = seed
        self._prompts = PromptEncoder(loaded.tokenizer, vocab_size)
        self._numbers = itertools.count()
        self._read_grammar = lru_cache(_KEPT_GRAMMARS)(self._read)

    def encode(self, prompt: Prompt) -> list[int]:
        """See `PromptEncoder.encode`."""
        return self._prompts.encode(prompt)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        grammar_after: int | None = None,
    ) -> tuple[str, list[tuple[Request, SamplingState]]]:
        """See `Engine.add_request`.

        Returns:
            the id of the whole, and its continuations.

        Raises:
            InvalidRequestError: if it can never be served as it stands.
        """
        params = check_params(params)
        token_ids = self.encode(prompt)
        params.check_against(self._vocab_size, len(token_ids), self._max_model_len)
        make_matcher = self._matchers(grammar, grammar_after, params)
        bad_word_ids = self._prompts.bad_word_ids(params.bad_words)
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else derive_seed(self._seed, number)
        eos, salt = self._loaded.eos_token_ids, self._loaded.opened.model.prefix_salt(len(token_ids))
        if cache_salt:
            salt += sha256(cache_salt.encode()).digest()
        children = []
        for index in range(params.n):
            child_id, child_seed = f"request-{number}/{index}", derive_seed(seed, index) if index else seed
            request = Request(child_id, list(token_ids), params, self._max_model_len, eos, salt)
            state = SamplingState(
                params, token_ids, eos, self._vocab_size, child_seed, bad_word_ids, matcher=make_matcher()
            )
            children.append((request, state))
        return f"request-{number}", children

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """What grammars are compiled for; made when it is first needed.

        Raises:
            InvalidRequestError: if there is no tokenizer.
        """
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "the checkpoint has no tokenizer, so its output cannot be held to a grammar",
                field="grammar",
                hint="Put tokenizer.json beside the weights.",
            )
        return GrammarVocabulary(tokenizer, self._vocab_size, self._loaded.eos_token_ids)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar that is ready to use.

        Raises:
            InvalidRequestError: see `compile_grammar`; also if it is none.
        """
        given: object = grammar
        if isinstance(given, CompiledGrammar):
            return given
        if isinstance(given, bytes):
            return self._read_grammar(given)
        if isinstance(given, GrammarSpec):
            return compile_grammar(given, self.vocabulary)
        raise InvalidRequestError(f"the grammar is {given!r:.80}; it must be a GrammarSpec", field="grammar")

    def _read(self, data: bytes) -> CompiledGrammar:
        return CompiledGrammar.from_bytes(data, self.vocabulary)

    def _matchers(
        self, grammar: Grammar | None, after: int | None, params: SamplingParams
    ) -> Callable[[], TokenMatcher | None]:
        """Makes the matcher of each continuation."""
        if grammar is None:
            return lambda: None
        compiled = self.compiled(grammar)

        def make() -> TokenMatcher:
            matcher = compiled.matcher(params.stop_token_ids, ignore_eos=params.ignore_eos)
            return matcher if after is None else DelayedMatcher(matcher, after)

        return make
