"""Small checkpoints, made on the fly with fixed seeds, that the tests share."""

from __future__ import annotations

import os

# Before anything imports triton: kernels run on the CPU in tests, in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Servers that tests start share their cores with the tests: small models run faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hookline.config import read_environment
from hookline.model_store import DEFAULT_MODEL, pull
from tests.suites.reporting import pytest_terminal_summary as pytest_terminal_summary

if TYPE_CHECKING:
    import transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    # Wide enough that greedy choices are far from ties.
    "initializer_range": 0.15,
}
TINY_MIXTRAL: dict[str, Any] = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
TINY_QWEN2_MOE: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and three special tokens, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def make_checkpoint(folder: Path, kind: str = "llama", seed: int = 0, **fields: Any) -> Path:
    """`make_module` saved with a tokenizer."""
    make_module(kind, seed, **fields).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_module(kind: str = "llama", seed: int = 0, **fields: Any) -> transformers.PreTrainedModel:
    """A tiny random model of transformers' own making; `kind` is `llama`, `mistral`, `mixtral` or `qwen2_moe`."""
    # Here, so that the process that hands out the tests, and waits for this file before it starts, does without.
    import torch
    import transformers

    config_class, model_class, own = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {}),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, TINY_MIXTRAL),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM, TINY_QWEN2_MOE),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY, **own, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases that do something
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models run faster on one thread, and tests may run beside each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(kind, **config fields)` gives a folder, made once for the same arguments."""
    made: dict[str, Path] = {}

    def make(kind: str = "llama", **fields: Any) -> Path:
        key = json.dumps([kind, fields], sort_keys=True)
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(kind), kind, **fields)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(checkpoint: Callable[..., Path]) -> Path:
    """The plain tiny Llama."""
    return checkpoint("llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, pulled into the user's cache where it is not there yet."""
    return pull(DEFAULT_MODEL, read_environment().cache_dir)
