"""The tokenizer of a GGUF file, built from its vocabulary and merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from hookline.checkpoint.reader import TokenizerSource
from hookline.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_BY_THREE = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SIGNS_AND_SPACES))
_DIGITS_BY_ONE = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _SIGNS_AND_SPACES))
_SPLITS = MappingProxyType(
    {
        "llama-bpe": _DIGITS_BY_THREE,
        "llama3": _DIGITS_BY_THREE,
        "llama-v3": _DIGITS_BY_THREE,
        "glm4": _DIGITS_BY_THREE,
        "chatglm-bpe": _DIGITS_BY_THREE,
        "qwen2": _DIGITS_BY_ONE,
    }
)
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_PLAIN_BYTE_LEVEL = frozenset({"gpt-2", "default"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})


def tokenizer_source(path: Path, fields: Mapping[str, Any]) -> TokenizerSource:
    """Tokenizer, special tokens and chat template of the file with these metadata fields.

    Raises:
        CheckpointError: if the kind of tokenizer is not known, or its parts do not fit together.
    """
    template = fields.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    kind = fields.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return TokenizerSource(chat_template=template)
    vocabulary = _Vocabulary(path, fields)
    if kind == "gpt2":
        tokenizer = _byte_level(path, fields, vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece(path, fields, vocabulary)
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {str(kind)[:80]!a}; gpt2 and llama are known",
            hint="Take the model's safetensors folder, which brings its tokenizer.json.",
        )
    vocabulary.add_special_tokens(tokenizer)
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    # Files of the sentencepiece kind that do not say want a BOS; others do not.
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama")) and bos is not None
    add_eos = bool(fields.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    _set_post_processor(path, tokenizer, bos if add_bos else None, eos if add_eos else None)
    return TokenizerSource(
        tokenizer=tokenizer,
        chat_template=template,
        bos_token=bos,
        eos_token=eos,
        pad_token=vocabulary.token("padding"),
        unk_token=vocabulary.token("unknown"),
        add_bos=add_bos,
        add_eos=add_eos,
    )


class _Vocabulary:
    """Tokens by id and their types, checked."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields
        self.tokens: list[str] = _list_of(str, path, fields, "tokenizer.ggml.tokens")
        self.types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(self.tokens))
        if not isinstance(self.types, list) or len(self.types) != len(self.tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.token_type does not have a type for every token")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise CheckpointError(f"{path}: the token {twice[:80]!a} has two ids")

    def token(self, kind: str) -> str | None:
        """The special token of this kind, such as `bos`; None where the file has none."""
        index = self._fields.get(f"tokenizer.ggml.{kind}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"{self._path}: tokenizer.ggml.{kind}_token_id is {index}; there are {len(self.tokens)} tokens"
            )
        return self.tokens[index]

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Control tokens match as one and are left out of plain text; user-defined ones only match as one."""
        specials = [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(specials)


def _byte_level(path: Path, fields: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    pre = str(fields.get("tokenizer.ggml.pre", ""))
    if pre not in _SPLITS and pre not in _SINGLE_DIGITS and pre not in _PLAIN_BYTE_LEVEL:
        known = ", ".join(sorted({*_SPLITS, *_SINGLE_DIGITS, *_PLAIN_BYTE_LEVEL}))
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {pre[:80]!a}, a way to split text that is not known ({known} are)",
            hint="Take the model's safetensors folder, which brings its tokenizer.json.",
        )
    pairs = [tuple(merge.split(" ")) for merge in _list_of(str, path, fields, "tokenizer.ggml.merges")]
    bad = next((pair for pair in pairs if len(pair) != 2), None)
    if bad is not None:
        raise CheckpointError(f"{path}: tokenizer.ggml.merges holds {' '.join(bad)[:80]!a}, which is no pair")
    tokenizer = _bpe(path, vocab=vocabulary.ids, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        pre_tokenizer = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
        pre_tokenizer = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, fields: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    scores = _list_of(float, path, fields, "tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores does not have a score for every token")
    tokenizer = _bpe(
        path,
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary, scores),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    prepend = [normalizers.Prepend("▁")] if prefix else []
    strip = [decoders.Strip(" ", left=1, right=0)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the third's best score first: sentencepiece's own order."""
    merges = []
    pieces = zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
    for piece, kind, score in pieces:
        if kind != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.ids.get(piece[:cut]), vocabulary.ids.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-score, left, right))
    merges.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in merges]


def _bpe(path: Path, **parts: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(**parts))
    except Exception as error:  # the bindings raise bare Exception
        raise CheckpointError(f"{path}: vocabulary and merges do not fit together: {str(error)[:200]}") from None


def _set_post_processor(path: Path, tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        single = [part for part in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if part]
        second = [part for part in (bos and f"{bos}:1", "$B:1", eos and f"{eos}:1") if part]
        ids = [(token, tokenizer.token_to_id(token)) for token in ends]
        try:
            processor = processors.TemplateProcessing(single=single, pair=single + second, special_tokens=ids)
        except ValueError as error:
            raise CheckpointError(f"{path}: {' and '.join(ends)[:80]!a} cannot be put around a text: {error}") from None
        tokenizer.post_processor = processor


def _list_of(kind: type, path: Path, fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise CheckpointError(f"{path}: {key} is missing, or no list of {kind.__name__}")
    return value
