"""The frozen config of a Llama or Mistral checkpoint, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.errors import ModelConfigError
from hookline.layers.rotary import RopeConfig, read_rope
from hookline.model import TransformerConfig, read_count
from hookline_kernels.activation import GATED_ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """Beside the shapes: rotary settings, window, activation, and which projections have a bias."""

    rope: RopeConfig
    window: int | None
    activation: str
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool


def read_config(hf_config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ModelConfigError, naming the field, where the config is unsound or asks for what is not supported."""
    architecture = hf_config["architectures"][0]
    hidden_size = read_count(hf_config, "hidden_size")
    num_heads = read_count(hf_config, "num_attention_heads")
    num_kv_heads = read_count(hf_config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"num_attention_heads is {num_heads}, no multiple of num_key_value_heads, {num_kv_heads}",
            hint="Each key-value head must serve the same number of query heads.",
        )
    head_dim = read_count(hf_config, "head_dim", hidden_size // num_heads)
    activation = hf_config.get("hidden_act", "silu")
    if activation not in GATED_ACTIVATIONS:
        raise ModelConfigError(
            f"hidden_act is {activation!r}; known are {', '.join(sorted(GATED_ACTIVATIONS))}",
            hint="The model would give wrong text with another activation, so it is refused.",
        )
    eps = hf_config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ModelConfigError(f"rms_norm_eps is {eps!r}", hint="rms_norm_eps must be a small positive number.")
    return LlamaConfig(
        architecture=architecture,
        num_layers=read_count(hf_config, "num_hidden_layers", limit=10_000),
        hidden_size=hidden_size,
        vocab_size=read_count(hf_config, "vocab_size"),
        max_position_embeddings=read_count(hf_config, "max_position_embeddings"),
        dtype=hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read_count(hf_config, "intermediate_size"),
        norm_eps=float(eps),
        rope=read_rope(hf_config, head_dim),
        window=_window(hf_config, architecture),
        activation=activation,
        attention_bias=bool(hf_config.get("attention_bias", False)),
        mlp_bias=bool(hf_config.get("mlp_bias", False)),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _window(hf_config: Mapping[str, Any], architecture: str) -> int | None:
    """Mistral slides its window where the config names one; Llama never does."""
    if architecture != "MistralForCausalLM" or hf_config.get("sliding_window") is None:
        return None
    return read_count(hf_config, "sliding_window")
