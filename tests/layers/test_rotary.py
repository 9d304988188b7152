"""Rotary frequencies against transformers' for every type, in both spellings of the config."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hookline.errors import ModelConfigError
from hookline.layers.rotary import ROPE_TYPES, Rotary, read_rope

HEAD_DIM = 32
PAIRS = HEAD_DIM // 2
SCALINGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
        "long_factor": [1.5 + 0.3 * i for i in range(PAIRS)],
        "original_max_position_embeddings": 64,
    },
}


def fields(rope_type: str, **extra: object) -> dict[str, object]:
    params = {"rope_type": rope_type, "rope_theta": 5000.0, **SCALINGS[rope_type], **extra}
    return {"max_position_embeddings": 256, "rope_parameters": params}


def expected(hf_config: dict[str, object], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(hidden_size=2 * HEAD_DIM, num_attention_heads=2, head_dim=HEAD_DIM, **hf_config)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0, :, :PAIRS], sin[0, :, :PAIRS]


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("length", [40, 250, 400])
def test_equals_transformers_for_a_whole_prompt(rope_type: str, length: int) -> None:
    positions = torch.arange(length)
    rotary = Rotary(read_rope(fields(rope_type), HEAD_DIM), torch.device("cpu"))
    cos, sin = rotary(positions, torch.full((length,), length))
    want_cos, want_sin = expected(fields(rope_type), positions)
    torch.testing.assert_close(cos, want_cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, want_sin, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "extra", [{"attention_factor": 1.7}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"truncate": False}]
)
def test_yarn_options(extra: dict[str, object]) -> None:
    positions = torch.arange(300)
    cos, sin = Rotary(read_rope(fields("yarn", **extra), HEAD_DIM), torch.device("cpu"))(positions, None)
    want_cos, want_sin = expected(fields("yarn", **extra), positions)
    torch.testing.assert_close(cos, want_cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, want_sin, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_lengths_are_judged_token_by_token(rope_type: str) -> None:
    """Tokens of a short and a long request in one batch each keep the angles of their own length."""
    rotary = Rotary(read_rope(fields(rope_type), HEAD_DIM), torch.device("cpu"))
    positions = torch.tensor([3, 3])
    cos, _ = rotary(positions, torch.tensor([10, 300]))
    assert torch.equal(cos[0], rotary(positions[:1], torch.tensor([10]))[0][0])
    assert torch.equal(cos[1], rotary(positions[:1], torch.tensor([300]))[0][0])
    assert not torch.allclose(cos[0], cos[1])


def test_old_and_new_spellings_agree() -> None:
    old = {"max_position_embeddings": 256, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    assert read_rope(old, HEAD_DIM) == read_rope(fields("linear"), HEAD_DIM)


@pytest.mark.parametrize(
    ("hf_config", "named"),
    [
        (fields("default") | {"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        (fields("linear", factor=0), "factor"),
        (fields("linear", factor=float("nan")), "factor"),
        (fields("longrope", short_factor=[1.0]), "short_factor"),
        (fields("longrope", long_factor=None), "long_factor"),
        (fields("default") | {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        (fields("default") | {"max_position_embeddings": None}, "max_position_embeddings"),
        (fields("default", partial_rotary_factor=1.5), "partial_rotary_factor"),
    ],
)
def test_unsound_settings_are_refused_by_name(hf_config: dict[str, object], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read_rope(hf_config, HEAD_DIM)
