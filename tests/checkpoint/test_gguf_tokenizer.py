"""Tokenizers that are built from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from hookline.checkpoint.gguf import GgufReader
from hookline.checkpoint.gguf_tokenizer import tokenizer_source
from hookline.config import read_environment
from hookline.errors import CheckpointError
from hookline.model_store import DEFAULT_MODEL, find_pullable

PATH = Path("m.gguf")
ODD_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "tel 0123456789, 3.14159",
    "def f(x):\n\t\treturn x ** 2\n\n\n    # done\r\n",
    "👩‍👩‍👧‍👦 🇫🇷 naïve café 日本語 العربية \u00a0\u2028",
    "trailing   spaces   ",
    "I'LL we've DON'T can't",
    "e\u0301 \x00\x07",
]


def byte_level(tokens: list[str], merges: list[str], pre: str = "smollm", **more: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *tokens]
    types = [3 if token.startswith("<|") else 4 if token.startswith("[[") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def build(fields: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_source(PATH, fields).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "glm4", "starcoder"])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_byte_level_round_trip(pre: str, text: str) -> None:
    tokenizer = build(byte_level(["ab", "<|end|>"], ["a b"], pre))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
    ],
)
def test_digits_split_as_the_model_does(pre: str, digits: list[str]) -> None:
    tokenizer = build(byte_level(["12", "123", "1234"], ["1 2", "12 3", "123 4"], pre))
    assert tokenizer.encode("1234").tokens == digits


def test_special_tokens_are_single_ids_and_leave_plain_text() -> None:
    fields = byte_level(["<|a|>", "<|b|>", "[[tool]]"], [], bos_token_id=256, eos_token_id=257, padding_token_id=257)
    source = tokenizer_source(PATH, fields)
    assert (source.bos_token, source.eos_token, source.pad_token, source.unk_token) == ("<|a|>", "<|b|>", "<|b|>", None)
    assert (source.add_bos, source.add_eos) == (False, False)
    ids = build(fields).encode("<|a|>x<|b|>[[tool]]").ids
    assert [ids[0], *ids[2:]] == [256, 257, 258]
    assert build(fields).decode(ids, skip_special_tokens=True) == "x[[tool]]"


def test_bos_and_eos_are_put_where_the_file_says() -> None:
    fields = byte_level(["<|a|>", "<|b|>"], [], bos_token_id=256, eos_token_id=257, add_bos_token=True)
    assert build(fields).encode("x").ids[0] == 256
    assert build(fields).encode("x", add_special_tokens=False).tokens == ["x"]
    fields["tokenizer.ggml.add_eos_token"] = True
    assert build(fields).encode("x").tokens == ["<|a|>", "x", "<|b|>"]
    assert build(fields).encode("x", "y").tokens == ["<|a|>", "x", "<|b|>", "<|a|>", "y", "<|b|>"]


def sentencepiece(**more: Any) -> dict[str, Any]:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁he", "llo", "▁hello", "▁w", "or", "ld", "▁world", "lo", "he", "▁wor"]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    pieces += [(letter, -100.0 - rank, 1) for rank, letter in enumerate("▁helowrd")]
    tokens, scores, types = map(list, zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_sentencepiece_joins_by_score() -> None:
    tokenizer = build(sentencepiece())
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("hello world</s>").tokens[-1] == "</s>"
    assert build(sentencepiece(add_space_prefix=False, add_bos_token=False)).encode("he").tokens == ["he"]


@pytest.mark.parametrize("text", [text for text in ODD_TEXTS if text])
def test_sentencepiece_falls_back_to_bytes_and_returns_the_text(text: str) -> None:
    tokenizer = build(sentencepiece())
    ids = tokenizer.encode(text).ids
    assert 0 not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre is 'martian'"),
        ({"tokenizer.ggml.pre": ""}, "pre is ''"),
        ({"tokenizer.ggml.model": "bert"}, "model is 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.ggml.tokens": []}, "does not have a type for every token"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "does not have a type for every token"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' has two ids"),
        ({"tokenizer.ggml.tokens": 3}, "tokens is missing"),
        ({"tokenizer.ggml.merges": 3}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no pair"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "do not fit together"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
    ],
)
def test_faults_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        tokenizer_source(PATH, byte_level([], []) | change)


def test_file_without_a_tokenizer() -> None:
    assert tokenizer_source(PATH, {}).tokenizer is None


@pytest.fixture(scope="module")
def real_reader() -> GgufReader:
    model = find_pullable(DEFAULT_MODEL)
    cache_dir = read_environment().cache_dir
    if model is None or not model.is_pulled(cache_dir):
        pytest.skip(f"needs: engine pull {DEFAULT_MODEL}")
    return GgufReader(model.path(cache_dir))


def test_real_tokenizer(real_reader: GgufReader) -> None:
    source = real_reader.tokenizer_source
    tokenizer = source.tokenizer
    assert tokenizer is not None
    assert source.chat_template is not None
    assert (source.bos_token, source.eos_token, source.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, 4093, 198, 2]
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_real_config_and_weights(real_reader: GgufReader) -> None:
    config = real_reader.hf_config
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (30, 576, 64)
    assert (config["rms_norm_eps"], config["vocab_size"], config["tie_word_embeddings"]) == (1e-05, 49152, True)
    tensors = {tensor.name: tensor for tensor in real_reader.tensors()}
    assert len(tensors) == 272
    query = tensors["blk.0.attn_q.weight"]
    assert (query.shape, query.encoding) == ((576, 576), "Q4_1")
    assert query.load().std() > 0
