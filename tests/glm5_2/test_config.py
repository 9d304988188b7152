"""The config of GLM-5.2 and DeepSeek-V3.2: what is read, what stands in for what is missing, what is refused.

Tests that begin with `pitfall` are named after faults of other implementations.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import transformers

from hookline.errors import ModelConfigError
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig, read_config
from hookline_glm5_2_mtp.shapes import DEEPSEEK_V32, GLM_5_2, TINY_GLM_5_2
from tests.glm5_2.headers import FULL, MTP_LAYER
from tests.glm5_2.models import GOLDEN_MODEL, SIZES

FIELDS: dict[str, Any] = SIZES | {"architectures": ["GlmMoeDsaForCausalLM"]}


def read(**fields: Any) -> GlmMoeDsaConfig:
    return read_config(FIELDS | fields)


def test_the_published_sizes() -> None:
    c = read_config(GLM_5_2)
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads) == (78, 6144, 64, 64)
    assert (c.latent_width, c.head_dim, c.v_head_dim, c.softmax_scale) == (576, 256, 256, 0.0625)
    assert (c.n_experts, c.n_top_k, c.routing.scale, c.routing.scoring) == (256, 8, 2.5, "sigmoid")
    assert c.routing.renormalize and (c.routing.num_groups, c.routing.top_groups) == (1, 1)
    assert c.sparse == (False,) * 3 + (True,) * 75
    assert (c.norm_eps, c.latent_norm_eps, c.rope.theta, c.rope.rotary_dim) == (1e-5, 1e-6, 8e6, 64)
    assert (c.index_n_heads, c.index_head_dim, c.index_topk) == (32, 128, 2048)
    assert c.rope_interleave and c.indexer_rope_interleave and c.num_mtp_layers == 1 and c.share_mtp_index
    assert (c.shared_intermediate_size, c.expert_intermediate_size) == (2048, 2048)


def test_pitfall_schedule_guessed() -> None:
    """0, 1, 2, 6, 10, ..., 74; not 0, 4, 8, ..."""
    c = read_config(GLM_5_2)
    assert {layer for layer, full in enumerate(c.full_index) if full} == FULL - {MTP_LAYER}
    assert sum(c.full_index) == 21
    assert [c.index_places[layer] for layer in (0, 2, 3, 6, 74, 77)] == [0, 2, None, 3, 20, None]


def test_indexer_types_come_before_the_pattern_and_that_before_the_rule() -> None:
    rule = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    assert read().full_index == (True,) * 4
    assert read(**rule).full_index == (True, False, True, False)
    assert read(**rule, index_topk_pattern="FFSS").full_index == (True, True, False, False)
    assert read(index_topk_pattern=["full", "shared", "full", "full"]).full_index == (True, False, True, True)
    types = ["full", "shared", "shared", "full"]
    assert read(**rule, index_topk_pattern="FFSS", indexer_types=types).full_index == (True, False, False, True)
    for fields in ({}, rule, {"index_topk_pattern": "FFSS"}, {"index_topk_freq": 3}):
        theirs = transformers.GlmMoeDsaConfig(**SIZES | fields).indexer_types
        assert read(**fields).full_index == tuple(kind == "full" for kind in theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["shared", "full", "full", "full"]},
        {"index_topk_pattern": "SFFF"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 0},
    ],
)
def test_layer_0_must_be_full(fields: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match="layer 0"):
        read(**fields)


def test_pitfall_default_of_the_missing_flag() -> None:
    """The indexer's rotary pairs are halves unless the config says otherwise, attention's are neighbours."""
    assert not read().indexer_rope_interleave and read().rope_interleave
    assert read(indexer_rope_interleave=True).indexer_rope_interleave
    assert not read(rope_interleave=False).rope_interleave


def test_a_list_is_shared_among_drafts_only_where_the_config_says_so() -> None:
    assert not read().share_mtp_index and not read(index_share_for_mtp_iteration=None).share_mtp_index
    assert read(index_share_for_mtp_iteration=True).share_mtp_index
    assert not read_config(DEEPSEEK_V32).share_mtp_index
    with pytest.raises(ModelConfigError, match="index_share_for_mtp_iteration"):
        read(index_share_for_mtp_iteration=1)


def test_pitfall_rope_theta_in_rope_parameters() -> None:
    nested = {"rope_type": "default", "rope_theta": 8e6}
    assert read(rope_parameters=nested).rope.theta == 8e6
    assert read(rope_parameters=nested, rope_theta=1e6).rope.theta == 8e6
    assert read(rope_theta=1e6).rope.theta == 1e6


@pytest.mark.parametrize("head_dim", [192, 64, 0, None, "wide"])
def test_pitfall_head_dim(head_dim: Any) -> None:
    """It is misleading in every checkpoint, and never used."""
    c = read(head_dim=head_dim)
    assert (c.head_dim, c.rope.rotary_dim, c.latent_width) == (24 + 16, 16, 48 + 16)
    assert c.softmax_scale == 40**-0.5


def test_key_value_heads_are_those_of_queries() -> None:
    assert read(num_key_value_heads=1).num_kv_heads == 4


def test_yarn_scales_scores_and_not_angles() -> None:
    c = read_config(DEEPSEEK_V32)
    m = 0.1 * math.log(40) + 1
    assert c.softmax_scale == pytest.approx(192**-0.5 * m * m) and m == pytest.approx(1.3689, abs=1e-4)
    assert c.rope.attention_factor == 1.0
    assert (c.routing.num_groups, c.routing.top_groups, c.num_layers) == (8, 4, 61)
    assert all(c.full_index) and not c.indexer_rope_interleave
    assert read_config(DEEPSEEK_V32 | {"rope_parameters": {"rope_type": "default"}}).softmax_scale == 192**-0.5


def test_old_spelling_of_yarn() -> None:
    params = dict(DEEPSEEK_V32["rope_parameters"])
    theta, kind = params.pop("rope_theta"), params.pop("rope_type")
    old = {name: value for name, value in DEEPSEEK_V32.items() if name != "rope_parameters"}
    old |= {"rope_theta": theta, "rope_scaling": params | {"type": kind}}
    assert read_config(old) == read_config(DEEPSEEK_V32)


def test_which_layers_have_experts() -> None:
    assert read().sparse == (False, True, True, True)
    assert read(first_k_dense_replace=0, moe_layer_freq=2).sparse == (True, False, True, False)
    assert read(mlp_layer_types=["sparse", "dense", "dense", "sparse"]).sparse == (True, False, False, True)


def test_the_tiny_shape_is_the_trained_model() -> None:
    assert read_config(json.loads((GOLDEN_MODEL / "config.json").read_text())) == read_config(TINY_GLM_5_2)


def test_block_size_of_quantised_weights() -> None:
    assert read().weight_block_size == (128, 128)
    assert read(quantization_config={"weight_block_size": [32, 64]}).weight_block_size == (32, 64)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": "16"}, "qk_rope_head_dim"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim"),
        ({"v_head_dim": -1}, "v_head_dim"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_head_dim": 8}, "index_head_dim is 8, less than qk_rope_head_dim, 16"),
        ({"index_n_heads": None}, "index_n_heads"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "indexer_types"),
        ({"index_topk_pattern": "FFF"}, "index_topk_pattern"),
        ({"index_topk_freq": "4"}, "index_topk_freq"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"n_routed_experts": 0}, "n_routed_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than n_routed_experts, 8"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 4, "topk_group": 1}, "topk_group"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": "1"}}, "mscale_all_dim"),
        ({"indexer_types": [["full"], "full", "full", "full"]}, "indexer_types"),
        ({"indexer_rope_interleave": "yes"}, "indexer_rope_interleave"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"quantization_config": {"weight_block_size": [128]}}, "weight_block_size"),
        ({"hidden_act": "relu6"}, "hidden_act"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        read(**fields)
