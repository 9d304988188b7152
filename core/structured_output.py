"""Structured output: a grammar over a tokenizer's vocabulary, and matchers that hold an output to it (xgrammar).

A grammar is compiled once for a vocabulary. As bytes it can be made in one process and used in another. Special tokens
and ids without a token are never allowed inside; end tokens only where the text is complete.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hookline.errors import InvalidRequestError, UsageError
from hookline.grammar import GrammarSpec
from hookline.schema_support import check_schema

if TYPE_CHECKING:
    import torch
    import xgrammar

    from hookline.tokenizer import Tokenizer

_MAX_MESSAGE = 300
# Processor time of one token, beyond which a grammar is given up: an ambiguous one can take ever longer.
_MOST_SECONDS = 0.05
# Tokens of nothing but space in a row, beyond which others come first: between the parts of JSON a model that has lost
# its way would write them for ever.
_MOST_BLANKS = 16
# What stands before xgrammar's own messages.
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")

# Half of a surrogate pair, as UTF-8 would have it: no text, though xgrammar takes it for any other character.
_SURROGATE_LEAD, _SURROGATE = b"\xed", re.compile(rb"\xed[\xa0-\xbf]")
_SURROGATE_REST = re.compile(rb"[\xa0-\xbf]")
# Characters that JSON's strings cannot hold, but for those that may stand between its parts.
_CONTROLS = frozenset(range(0x20)) - frozenset(b"\t\n\r")

Words = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class GrammarVocabulary:
    """What grammars are compiled for: the bytes of each token, and the end tokens.

    Args:
        tokenizer: spells the tokens.
        vocab_size: width V of the model's logits, which may be more or less than the tokenizer has tokens.
        eos_token_ids: the model's end tokens.

    Raises:
        UsageError: if xgrammar is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise UsageError(
                f"structured output needs xgrammar, which cannot be imported: {error}",
                hint='pip install "hookline[serve]"',
            ) from error
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.special_ids = tokenizer.special_ids
        spelled = [_token_bytes(tokenizer, token_id) for token_id in range(vocab_size)]
        self._words = self._that(spelled, lambda spelling: bool(spelling) and not _SURROGATE.search(spelling))
        self._controls = self._that(spelled, lambda spelling: not _CONTROLS.isdisjoint(spelling))
        self._tabs = self._that(spelled, lambda spelling: b"\t" in spelling)
        self.blank_ids = frozenset(token_id for token_id, spelling in enumerate(spelled) if spelling.isspace())
        self.blanks = self.pack(self.blank_ids)
        # Behind a token that ends in byte ED none may come that begins with A0 to BF.
        self.lead_ids = frozenset(n for n, spelling in enumerate(spelled) if spelling.endswith(_SURROGATE_LEAD))
        self.surrogate_rests = self._that(spelled, lambda spelling: bool(_SURROGATE_REST.match(spelling)))
        self.info = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=sorted(self.eos_token_ids)
        )

    def possible(self, kind: str) -> Words:
        """The tokens that may stand in a text of a grammar's kind, as a mask.

        xgrammar lets control characters into JSON's strings where their length is limited, which JSON does not.
        """
        if kind in ("json_object", "json_schema"):
            return self._words & ~self._controls & ~self._tabs
        return self._words & ~self._controls if kind == "structural_tag" else self._words

    def _that(self, spelled: Sequence[bytes], holds: Callable[[bytes], bool]) -> Words:
        return self.pack(token_id for token_id, spelling in enumerate(spelled) if holds(spelling))

    def pack(self, token_ids: Iterable[int]) -> Words:
        """A mask [ceil(V / 32)] that allows `token_ids`."""
        flags = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token adds to the text; nothing for one that may not stand inside."""
    if token_id in tokenizer.special_ids or not tokenizer.knows(token_id):
        return b""
    if tokenizer.decoder_kinds == ("ByteLevel",):
        return tokenizer.token_bytes(token_id)
    if tokenizer.is_byte_token(token_id):
        return bytes([int(tokenizer.token_bytes(token_id)[3:5], 16)])
    return tokenizer.token_text(token_id).encode()


class CompiledGrammar:
    """A grammar that is ready to use.

    Args:
        kind: of the grammar.
        compiled: xgrammar's own.
        vocabulary: what it was compiled for.
    """

    def __init__(self, kind: str, compiled: xgrammar.CompiledGrammar, vocabulary: GrammarVocabulary) -> None:
        self._kind = kind
        self._compiled = compiled
        self._vocabulary = vocabulary

    def to_bytes(self) -> bytes:
        """The grammar without its vocabulary: its kind, and xgrammar's JSON."""
        return f"{self._kind}\n{self._compiled.serialize_json()}".encode()

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary: GrammarVocabulary) -> CompiledGrammar:
        """What `to_bytes` wrote.

        Raises:
            InvalidRequestError: if the bytes are no grammar, or one for another vocabulary.
        """
        import xgrammar

        try:
            kind, _, text = data.decode().partition("\n")
            return cls(kind, xgrammar.CompiledGrammar.deserialize_json(text, vocabulary.info), vocabulary)
        except Exception as error:
            raise InvalidRequestError(f"a compiled grammar cannot be read: {_message(error)}") from error

    def matcher(self, stop_token_ids: Collection[int] = (), *, ignore_eos: bool = False) -> GrammarMatcher:
        """A matcher at the beginning of an output.

        Args:
            stop_token_ids: end the output beside the model's own end tokens. Those that are special tokens are allowed
                where end tokens are; others are text like any.
            ignore_eos: allow end tokens only where nothing else can follow.
        """
        return GrammarMatcher(self._kind, self._compiled, self._vocabulary, stop_token_ids, ignore_eos)


def compile_grammar(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compiles a grammar in this thread, however long it takes.

    Raises:
        InvalidRequestError: if it is unsound or not supported, or no text or only the empty one fits it.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    try:
        compiled = CompiledGrammar(spec.kind, _compile(spec, compiler), vocabulary)
    except InvalidRequestError:
        raise
    except Exception as error:  # of many types, each for something that the grammar has
        raise refusal(spec, _message(error)) from error
    start = compiled.matcher()
    if start.is_finished:
        raise refusal(spec, "it allows nothing but the empty text")
    if not start.allows_any:
        raise refusal(spec, "no text fits it")
    return compiled


def refusal(spec: GrammarSpec, reason: str) -> InvalidRequestError:
    """The error of a grammar that is not taken."""
    field = "response_format" if spec.kind.startswith("json") else "structured_outputs"
    return InvalidRequestError(f"the {spec.kind} cannot be used: {reason}", field=field)


def _compile(spec: GrammarSpec, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    if spec.kind in ("json_object", "json_schema"):
        schema = read_json(spec) if spec.kind == "json_schema" else {"type": "object"}
        check_schema(schema)
        return compiler.compile_json_schema(json.dumps(schema))
    if spec.kind == "structural_tag":
        tag = read_json(spec)
        _check_inner_schemas(tag)
        return compiler.compile_structural_tag(json.dumps(tag))
    if spec.kind == "choice":
        return compiler.compile_grammar(_choice_grammar(spec))
    return compiler.compile_regex(spec.source) if spec.kind == "regex" else compiler.compile_grammar(spec.source)


def read_json(spec: GrammarSpec) -> object:
    """The JSON that stands in a grammar's source.

    Raises:
        InvalidRequestError: if it is none.
    """
    try:
        found: object = json.loads(spec.source, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise refusal(spec, f"it is no JSON, or nested too deep: {_message(error)}") from error
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _check_inner_schemas(tag: object) -> None:
    """Checks the schemas inside a structural tag."""
    if isinstance(tag, dict):
        for name, value in tag.items():
            if name == "json_schema":
                check_schema(value)
            else:
                _check_inner_schemas(value)
    elif isinstance(tag, list):
        for value in tag:
            _check_inner_schemas(value)


def _choice_grammar(spec: GrammarSpec) -> str:
    choices = read_json(spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise refusal(spec, "it must be a list of texts, none of them empty, and have at least one")
    "".join(choices).encode()  # half of a surrogate pair is no text
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, text))}"' for text in choices)


def _escape(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"


def _message(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _ORIGIN.sub("", first).strip()[:_MAX_MESSAGE]


class GrammarMatcher:
    """Holds one output to a grammar; see `TokenMatcher` for its verbs.

    Args: as of `CompiledGrammar` and its `matcher`.
    """

    def __init__(
        self,
        kind: str,
        compiled: xgrammar.CompiledGrammar,
        vocabulary: GrammarVocabulary,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
    ) -> None:
        import xgrammar

        ends = vocabulary.eos_token_ids | (vocabulary.special_ids & frozenset(stop_token_ids))
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(ends) or None)
        self._ends = vocabulary.pack(ends)
        self._possible = vocabulary.possible(kind) | self._ends
        self._ignore_eos = ignore_eos
        self._vocabulary = vocabulary
        self._is_broken = False
        self._blanks = 0  # tokens of nothing but space since the last other one
        self._is_behind_lead = False

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        """See `TokenMatcher.fill`."""
        words: Words = mask.numpy()
        taken, before = 0, (self._blanks, self._is_behind_lead)
        try:
            self._fill_one(words, 0)
            for place, draft in enumerate(drafts, 1):
                is_taken = self._take(draft)
                taken += is_taken
                if not is_taken or self.is_finished:  # behind what is complete nothing comes: the output ends there
                    words[place:] = 0
                    break
                self._fill_one(words, place)
        finally:
            self._blanks, self._is_behind_lead = before
            if taken:
                self._matcher.rollback(taken)

    def _fill_one(self, words: Words, place: int) -> None:
        if self._is_broken or self._matcher.is_terminated():
            words[place] = 0
            return
        row, begin = words[place], time.thread_time()
        row.fill(-1)  # which xgrammar leaves as it is where all tokens are allowed
        self._matcher.fill_next_token_bitmask(words, place)
        self._watch(begin)
        row &= self._possible
        if self._is_behind_lead:
            row &= ~self._vocabulary.surrogate_rests
        if self._ignore_eos:
            _prefer_others(row, self._ends)
        if self._blanks >= _MOST_BLANKS:
            _prefer_others(row, self._vocabulary.blanks)

    def accept(self, token_id: int) -> None:
        """See `TokenMatcher.accept`."""
        if not self._take(token_id):
            self._is_broken = True

    def _take(self, token_id: int) -> bool:
        if self._is_broken or not 0 <= token_id < self._vocabulary.vocab_size or self._matcher.is_terminated():
            return False
        begin = time.thread_time()
        taken = self._matcher.accept_token(token_id)
        self._watch(begin)
        self._blanks = self._blanks + 1 if token_id in self._vocabulary.blank_ids else 0
        self._is_behind_lead = token_id in self._vocabulary.lead_ids
        return taken

    def _watch(self, begin: float) -> None:
        """Gives the output up if what began then took too long: all others wait for it."""
        if time.thread_time() - begin > _MOST_SECONDS:
            _log.warning("a grammar took more than %g s for one token; its request ends", _MOST_SECONDS)
            self._is_broken = True

    def restart(self) -> None:
        """See `TokenMatcher.restart`."""
        self._matcher.reset()
        self._is_broken = False
        self._blanks = 0
        self._is_behind_lead = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end token can follow, or one has come."""
        if self._is_broken or self._matcher.is_terminated():
            return not self._is_broken
        return self._matcher.is_completed() and not (self._next() & ~self._ends).any()

    @property
    def allows_any(self) -> bool:
        """Whether any token can follow."""
        return bool(self._next().any())

    def _next(self) -> Words:
        words = np.empty((1, len(self._ends)), dtype=np.int32)
        self._fill_one(words, 0)
        found: Words = words[0]
        return found


def _prefer_others(row: Words, words: Words) -> None:
    """Takes the tokens of `words` out of a mask, where it allows others."""
    others = row & ~words
    if others.any():
        row[:] = others
