"""The products of a model: every linear layer's shape once, the dearest first, and no memory taken; and their times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from hookline.benchmark.products import model_products, time_products
from hookline.checkpoint.random import RandomReader
from hookline.config import EngineConfig
from hookline.loading import OpenedModel, load_model, open_model
from tests.benchmark.conftest import tiny_config


def opened(**fields: Any) -> OpenedModel:
    return open_model(EngineConfig("m", device="cpu", dtype="bfloat16"), RandomReader(tiny_config(**fields)))


@pytest.mark.parametrize("tied", [False, True])
def test_each_shape_once_by_its_share_of_a_step(tied: bool) -> None:
    """Llama of 2 layers with M = 64, F = 112, 4 heads of 16 on 2, V = 320; a tied head is a product too."""
    found = model_products(opened(tie_word_embeddings=tied))
    assert [(one.name, one.kind, one.n, one.k) for one in found] == [
        ("mlp_1_w", "gated", 224, 64),
        ("word_unembed", "wide", 320, 64),
        ("qkv_w", "plain", 128, 64),
        ("mlp_2_w", "plain", 64, 112),
        ("attn_out_w", "plain", 64, 64),
    ]


def test_a_large_model_costs_nothing() -> None:
    """300 GB of weights, and biases, which are no products."""
    model = opened(hidden_size=16384, intermediate_size=53248, num_hidden_layers=30, attention_bias=True)
    assert len(model_products(model)) == 5
    assert all(
        tensor is None or tensor.device == torch.device("meta")
        for _, container in model.containers.containers()
        for tensor in (getattr(container, name) for name in container.parameter_names)
    )


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="needs a CUDA device"
            ),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_each_product_is_timed_with_the_models_own_weights(device: str) -> None:
    config = EngineConfig("m", device=device, dtype="bfloat16", load_format="random")
    model = load_model(config, RandomReader(tiny_config())).opened
    found = {one.name: one for one in time_products(model, 3)}
    assert list(found) == ["mlp_1_w", "word_unembed", "qkv_w", "mlp_2_w", "attn_out_w"]
    assert {name: (one.shape, one.rows, one.count) for name, one in found.items()} == {
        "mlp_1_w": ((224, 64), 3, 2),
        "word_unembed": ((320, 64), 3, 1),
        "qkv_w": ((128, 64), 3, 2),
        "mlp_2_w": ((64, 112), 3, 2),
        "attn_out_w": ((64, 64), 3, 2),
    }
    # Weight, input, and output: half as wide where the gate is applied, in fp32 for logits.
    assert found["mlp_1_w"].bytes == 2 * (224 * 64 + 3 * 64 + 3 * 112)
    assert found["word_unembed"].bytes == 2 * (320 * 64 + 3 * 64) + 4 * 3 * 320
    for one in found.values():
        assert 0.1 < one.microseconds < 1e5
        assert one.bytes_per_second == pytest.approx(1e6 * one.bytes / one.microseconds)
