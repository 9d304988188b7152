"""How Llama checkpoints of each format become the names and values that the containers declare.

A safetensors folder already has them. A GGUF file has names of its own, and the rows of its query and key
projections stand in the order of interleaved rotary pairs; the model rotates halves, so they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from hookline.errors import CheckpointError
from hookline.weight_adapter import LazyTensor, WeightAdapter
from hookline_llama.config import LlamaConfig

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Factors of the rotary frequencies: the reader has put them into the config's rope settings.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class GgufAdapter(WeightAdapter):
    """From GGUF's names and row order."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config

    def adapt(self, tensor: LazyTensor) -> Iterable[LazyTensor]:
        if tensor.name in _IN_CONFIG:
            return ()
        if tensor.name in _TOP:
            return (tensor.renamed(_TOP[tensor.name]),)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in _LAYER:
            raise CheckpointError(
                f"The GGUF tensor {tensor.name!r} is none that a Llama model has",
                hint="The file may be of another architecture, or made by a newer converter.",
            )
        renamed = tensor.renamed(f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}")
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(match[2])
        return (renamed.mapped(lambda rows: halves_from_pairs(rows, heads)) if heads else renamed,)


def halves_from_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pair order (0, D/2, 1, D/2 + 1, ...) back to half order (0, 1, ..., D - 1).

    `rows` is [heads * D, M], or a bias [heads * D].
    """
    pairs = rows.shape[0] // heads // 2
    return rows.view(heads, pairs, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def build_adapter(config: LlamaConfig, weights_format: str) -> WeightAdapter:
    """The adapter for `weights_format`."""
    return GgufAdapter(config) if weights_format == "gguf" else WeightAdapter()
