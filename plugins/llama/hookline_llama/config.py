"""The frozen config of a Llama or Mistral checkpoint, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.errors import ModelConfigError
from hookline.layers.rotary import RopeConfig, read_rope
from hookline.model import TransformerConfig, read_activation, read_count, read_flag, read_transformer_fields


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
    _check_dense(hf_config)
    fields = read_transformer_fields(hf_config)
    return LlamaConfig(
        **fields,
        rope=read_rope(hf_config, fields["head_dim"]),
        window=_window(hf_config, fields["architecture"]),
        activation=read_activation(hf_config),
        attention_bias=read_flag(hf_config, "attention_bias"),
        mlp_bias=read_flag(hf_config, "mlp_bias"),
        tied_embeddings=read_flag(hf_config, "tie_word_embeddings"),
    )


def _check_dense(hf_config: Mapping[str, Any]) -> None:
    """GGUF files of mixtures of experts call themselves `llama` too."""
    experts = hf_config.get("num_local_experts")
    if experts:
        raise ModelConfigError(
            f"num_local_experts is {str(experts)[:80]}: a mixture of experts, and Llama has one MLP a layer",
            hint="Of such a model the safetensors checkpoint is served, by the plugin of its own architecture.",
        )


def _window(hf_config: Mapping[str, Any], architecture: str) -> int | None:
    """Mistral slides its window where the config names one; Llama never does."""
    if architecture != "MistralForCausalLM" or hf_config.get("sliding_window") is None:
        return None
    return read_count(hf_config, "sliding_window")
