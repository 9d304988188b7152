"""The products that a model's weights are for, found from their shapes: no weight is read, and none is made."""

from __future__ import annotations

from collections import Counter

import torch

from hookline.loading import OpenedModel
from hookline.parameter_base import Parameter
from hookline.parameters import EmbeddingParameter, FusedGatedMLPParameter, GatedMLPParameter, UnembedParameter
from hookline_kernels.tune_linear import Product

_GATED = (GatedMLPParameter, FusedGatedMLPParameter)


def model_products(opened: OpenedModel) -> tuple[Product, ...]:
    """Every matrix [N, K] of the model that a linear layer multiplies with, by the time that a step spends on it.

    Each shape is there once, under the name of its parameter. Embeddings are looked up and experts have a kernel of
    their own, so neither is among them; a head that is tied to the embedding is.

    Args:
        opened: a model without weights, of no use afterwards: it is filled with tensors that have no memory.
    """
    model = opened.model
    model.device = torch.device("meta")
    for name, shape in model.checkpoint_shapes():
        opened.containers.map_param(name, torch.empty(shape, dtype=model.dtype, device=model.device))
    opened.containers.validate()
    names: dict[tuple[str, int, int], str] = {}
    spent = Counter[tuple[str, int, int]]()
    for _, container in opened.containers.containers():
        for name, kind in container.parameter_kinds.items():
            tensor: torch.Tensor | None = getattr(container, name)
            if tensor is None or tensor.dim() != 2 or issubclass(kind, EmbeddingParameter):
                continue
            key = (_kind(kind), tensor.shape[0], tensor.shape[1])
            names.setdefault(key, name)
            spent[key] += tensor.numel()
    return tuple(Product(names[key], *key) for key, _ in spent.most_common())


def _kind(kind: type[Parameter]) -> str:
    if issubclass(kind, UnembedParameter):
        return "wide"
    return "gated" if issubclass(kind, _GATED) else "plain"
