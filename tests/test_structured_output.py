"""Grammars: what a compiled one allows, over vocabularies of every kind, and what is refused before it is compiled."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from hookline import Engine, EngineConfig, SamplingParams, structured_output
from hookline.errors import InvalidRequestError
from hookline.grammar import GrammarSpec
from hookline.structured_output import CompiledGrammar, GrammarMatcher, GrammarVocabulary, compile_grammar
from hookline.tokenizer import Tokenizer

MODEL = Path(__file__).parent / "data" / "tiny-glm5.2-mtp"
END, WIDTH = 8175, 8200  # the logits are wider than the vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, WIDTH, [END])


def allowed(matcher: GrammarMatcher, *drafts: int, width: int = WIDTH) -> list[set[int]]:
    """The tokens that a matcher allows, after each of `drafts`."""
    mask = torch.zeros((len(drafts) + 1, -(-width // 32)), dtype=torch.int32)
    matcher.fill(mask, drafts)
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def texts(tokenizer: Tokenizer, token_ids: set[int]) -> set[str]:
    return {tokenizer.decode([token_id]) for token_id in token_ids}


def takes(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text, token by token, is allowed and complete."""
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), END]:
        if token_id not in allowed(matcher)[0]:
            return False
        matcher.accept(token_id)
    return matcher.is_finished


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, null, "x"]}', "{ }", '{"é": {"b": false}}'], ["[1]", "3", '{"a": }', "{", ""]),
        ("json_schema", '{"type": "integer", "minimum": 3}', ["3", "41"], ["2", "3.0", '"3"', ""]),
        ("json_schema", '{"enum": ["x", 1, null]}', ['"x"', "1", "null"], ["x", "2"]),
        ("regex", r"[a-c]{2}|\d+", ["ab", "0123"], ["a", "abc", "1a", ""]),
        ("choice", '["ja \\u2603", "a\\"b\\n", "\\ud83d\\ude00"]', ["ja ☃", 'a"b\n', "😀"], ["ja", "a", "nein"]),
        ("ebnf", 'root ::= "<" inner ">"\ninner ::= "x" | root', ["<x>", "<<x>>"], ["x", "<<x>", "<>"]),
        (
            "structural_tag",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<tool_call>",
                        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                        "end": "</tool_call>",
                    },
                }
            ),
            ["<tool_call>12</tool_call>"],
            ["12", "<tool_call></tool_call>", "<tool_call>x</tool_call>"],
        ),
    ],
)
def test_each_kind(
    kind: Any, source: str, good: list[str], bad: list[str], vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    """Also as bytes and back."""
    compiled = compile_grammar(GrammarSpec(kind, source), vocabulary)
    for grammar in (compiled, CompiledGrammar.from_bytes(compiled.to_bytes(), vocabulary)):
        assert [takes(grammar.matcher(), tokenizer, text) for text in good] == [True] * len(good)
        assert [takes(grammar.matcher(), tokenizer, text) for text in bad] == [False] * len(bad)


def test_special_tokens_and_ids_without_a_token_are_never_allowed(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    """Even where any text is; added tokens that are not special are text."""
    matcher = compile_grammar(GrammarSpec("regex", r"(.|\n)*x"), vocabulary).matcher()
    [found] = allowed(matcher)
    think = tokenizer.find_token("<think>")
    assert think in found and len(found) > 7000
    assert found.isdisjoint(tokenizer.special_ids) and max(found) < 8192
    matcher.accept(tokenizer.encode("x", add_special_tokens=False)[-1])
    assert allowed(matcher)[0] == found | {END}


def test_end_tokens(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Allowed where the text is complete; with `ignore_eos` only where nothing else can follow."""
    user = tokenizer.find_token("<|user|>")
    grammar = compile_grammar(GrammarSpec("regex", "[ab]{1,2}"), vocabulary)
    a, b = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in "ab")
    usual, endless = grammar.matcher([user or 0, a]), grammar.matcher(ignore_eos=True)
    assert {END, user}.isdisjoint(allowed(usual)[0]) and a in allowed(usual)[0]
    for matcher in (usual, endless):
        matcher.accept(a)
        assert not matcher.is_finished
    assert allowed(usual)[0] == {a, b, END, user}
    assert allowed(endless)[0] == {a, b}
    for matcher in (usual, endless):
        matcher.accept(b)
        assert matcher.is_finished
    assert allowed(endless)[0] == {END}
    usual.restart()
    usual.accept(a)
    usual.accept(END)
    assert usual.is_finished and allowed(usual)[0] == set()


def test_drafts_are_taken_and_given_back(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Each row is what the matcher would allow if the drafts before it were accepted; behind a wrong one is nothing."""
    grammar = compile_grammar(GrammarSpec("json_object"), vocabulary)
    tokens = tokenizer.encode('{"key": [1, 2]}', add_special_tokens=False)
    drafted, followed = grammar.matcher(), grammar.matcher()
    for place in range(len(tokens) + 1):
        rows = allowed(drafted, *tokens[place : place + 3])
        step = grammar.matcher()
        for token_id in tokens[:place]:
            step.accept(token_id)
        for ahead, (token_id, row) in enumerate(zip([*tokens[place : place + 3], None], rows, strict=False)):
            ends = ahead > 0 and step.is_finished  # a run without drafts would have ended there
            assert row == (set() if ends else allowed(step)[0])
            if token_id is not None:
                step.accept(token_id)
        if place < len(tokens):
            assert allowed(followed) == rows[:1]
            drafted.accept(tokens[place])
            followed.accept(tokens[place])
    assert drafted.is_finished
    fresh = grammar.matcher()
    rows = allowed(fresh, tokens[0], END, tokens[1])
    assert rows[0] and rows[1] and rows[2:] == [set(), set()]
    assert allowed(fresh, -1, WIDTH + 5) == [rows[0], set(), set()]
    assert allowed(fresh) == rows[:1]


def test_a_token_that_is_not_allowed_breaks_the_output(vocabulary: GrammarVocabulary) -> None:
    matcher = compile_grammar(GrammarSpec("regex", "a+"), vocabulary).matcher()
    matcher.accept(END)
    assert allowed(matcher) == [set()] and not matcher.is_finished
    matcher.restart()
    assert allowed(matcher) != [set()]


def test_a_grammar_that_takes_too_long_is_given_up(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    matcher = compile_grammar(GrammarSpec("regex", "a+"), vocabulary).matcher()
    assert allowed(matcher) != [set()]
    monkeypatch.setattr(structured_output, "_MOST_SECONDS", -1.0)
    allowed(matcher)
    assert allowed(matcher) == [set()] and not matcher.is_finished
    assert "its request ends" in caplog.text


def test_space_does_not_go_on_for_ever(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    matcher = compile_grammar(GrammarSpec("json_object"), vocabulary).matcher()
    matcher.accept(tokenizer.encode("{", add_special_tokens=False)[-1])
    line = tokenizer.encode("\n", add_special_tokens=False)[-1]
    count = 0
    while line in allowed(matcher, *[line] * 3)[0]:
        matcher.accept(line)
        count += 1
        assert count < 100
    assert count == structured_output._MOST_BLANKS
    rows = allowed(matcher)
    assert rows[0] and not any(text.isspace() for text in texts(tokenizer, rows[0]))


@pytest.fixture(scope="module")
def kinds() -> dict[str, Tokenizer]:
    """Small tokenizers of each kind of vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁yes", "yes", "é", "▁no", "n"]
    fallback = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate([*alphabet, "Ġyes", "<s>", "</s>"])}, []))
    level.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return {
        "fallback": Tokenizer(fallback, special_tokens=special),
        "level": Tokenizer(level, special_tokens=special),
    }


@pytest.mark.parametrize("kind", ["fallback", "level"])
def test_vocabularies(kind: str, kinds: dict[str, Tokenizer]) -> None:
    """Whatever way leads through a grammar, the bytes are its text."""
    tokenizer = kinds[kind]
    vocabulary = GrammarVocabulary(tokenizer, 300, tokenizer.eos_token_ids)
    [end] = tokenizer.eos_token_ids
    text = "é yes\n"
    grammar = compile_grammar(GrammarSpec("choice", json.dumps([text])), vocabulary)
    seen = set()
    for seed in range(20):
        rng, matcher, output = random.Random(seed), grammar.matcher(), list[int]()
        while not matcher.is_finished:
            [found] = allowed(matcher, width=300)
            assert found and end not in found
            output.append(rng.choice(sorted(found)))
            matcher.accept(output[-1])
        assert tokenizer.decode(output) == text
        seen.add(tuple(output))
    assert len(seen) > 1


@pytest.mark.parametrize("kind", ["fallback", "level"])
def test_half_of_a_surrogate_pair_is_no_character(kind: str, kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds[kind]
    spelled = {
        token_id: structured_output._token_bytes(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)
    }
    ids = {spelling: token_id for token_id, spelling in spelled.items() if len(spelling) == 1}
    lead, rests = ids[b"\xed"], {bytes([byte]) for byte in range(0x80, 0xA0)}
    vocabulary = GrammarVocabulary(tokenizer, 300, tokenizer.eos_token_ids)
    matcher = compile_grammar(GrammarSpec("regex", "[^a]{2}b"), vocabulary).matcher()
    for _ in range(2):
        first, second, behind = allowed(matcher, lead, ids[b"\x80"], width=300)
        assert lead in first
        assert {spelled[token_id] for token_id in second} == rests
        assert {spelled[token_id] for token_id in behind} == {bytes([byte]) for byte in range(0x80, 0xC0)}
        assert allowed(matcher, width=300) == [first]  # the drafts are given back
        matcher.accept(lead)
        assert {spelled[token_id] for token_id in allowed(matcher, width=300)[0]} == rests
        matcher.restart()


def test_bytes_of_another_vocabulary_are_refused(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    data = compile_grammar(GrammarSpec("regex", "a"), vocabulary).to_bytes()
    other = GrammarVocabulary(tokenizer, WIDTH - 100, [END])
    for wrong in (data[:-10], b"", b"\xff", b"{}"):
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            CompiledGrammar.from_bytes(wrong, vocabulary)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        CompiledGrammar.from_bytes(data, other)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(a", "the regex cannot be used"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("regex", "", "nothing but the empty text"),
        ("ebnf", "root ::= root", "no text fits it"),
        ("ebnf", 'other ::= "x"', "root"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 3]', "a list of texts"),
        ("choice", '["a", "\\ud800"]', "surrogates not allowed"),
        ("choice", "nothing", "it is no JSON"),
        ("json_schema", "{", "it is no JSON"),
        ("json_schema", "[" * 50_000, "nested too deep"),
        ("json_schema", '{"minimum": NaN}', "NaN is no JSON number"),
        ("json_schema", "[]", "object or bool"),
        ("json_schema", "false", "cannot accept any value"),
        ("structural_tag", "{}", "format"),
        ("structural_tag", '{"format": {"json_schema": {"not": {}}}}', "not is not supported"),
    ],
)
def test_unsound_grammars_are_refused(kind: Any, source: str, message: str, vocabulary: GrammarVocabulary) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_grammar(GrammarSpec(kind, source), vocabulary)
    assert len(caught.value.message) < 500 and "/project/" not in caught.value.message


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options: dict[str, Any] = {"block_size": 8, "dtype": "float32", "device": "cpu", "max_model_len": 96}
    with Engine(EngineConfig(str(MODEL), kv_cache_memory=2**22, overlap=False, **options)) as made:
        yield made


def test_the_engine_ends_a_request_whose_text_is_complete(engine: Engine) -> None:
    """Though end tokens are ignored, or out of reach until later; also with the last token that it may have."""
    grammar = engine.compile_grammar(GrammarSpec("regex", "[0-9]{4}"))
    kinds: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_tokens": 25}, {"stop": ["zz"]}]
    outputs = engine.generate(["x"] * 4, [SamplingParams(max_tokens=30, **kind) for kind in kinds], grammar=grammar)
    for output in outputs:
        [one] = output.outputs
        assert one.text.isdigit() and len(one.text) == 4 and one.finish_reason == "stop" and one.stop_reason is None
    count = len(outputs[0].outputs[0].token_ids)
    [output] = engine.generate(["x"], SamplingParams(max_tokens=count), grammar=grammar)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (outputs[0].outputs[0].text, "stop")
    [output] = engine.generate(["x"], SamplingParams(max_tokens=1), grammar=GrammarSpec("regex", "[a-z]{40}"))
    assert output.outputs[0].finish_reason == "length"


def test_the_engine_takes_a_grammar_in_every_form(engine: Engine) -> None:
    spec = GrammarSpec("choice", '["left", "right"]')
    compiled = engine.compile_grammar(spec)
    texts = {engine.generate("x", grammar=each)[0].outputs[0].text for each in (spec, compiled, compiled.to_bytes())}
    assert len(texts) == 1 and texts <= {"left", "right"}
    with pytest.raises(InvalidRequestError, match="it must be a GrammarSpec"):
        engine.add_request("x", grammar="left")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="Unclosed"):
        engine.add_request("x", grammar=GrammarSpec("regex", "["))
    assert not engine.has_work
