"""The products of a model: every linear layer's shape once, the dearest first, and no memory taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.benchmark.products import model_products
from hookline.checkpoint.random import RandomReader
from hookline.config import EngineConfig
from hookline.loading import OpenedModel, open_model
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
