"""The reference shapes: what they weigh, and that a model of each can be built."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from hookline import Engine, EngineConfig, SamplingParams
from hookline.benchmark.products import model_products
from hookline.benchmark.shapes import find_shape
from hookline.checkpoint.random import RandomReader
from hookline.config import PluginOptions, SpeculativeConfig
from hookline.loading import OpenedModel, open_model
from tests.glm5_2.headers import tensors_of


def opened(name: str, **options: Any) -> OpenedModel:
    config = EngineConfig("x", load_format="random", device="cpu", dtype="bfloat16", **options)
    return open_model(config, RandomReader(find_shape(name, PluginOptions())))


@pytest.mark.parametrize(("layers", "name"), [(78, "glm-5.2"), (6, "glm-5.2-6l")])
@pytest.mark.parametrize("drafts", [None, 3])
def test_glm_has_the_published_weights(name: str, layers: int, drafts: int | None) -> None:
    """Counted from the published tensors; of the cut's layers the first three have an indexer."""
    speculative = None if drafts is None else SpeculativeConfig(num_speculative_tokens=drafts)
    found = dict(opened(name, speculative=speculative).model.checkpoint_shapes())
    expected = {
        name: shape
        for name, _, shape in tensors_of("bf16", layers)
        if drafts is not None or not name.startswith(f"model.layers.{layers}.")
    }
    assert found == expected
    if layers == 78:
        assert sum(map(prod, found.values())) == (743_377_019_904 if drafts is None else 753_329_940_480)


def test_products_of_the_cut() -> None:
    """Containers at full size, filled with tensors that have no memory."""
    products = {(product.name, product.n, product.k) for product in model_products(opened("glm-5.2-6l"))}
    assert products == {
        ("word_unembed", 154880, 6144),
        ("mlp_1", 2 * 12288, 6144),
        ("mlp_2", 6144, 12288),
        ("attn_out_w", 6144, 64 * 256),
        ("query_w", 64 * 256 + 32 * 128, 2048),
        ("query_w", 64 * 256, 2048),
        ("latent_w", 2048 + 576 + 128, 6144),
        ("latent_w", 2048 + 576, 6144),
        ("shared_mlp_1", 2 * 2048, 6144),
        ("shared_mlp_2", 6144, 2048),
        ("moe_gate", 256, 6144),
        ("index_weights_w", 32, 6144),
    }


def test_deepseek_can_be_built() -> None:
    count = sum(prod(shape) for _, shape in opened("deepseek-v3.2").model.checkpoint_shapes())
    assert 670e9 < count < 673e9


def test_the_tiny_shape_runs() -> None:
    shape = find_shape("tiny-glm5.2-mtp", PluginOptions())
    config = EngineConfig("x", load_format="random", device="cpu", max_model_len=128, kv_cache_memory=2**24)
    with Engine(config, reader=RandomReader(shape)) as engine:
        [result] = engine.generate([list(range(80))], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 4
