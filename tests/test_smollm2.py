"""The real SmolLM2-135M-Instruct: greedy ids in fp32 equal transformers' on the same file, and the demo's answer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams
from tests.test_equality import likeliest

NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paperclip.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "What is 17 plus 25?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a short story about a dragon who is afraid of fire.",
    "What are the primary colours?",
    "How do I boil an egg?",
    "Name five planets.",
    "Summarise the water cycle in two sentences.",
    "Write a Python function that reverses a string.",
    "What does the word 'ephemeral' mean?",
]
TEXTS = [
    "Once upon a time",
    "The three laws of robotics are",
    "def fibonacci(n):\n",
    "In 1492, Columbus sailed 3,000 miles. In 2024,",
]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(str(smollm2), dtype="float32", device="cpu")) as run:
        yield run


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file's header twice, and makes the table of names once a tensor: half of its time.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        # And looks at the words of the tokenizer one by one in a mapped file, whose slices are slow to make.
        mapped = np.memmap
        patch.setattr(np, "memmap", lambda *given, **options: mapped(*given, **options).view(np.ndarray))
        return transformers.AutoModelForCausalLM.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
        ).eval()


def test_greedy_ids_equal_transformers(engine: Engine, oracle: transformers.PreTrainedModel) -> None:
    """Each id is transformers' likeliest after the same tokens, hence, one by one, the whole greedy output is its own.

    One forward pass over prompt and output judges all of a prompt's tokens.
    """
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = engine.generate([*prompts, *TEXTS], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert len(outputs) == 20
    for output in outputs:
        prompt, found = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert found == likeliest(oracle, prompt, found), output.prompt
        assert len(found) == NEW_TOKENS


def test_the_demo_names_paris(engine: Engine) -> None:
    output = engine.generate([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(max_tokens=64))[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_the_demo_names_paris_in_bf16(smollm2: Path) -> None:
    """Two first words are nearly level here; logits that were rounded to bf16 would tie and take the wrong one."""
    with Engine(EngineConfig(str(smollm2), dtype="bfloat16", device="cpu")) as run:
        output = run.generate([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(max_tokens=16))[0]
    assert "Paris" in output.outputs[0].text


def test_text_survives_the_tokenizer(engine: Engine) -> None:
    text = "naïve 北京 👩‍👩‍👧 12345 \t tabs\n\n<|im_end|> stays text"
    ids = engine.encode(text)
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not engine.loaded.eos_token_ids & set(ids)
