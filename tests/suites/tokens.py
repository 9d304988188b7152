"""Tokenizers of the kinds that differ in how tokens become text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hookline.tokenizer import Tokenizer
from tests.conftest import write_tokenizer

# As in Llama's own vocabulary: a word's beginning is marked, and what has no token is written in bytes.
_MARK = "\u2581"


def byte_tokenizer() -> Tokenizer:
    """256 bytes and three special tokens, as the rig's model has them."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        write_tokenizer(Path(folder))
        built = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return Tokenizer(built, None, {"eos_token": "<|endoftext|>"})


def merged_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level tokens learnt from `texts`, whose borders lie inside characters and across them."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator(texts, trainer)
    return Tokenizer(built)


def fallback_tokenizer() -> Tokenizer:
    """Words of a few letters, and bytes for all else."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in (*"abcdeäé", _MARK, _MARK + "a", "ab", "😀"):
        vocabulary[piece] = len(vocabulary)
    built = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_MARK, prepend_scheme="never", split=False)
    built.decoder = decoders.Sequence([decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(built)
