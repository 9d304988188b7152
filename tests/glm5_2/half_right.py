"""A small GLM-5.2 with random weights whose draft is about as often right as a trained one's.

What follows a token is mostly said by the token itself, for the target and the draft alike; attention and experts
change it often enough that drafts are wrong too, and that a wrong entry of the cache shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hookline import EngineConfig
from hookline.checkpoint.random import RandomReader
from hookline.config import SpeculativeConfig
from hookline.loading import open_model
from tests.conftest import write_tokenizer
from tests.glm5_2.drafting import FIELDS

SMALL: dict[str, Any] = FIELDS | {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 258,
}
# By the end of a name: what a weight's values, which have a deviation of 0.02, are multiplied with.
FACTORS = {
    "embed_tokens.weight": 30.0,
    "lm_head.weight": 22.0,
    "mlp.gate.weight": 15.0,
    "o_proj.weight": 0.5,
    "down_proj.weight": 0.5,
}
OTHERS = 7.5


def save_half_right(folder: Path) -> Path:
    """Writes the checkpoint, with the byte-level tokenizer of the tests."""
    options = EngineConfig(
        "random", device="cpu", dtype="float32", load_format="random", speculative=SpeculativeConfig()
    )
    tensors: dict[str, torch.Tensor] = {}
    for tensor in open_model(options, RandomReader(SMALL)).reader.tensors():
        value = tensor.load()
        if value.dim() == 2:
            value *= next((factor for end, factor in FACTORS.items() if tensor.name.endswith(end)), OTHERS)
        if tensor.name.endswith("eh_proj.weight"):  # takes the token's embedding as it is, and little of the state
            size = len(value)
            value = torch.cat([torch.eye(size), value[:, size:] / OTHERS], dim=1)
        tensors[tensor.name] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SMALL))
    write_tokenizer(folder)
    return folder
