"""A GGUF file's metadata as the fields of `config.json`, generically: no model is known by name here.

The architecture is `gguf.` and the file's `general.architecture`; a plugin that serves GGUF files claims that name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf.constants import GGMLQuantizationType

from hookline.checkpoint.gguf_header import GgufHeader
from hookline.errors import CheckpointError

ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_FIELDS = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "attention.sliding_window": "sliding_window",
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "leading_dense_block_count": "first_k_dense_replace",
        "nextn_predict_layers": "num_nextn_predict_layers",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_ROPE_FIELDS = MappingProxyType(
    {
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.attn_factor": "attention_factor",
        "rope.scaling.yarn_attn_factor": "attention_factor",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
)
_TOKEN_IDS = MappingProxyType(
    {
        "bos_token_id": ("bos",),
        "eos_token_id": ("eos", "eot", "eom"),
        "pad_token_id": ("padding",),
    }
)


def hf_config(path: Path, header: GgufHeader, rope_factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The fields of `config.json` that the metadata tells.

    Args:
        path: named in errors.
        header: of the file.
        rope_factors: values of the tensors in ROPE_FACTORS that the file has.

    Raises:
        CheckpointError: naming the metadata field that is missing or unsound.
    """
    fields = header.fields
    name = fields.get("general.architecture")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_.-]+", name):
        raise CheckpointError(f"{path}: general.architecture is {str(name)[:80]!a}")
    if fields.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {fields['split.count']} parts", hint="Join them with llama-gguf-split --merge."
        )
    config: dict[str, Any] = {"architectures": [f"gguf.{name}"], "model_type": name}
    for key, field in _FIELDS.items():
        value = fields.get(f"{name}.{key}")
        if value is not None:
            config[field] = _uniform(value)
    for field in _REQUIRED:
        value = config.get(field)
        if type(value) not in (int, list):
            key = next(key for key, other in _FIELDS.items() if other == field)
            raise CheckpointError(f"{path}: the metadata field {name}.{key} is {value!r}, not a whole number")
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if type(heads) is int and heads > 0:
        config.setdefault("head_dim", config["hidden_size"] // heads)
    names = {tensor.name: tensor for tensor in header.tensors}
    config["vocab_size"] = _vocab_size(path, header, name)
    config["tie_word_embeddings"] = "output.weight" not in names
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    config["rope_parameters"] = _rope_parameters(path, fields, name, config, rope_factors)
    config["dtype"] = _dtype(header)
    return config | generation_config(fields)


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """BOS, EOS and padding ids; several EOS ids where the file tells of an end of turn or of message too."""
    result: dict[str, Any] = {}
    for field, kinds in _TOKEN_IDS.items():
        values = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        ids = list(dict.fromkeys(value for value in values if type(value) is int))
        if ids:
            result[field] = ids[0] if len(ids) == 1 else ids
    return result


def _uniform(value: Any) -> Any:
    """One number for a list of equal ones: some writers repeat a size for every layer."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _vocab_size(path: Path, header: GgufHeader, name: str) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    tokens = header.fields.get("tokenizer.ggml.tokens")
    size = header.fields.get(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else None)
    if type(size) is not int or size < 1:
        raise CheckpointError(f"{path} does not tell the size of its vocabulary")
    return size


def _dtype(header: GgufHeader) -> str:
    """The 16-bit type that most bytes are in, else float32 (which quantised tensors become)."""
    sizes = dict.fromkeys(("float16", "bfloat16", "float32"), 0)
    known = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
    for tensor in header.tensors:
        sizes[known.get(tensor.type, "float32")] += tensor.nbytes
    best = max(sizes, key=lambda kind: sizes[kind])
    return best if sizes[best] > sizes["float32"] else "float32"


def _rope_parameters(
    path: Path, fields: Mapping[str, Any], name: str, config: Mapping[str, Any], factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    theta = fields.get(f"{name}.rope.freq_base", 10000.0)
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise CheckpointError(f"{path}: the metadata field {name}.rope.freq_base is {theta!r}")
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated, head = fields.get(f"{name}.rope.dimension_count"), config.get("head_dim")
    if type(rotated) is int and type(head) is int and 0 < rotated < head:
        result["partial_rotary_factor"] = rotated / head
    for key, field in _ROPE_FIELDS.items():
        value = fields.get(f"{name}.{key}")
        if value is not None:
            result[field] = value
    kind = fields.get(f"{name}.rope.scaling.type", "none")
    result["rope_type"] = "default" if kind == "none" else kind
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        result |= {
            "rope_type": "longrope",
            "long_factor": list(factors["rope_factors_long.weight"]),
            "short_factor": list(factors["rope_factors_short.weight"]),
        }
    elif "rope_freqs.weight" in factors:
        result |= _llama3_parameters(path, factors["rope_freqs.weight"], theta)
    return result


def _llama3_parameters(path: Path, factors: Sequence[float], theta: float) -> dict[str, Any]:
    """The parameters of `llama3` rope scaling from the factors that converters write in their place.

    With w the wavelength of a frequency: factor = 1 / ((1 - s) / F + s), s = (C / w - low) / (high - low) cut to 0..1.
    s is linear in 1 / w, so two points between the ends give slope and intercept. They fix C, low and high but for a
    common scale, which leaves the factors as they are; low = 1 is what every known model has.
    """
    fault = CheckpointError(f"{path}: rope_freqs.weight does not follow the llama3 formula")
    if not all(1.0 <= factor < math.inf for factor in factors):
        raise fault
    scale = max(factors)
    inverse_wavelengths = [theta ** (-i / len(factors)) / (2 * math.pi) for i in range(len(factors))]
    between = [i for i, factor in enumerate(factors) if 1.0 < factor < scale]
    if scale == 1.0:
        return {}
    if len(between) < 2:
        raise fault
    smooth = [(1 / factors[i] - 1 / scale) / (1 - 1 / scale) for i in (between[0], between[-1])]
    first, last = inverse_wavelengths[between[0]], inverse_wavelengths[between[-1]]
    slope = (smooth[0] - smooth[1]) / (first - last)
    intercept = slope * first - smooth[0]
    if slope <= 0 or not 1e-3 < intercept < 1e3:
        raise fault
    high = round(1 + 1 / intercept, 3)
    original = round(slope * (high - 1))
    for factor, inverse in zip(factors, inverse_wavelengths, strict=True):
        share = min(1.0, max(0.0, (original * inverse - 1) / (high - 1)))
        if abs((1 - share) / scale + share - 1 / factor) > 1e-4:
            raise fault
    return {
        "rope_type": "llama3",
        "factor": scale,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
