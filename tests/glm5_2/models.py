"""Tiny random models of transformers' own making, and what they and the engine compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hookline import Engine, EngineConfig
from tests.conftest import TINY, write_tokenizer

GOLDEN_MODEL = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp"
GOLDEN_FP8 = Path(__file__).parents[1] / "data" / "tiny-glm5.2-mtp-fp8"

# Every size differs from the others, so that none can stand in for another.
SIZES: dict[str, Any] = TINY | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "q_lora_rank": 56,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    # With few heads a score is often exactly 0, of none being positive, and equal scores may be chosen either way.
    "index_n_heads": 14,
    "index_head_dim": 28,
    "index_topk": 16,
}
GLM: dict[str, Any] = {"indexer_rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 8e4}}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Contexts of the tests have up to about 110 tokens: longer than the list in all but one.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", {"indexer_types": ["full", "full", "shared", "shared"]}),
    "glm all full": ("glm", {"index_topk": 24, "first_k_dense_replace": 2}),
    "glm frequency": ("glm", {"index_topk_freq": 2, "index_skip_topk_offset": 2, "n_shared_experts": 2}),
    "glm short": ("glm", {"index_topk": 256, "indexer_types": ["full", "shared", "full", "shared"]}),
    "deepseek": ("deepseek", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek yarn groups": ("deepseek", {"rope_parameters": YARN, "n_group": 4, "topk_group": 2}),
}


def make_model(name: str, seed: int = 0, **fields: Any) -> transformers.PreTrainedModel:
    """The variant `name` with other fields, all norms and biases doing something."""
    kind, own = VARIANTS[name]
    config_class, model_class = {
        "glm": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
        "deepseek": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **(GLM if kind == "glm" else {}), **own, **fields}))
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in parameter_name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1 and "inv_freq" not in parameter_name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed_tokens" in parameter_name:
                parameter.mul_(4)
            elif "indexer" in parameter_name:
                parameter.mul_(2)
            elif parameter_name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.3)
    return model.eval()


def save_model(folder: Path, name: str, **fields: Any) -> Path:
    """`make_model` as a checkpoint."""
    make_model(name, **fields).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def config_of(folder: Path | str, **options: Any) -> EngineConfig:
    """Options of a small engine in fp32 on the CPU."""
    known: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_memory": 2**21}
    return EngineConfig(str(folder), **known | {"max_model_len": 256} | options)


@torch.inference_mode()
def logits_of(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits [T, V] of all rows of some prompts, in one forward pass of the engine's model."""
    from hookline.execution.kv_cache import allocate_cache
    from hookline.model import ForwardBatch

    model, block = engine.loaded.opened.model, 8
    lengths = [len(ids) for ids in prompts]
    blocks = [-(-length // block) for length in lengths]
    tables = torch.zeros((len(prompts), max(blocks)), dtype=torch.int32)
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).int() + 1
    slots, first = [], 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[first : first + count]
        place = torch.arange(length)
        slots.append(tables[row].long()[place // block] * block + place % block)
        first += count
    cache = allocate_cache(model.cache_specs(), sum(blocks) + 2, block, torch.device("cpu"))
    for group in cache.values():
        for layer in group:
            for tensor in layer.values():
                tensor.fill_(torch.nan)
    total = sum(lengths)
    hidden = model.forward(
        ForwardBatch(
            token_ids=torch.tensor([token for ids in prompts for token in ids]),
            positions=torch.cat([torch.arange(length) for length in lengths]),
            slots=torch.cat(slots),
            block_tables=tables,
            query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            logits_rows=torch.arange(total),
            num_decodes=0,
            max_query_len=max(lengths),
            max_context_len=max(lengths),
            rope_lengths=None,
            cache=cache,
        )
    )
    return list(model.compute_logits(hidden).split(lengths))
