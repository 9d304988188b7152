"""The products that a model's weights are for: found from their shapes, without a weight read or made; and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from hookline.benchmark.costs import containers
from hookline.benchmark.machine import synchronize
from hookline.loading import OpenedModel
from hookline.parameter_base import Parameter
from hookline.parameters import (
    EmbeddingParameter,
    FusedGatedMLPParameter,
    GatedMLPParameter,
    MLP1Parameter,
    MLP2Parameter,
    MoEGatingWeightParameter,
    UnembedParameter,
)
from hookline_kernels.activation import GATED_ACTIVATIONS
from hookline_kernels.linear import linear, linear_gated
from hookline_kernels.tune_linear import Product

Key = TypeVar("Key", bound=Hashable)

_GATED = (GatedMLPParameter, FusedGatedMLPParameter)
_WIDE = (UnembedParameter, MoEGatingWeightParameter)
_MLP = (*_GATED, MLP1Parameter, MLP2Parameter)

# Least seconds of one timing, reckoned at this many bytes a second.
_TIMED_SECONDS, _GPU_SPEED, _CPU_SPEED = 2e-3, 4e12, 2e10
_REPEATS = 5


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
    found: dict[Product, list[torch.Tensor]] = {}
    for _, _, product, weight in _matrices(opened):
        found.setdefault(product, []).append(weight)
    return tuple(_by_bytes(found))


@dataclass(frozen=True, slots=True)
class ProductTime:
    """One product, timed alone.

    Attributes:
        name: of its parameter.
        shape: of the weight, [N, K].
        rows: of its input.
        count: how many a step has.
        bytes: of one weight, its input and its output.
        microseconds: of one.
    """

    name: str
    shape: tuple[int, int]
    rows: int
    count: int
    bytes: int
    microseconds: float

    @property
    def bytes_per_second(self) -> float:
        """At which the product's operands passed."""
        return self.bytes / self.microseconds * 1e6


@torch.inference_mode()
def time_products(opened: OpenedModel, requests: int, drafts: int = 0) -> list[ProductTime]:
    """Each product of a decode step of a loaded model, as the engine chooses to compute it, by its bytes in the step.

    Layer after layer takes its turn, so that a weight comes from memory and not from a cache, unless all weights of a
    shape fit into one. On a GPU the calls are in a CUDA graph. A step that verifies drafts has products of all its rows
    and, where the draft is the model's own, products of one row a request.

    Args:
        drafts: that the step verifies of each request.
    """
    model, activation = opened.model, getattr(opened.config, "activation", "silu")
    calls: dict[tuple[int, Product], list[torch.Tensor]] = {}
    for is_draft, kind, product, weight in _matrices(opened):
        for rows, times in _passes(opened, is_draft, kind, requests, drafts):
            if times and weight.dtype == model.dtype:
                calls.setdefault((rows, product), []).extend([weight] * times)
    found = []
    for (rows, product), weights in _by_bytes(calls).items():
        x = torch.randn(rows, product.k, device=model.device, dtype=model.dtype)
        call = _call(product.kind, x, activation if activation in GATED_ACTIVATIONS else "silu")
        y = call(weights[0])
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (weights[0], x, y))
        microseconds = _microseconds(call, weights, nbytes, model.device)
        found.append(ProductTime(product.name, (product.n, product.k), rows, len(weights), nbytes, microseconds))
    return found


def _passes(
    opened: OpenedModel, is_draft: bool, kind: type[Parameter], requests: int, drafts: int
) -> Sequence[tuple[int, int]]:
    """Rows and number of a step's products with one weight: the draft's first pass runs all rows up to its MLP."""
    every = requests * (1 + drafts)
    if not is_draft:
        proposes = opened.model.proposer is not None and issubclass(kind, UnembedParameter)
        return (every, 1), (requests, drafts if proposes else 0)
    if issubclass(kind, _MLP) or kind is MoEGatingWeightParameter:
        return ((requests, drafts),)
    return (every, min(1, drafts)), (requests, max(0, drafts - 1))


def _matrices(opened: OpenedModel) -> Iterator[tuple[bool, type[Parameter], Product, torch.Tensor]]:
    """The matrices of all linear layers: whether it is the draft's, its kind, its product. Packed ones are left out.

    Products of one kind and shape are one, under the name of the first.
    """
    known: dict[tuple[str, int, int], Product] = {}
    for is_draft, container in containers(opened):
        for name, kind in container.parameter_kinds.items():
            tensor: torch.Tensor | None = getattr(container, name)
            if tensor is not None and tensor.dim() == 2 and not issubclass(kind, EmbeddingParameter):
                key = (_kind(kind), tensor.shape[0], tensor.shape[1])
                yield is_draft, kind, known.setdefault(key, Product(name, *key)), tensor


def _by_bytes(found: Mapping[Key, list[torch.Tensor]]) -> dict[Key, list[torch.Tensor]]:
    """The same, those with the most weights first."""
    order = sorted(found, key=lambda key: -sum(weight.numel() for weight in found[key]))
    return {key: found[key] for key in order}


def _kind(kind: type[Parameter]) -> str:
    if issubclass(kind, _WIDE):
        return "wide"
    return "gated" if issubclass(kind, _GATED) else "plain"


def _call(kind: str, x: torch.Tensor, activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(weight: torch.Tensor) -> torch.Tensor:
        if kind == "gated":
            return linear_gated(x, weight, None, activation)
        return linear(x, weight, wide=kind == "wide")

    return call


def _microseconds(
    call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], nbytes: int, device: torch.device
) -> float:
    """Of one call, the median of some runs through many."""
    least = _TIMED_SECONDS * (_CPU_SPEED if device.type == "cpu" else _GPU_SPEED) / nbytes
    calls = len(weights) * max(1, min(100, -(-int(least) // len(weights))))

    def run() -> None:
        for number in range(calls):
            call(weights[number % len(weights)])

    times = _time_graph(run, device) if device.type == "cuda" else _time_calls(run, device)
    return median(times) / calls


def _time_calls(run: Callable[[], None], device: torch.device) -> list[float]:
    """Microseconds of some runs by the clock."""
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def _time_graph(run: Callable[[], None], device: torch.device) -> list[float]:
    """Microseconds of some replays of a graph by the device's own clock; the first is not counted."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    synchronize(device)
    with torch.cuda.stream(stream):
        run()  # compiles what is not compiled, outside of the graph
        stream.synchronize()
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 2)]  # type: ignore[no-untyped-call]
        for mark in marks:
            graph.replay()
            mark.record()
    stream.synchronize()
    return [1e3 * marks[number].elapsed_time(marks[number + 1]) for number in range(1, _REPEATS + 1)]
