"""What a loaded model costs: its parameters sorted by what a token does with them, and its cache."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch

from hookline.benchmark.roofline import ModelCosts
from hookline.container import LayerContainer
from hookline.loading import OpenedModel
from hookline.parameter_base import Parameter
from hookline.parameters import (
    EmbeddingParameter,
    FusedMoEGatedMLPParameter,
    FusedMoEMLP2Parameter,
    TransposedFusedMoEGatedMLPParameter,
    TransposedFusedMoEMLP2Parameter,
    UnembedParameter,
    UnfusedMoEGatedMLPParameter,
    UnfusedMoEMLP1Parameter,
    UnfusedMoEMLP2Parameter,
)
from hookline_kernels.packed import is_packed, unpacked_shape

_EXPERTS = (
    *(UnfusedMoEMLP1Parameter, UnfusedMoEMLP2Parameter, UnfusedMoEGatedMLPParameter),
    *(FusedMoEGatedMLPParameter, FusedMoEMLP2Parameter),
    *(TransposedFusedMoEGatedMLPParameter, TransposedFusedMoEMLP2Parameter),
)


def model_costs(opened: OpenedModel) -> ModelCosts:
    """The costs of a model whose weights are in place.

    The kind of each parameter tells its role: embeddings are looked up, so they count only where the head is tied to
    them; experts are read as the router chooses. Experts need `n_experts` and `n_top_k` on the model or its config;
    without them all are counted, as if every one were read. The draft's layers stand apart, and cache groups whose
    names begin with `draft` are theirs.
    """
    target = _costs(opened, is_draft=False)
    return dataclasses.replace(target, draft=_costs(opened, is_draft=True)) if opened.model.proposer else target


def expert_tensors(opened: OpenedModel, is_draft: bool = False) -> Iterator[torch.Tensor]:
    """The parameters of a loaded model, of its target or of its draft, that hold experts."""
    yield from (tensor for role, tensor in _tensors(opened, is_draft) if role == "expert")


def containers(opened: OpenedModel) -> Iterator[tuple[bool, LayerContainer]]:
    """Every container, and whether it is of the draft: those have the numbers behind the target's layers."""
    last = opened.model.shapes.num_layers
    for name, container in opened.containers.containers():
        number = name.rpartition(".")[2]
        yield number.isdigit() and int(number) >= last, container


def _costs(opened: OpenedModel, is_draft: bool) -> ModelCosts:
    """Of the target, or of the draft's own layers."""
    bytes_of, weights_of = _by_role(opened, is_draft)
    model = opened.model
    shapes = model.shapes
    num_experts, per_token = (_count(opened, name) for name in ("n_experts", "n_top_k"))
    if not num_experts or not per_token:
        num_experts = per_token = 1 if bytes_of["expert"] else 0
    cache = {
        spec.name: spec.bytes_per_token() for spec in model.cache_specs() if spec.name.startswith("draft") == is_draft
    }
    listed = _count(opened, "index_topk")
    return ModelCosts(
        layer_bytes=bytes_of["layer"],
        layer_weights=weights_of["layer"],
        head_bytes=bytes_of["head"],
        head_weights=weights_of["head"],
        cache_bytes=sum(cache.values()),
        attention_width=0 if is_draft else model.heads.num_heads * shapes.head_dim * shapes.num_layers,
        expert_bytes=bytes_of["expert"],
        expert_weights=weights_of["expert"],
        num_experts=num_experts,
        experts_per_token=per_token,
        listed_bytes=sum(size for name, size in cache.items() if "index" not in name) if listed else 0,
        list_length=listed,
    )


def _by_role(opened: OpenedModel, is_draft: bool) -> tuple[Counter[str], Counter[str]]:
    """Bytes, and numbers of weights, of each role."""
    bytes_of, weights_of = Counter[str](), Counter[str]()
    for role, tensor in _tensors(opened, is_draft):
        bytes_of[role] += tensor.numel() * tensor.element_size()
        weights_of[role] += _num_weights(tensor)
    return bytes_of, weights_of


def _tensors(opened: OpenedModel, is_draft: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the target or of the draft, with its role."""
    for own, container in containers(opened):
        for name, kind in container.parameter_kinds.items():
            tensor: torch.Tensor | None = getattr(container, name)
            if tensor is not None and own == is_draft:
                yield _role(kind), tensor


def _role(kind: type[Parameter]) -> str:
    if issubclass(kind, EmbeddingParameter):
        return "embedding"
    if issubclass(kind, UnembedParameter):
        return "head"
    return "expert" if issubclass(kind, _EXPERTS) else "layer"


def _num_weights(tensor: torch.Tensor) -> int:
    if not is_packed(tensor):
        return tensor.numel()
    rows, inner = unpacked_shape(tensor.shape[-3:])
    return tensor.shape[:-3].numel() * rows * inner


def _count(opened: OpenedModel, name: str) -> int:
    value = getattr(opened.model, name, getattr(opened.config, name, 0))
    return value if isinstance(value, int) else 0
