"""Containers: how weights are declared, and how a checkpoint's tensors find their way into them.

A `Parameter` says which tensors it is made from and how; a `LayerContainer` says which parameters a layer has and under
which checkpoint names their tensors come; a `ContainerMap` says which prefix belongs to which container.

    class UnfusedQKVParameter(Parameter):
        q_params: torch.Tensor                       # a dependency; `torch.Tensor | None`: may be missing
        k_params: torch.Tensor
        v_params: torch.Tensor

        def finalize(self) -> torch.Tensor | None:   # runs once, when all are there; then they are freed
            return self.model.transform_qkv_param(torch.cat([self.q_params, self.k_params, self.v_params]))

    class UnfusedMoEMLP2Parameter(Parameter):
        experts = ParamList("n_experts")             # as many tensors as model.n_experts or model.config.n_experts

    class LlamaLayer(LayerContainer):
        qkv_w: UnfusedQKVParameter                   # `layer.qkv_w` is a torch.Tensor once it is final
        qkv_b: UnfusedQKVParameter | None            # `layer.qkv_b` is a torch.Tensor | None

        PARAM_MAPPING = {"self_attn.q_proj.weight": "qkv_w.q_params", ...}
        PRESENT_IF = {"qkv_b": "attention_bias"}     # required if that flag of the config is true, dropped if false

    class LlamaNonTransformer(LayerContainer):
        word_emb: EmbeddingParameter
        word_unembed: UnembedParameter

        PARAM_MAPPING = {"model.embed_tokens.weight": "word_emb.params", "lm_head.weight": "word_unembed.params"}
        TIED = {"word_unembed.params": "word_emb.params"}        # a missing tensor is the other's
        PRESENT_IF = {"word_unembed": "not tie_word_embeddings"}  # the config decides, not what the file holds

    weights = ContainerMap()
    weights.set_transformer_params("model.layers", [LlamaLayer(model) for _ in range(config.num_layers)])
    weights.set_non_transformer_params(LlamaNonTransformer(model))
    weights.set_unmapped_params("model.layers.*.self_attn.rotary_emb.inv_freq")
    for name, tensor in checkpoint:
        weights.map_param(name, tensor)
    weights.validate()                               # names everything that is missing

docs/containers.md has the mapping language in full; core/parameters.py has the common parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hookline.declarations import Target
from hookline.errors import ContainerError
from hookline.layer_container import WAYS_OUT, LayerContainer
from hookline.parameter_base import Parameter, ParamList

if TYPE_CHECKING:
    from hookline.weight_adapter import LazyTensor

__all__ = ["Audit", "ContainerMap", "LayerContainer", "ParamList", "Parameter"]


@dataclass(frozen=True, slots=True)
class Audit:
    """What a checkpoint's names are to a mapping.

    Attributes:
        matched: how many tensors have a place.
        missing: checkpoint names that the containers require and the checkpoint lacks.
        unexpected: names that no row maps.
        duplicate: names whose place another tensor of the checkpoint takes already.
        dropped: names left out on purpose.
    """

    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    duplicate: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every tensor has its place, and every place its tensor."""
        return not (self.missing or self.unexpected or self.duplicate)

    def report(self, limit: int = 20) -> str:
        """What is wrong, a line a kind, each with up to `limit` names."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("duplicate", self.duplicate))
        lines = [f"{self.matched} tensors match the mapping"]
        for kind, names in kinds:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            lines += [f"{len(names)} {kind}: {', '.join(names[:limit])}{more}"] if names else []
        return "\n".join(lines)


_NON_TRANSFORMER = "non_transformer"


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers, and the prefixes that their names may have."""

    prefixes: tuple[str, ...]
    containers: tuple[LayerContainer, ...]

    def paths(self, prefix: str) -> dict[LayerContainer, str]:
        """What stands before each layer's names in a checkpoint that uses `prefix`."""
        return {container: f"{prefix}.{index}." for index, container in enumerate(self.containers)}


class ContainerMap:
    """Which prefix of a checkpoint's names belongs to which container. Prefixes match whole dotted components."""

    def __init__(self) -> None:
        self._stacks: dict[str, _Stack] = {}
        self._by_prefix: dict[str, _Stack] = {}
        self._non_transformer: LayerContainer | None = None
        self._unmapped: list[list[str]] = []

    def set_transformer_params(
        self, prefixes: str | Sequence[str], containers: Sequence[LayerContainer], name: str = ""
    ) -> None:
        """Add a stack of layers: the tensors of `containers[i]` are named `prefix.i.` and what its mapping says.

        Args:
            prefixes: one, or several that checkpoints of the architecture use in turn.
            containers: one a layer.
            name: what `containers()` calls the stack; `layers`, `layers_1` and so on unless given.
        """
        stack = _Stack(_checked_prefixes(prefixes), _checked_layers(containers))
        if not stack.prefixes:
            raise ContainerError("a stack of layers needs a prefix", hint="Write for instance model.layers.")
        name = name or (f"layers_{len(self._stacks)}" if self._stacks else "layers")
        taken = [prefix for prefix in stack.prefixes if prefix in self._by_prefix]
        if taken or name in self._stacks or name == _NON_TRANSFORMER:
            raise ContainerError(f"{(taken or [name])[0]!r} names a stack of layers already")
        self._check_unused(stack.containers)
        self._stacks[name] = stack
        self._by_prefix |= dict.fromkeys(stack.prefixes, stack)
        for container, path in stack.paths(stack.prefixes[0]).items():
            container.path = path

    def set_non_transformer_params(self, container: LayerContainer) -> None:
        """Set the container of what is in no layer; its mapping holds full checkpoint names."""
        if self._non_transformer is not None:
            raise ContainerError("the non-transformer container is set already", hint="Put all such rows in one.")
        self._check_unused(_checked_layers([container]))
        self._non_transformer = container

    def set_unmapped_params(self, prefixes: str | Sequence[str]) -> None:
        """Drop what lies under these prefixes on purpose; a component `*` stands for any one component."""
        self._unmapped += [prefix.split(".") for prefix in _checked_prefixes(prefixes)]

    def route(self, name: str) -> tuple[LayerContainer, str] | None:
        """The container of a tensor and its name there; None if it is dropped on purpose. Changes nothing.

        Raises:
            ContainerError: nothing maps the name; the message has the nearest known one.
        """
        if self._is_unmapped(name):
            return None
        place = self._place(name)
        targets = place.container.match(place.name) if place else None
        if place is None or targets is None:
            raise self._unexpected(name)
        return (place.container, place.name) if targets else None

    def map_param(self, name: str, tensor: torch.Tensor) -> None:
        """Hand the checkpoint's tensor `name` to its container, or drop it where that was asked for.

        Raises:
            ContainerError: unexpected name, dependency filled twice, or an error while making a parameter final.
        """
        found = self.route(name)
        if found is None:
            return
        container, inner = found
        if container.path + inner != name:
            prefix = name.removesuffix(f".{inner}").rpartition(".")[0]
            for layer, path in self._by_prefix[prefix].paths(prefix).items():
                layer.path = path
        container.set_dependency(inner, tensor, label=name)

    def containers(self) -> Iterator[tuple[str, LayerContainer]]:
        """Every container with a stable name, in a stable order: `layers.0`, `layers.1`, ..., `non_transformer`."""
        for name, stack in self._stacks.items():
            for index, container in enumerate(stack.containers):
                yield f"{name}.{index}", container
        if self._non_transformer is not None:
            yield _NON_TRANSFORMER, self._non_transformer

    def direct_injection(self, container: str, parameter: str, tensor: torch.Tensor | None) -> None:
        """Set a final tensor, as a snapshot holds it; `container` is named as by `containers()`.

        A layer that is dropped on purpose is passed over: the snapshot may be of a model that used it.
        """
        by_name = dict(self.containers())
        if container not in by_name:
            if self.drops_layer(container):
                return
            raise ContainerError(f"there is no container {container!r}", hint=f"Containers: {', '.join(by_name)}.")
        by_name[container].direct_injection(parameter, tensor)

    def drops_layer(self, container: str) -> bool:
        """Whether a layer, named as by `containers()`, is no container because it is dropped on purpose."""
        name, _, index = container.rpartition(".")
        stack = self._stacks.get(name)
        return stack is not None and all(self._is_unmapped(f"{prefix}.{index}") for prefix in stack.prefixes)

    def missing(self) -> list[str]:
        """Checkpoint names of all that must still be filled."""
        return [container.path + name for _, container in self.containers() for name in container.missing_sources()]

    def validate(self) -> None:
        """Finish every container: what is optional or tied gets its value, and everything is final.

        Raises:
            ContainerError: naming every missing tensor.
        """
        missing = self.missing()
        if missing:
            raise ContainerError(
                f"{len(missing)} tensors are missing: {', '.join(missing)}",
                hint="The checkpoint is incomplete, or its config is another model's.",
            )
        for _, container in self.containers():
            container.finish()

    def audit(self, tensors: Iterable[LazyTensor]) -> Audit:
        """Check the names of a checkpoint against the mapping, reading no tensor and changing nothing."""
        filled: dict[LayerContainer, set[Target]] = {container: set() for _, container in self.containers()}
        paths = {container: container.path for container in filled}
        matched, seen = 0, set[str]()
        unexpected, duplicate, dropped = list[str](), list[str](), list[str]()
        for tensor in tensors:
            place = self._place(tensor.name)
            targets = place.container.match(place.name) if place else None
            if tensor.name in seen:
                duplicate.append(tensor.name)
            elif self._is_unmapped(tensor.name) or targets == ():
                dropped.append(tensor.name)
            elif place is None or targets is None:
                unexpected.append(tensor.name)
            elif not filled[place.container].isdisjoint(targets):
                duplicate.append(tensor.name)
            else:
                matched += 1
                filled[place.container].update(targets)
                if paths[place.container] + place.name != tensor.name:
                    paths |= self._by_prefix[place.prefix].paths(place.prefix)
            seen.add(tensor.name)
        missing = [
            paths[container] + name for container in filled for name in container.missing_sources(filled[container])
        ]
        return Audit(matched, tuple(missing), tuple(unexpected), tuple(duplicate), tuple(dropped))

    def _is_unmapped(self, name: str) -> bool:
        parts = name.split(".")
        return any(
            len(prefix) <= len(parts) and all(p in ("*", part) for p, part in zip(prefix, parts, strict=False))
            for prefix in self._unmapped
        )

    def _place(self, name: str) -> _Place | None:
        """The container under the longest prefix of `name` that a layer number follows, or else the one of no layer."""
        parts = name.split(".")
        for length in range(len(parts) - 2, 0, -1):
            stack = self._by_prefix.get(".".join(parts[:length]))
            if stack is not None and parts[length].isascii() and parts[length].isdigit():
                index, prefix = int(parts[length]), ".".join(parts[:length])
                inner = ".".join(parts[length + 1 :])
                return _Place(stack.containers[index], inner, prefix) if index < len(stack.containers) else None
        return None if self._non_transformer is None else _Place(self._non_transformer, name, "")

    def _unexpected(self, name: str) -> ContainerError:
        place = self._place(name)
        if place is not None and place.prefix:
            return place.container.refusal(place.name, name)
        known = [] if self._non_transformer is None else self._non_transformer.sources()
        for prefix, stack in self._by_prefix.items():
            if place is None and name.startswith(f"{prefix}."):
                return ContainerError(
                    f"{name} is unexpected: {prefix} has {len(stack.containers)} layers, numbered from 0",
                    hint=f"The config's number of layers is wrong; or else: {WAYS_OUT}",
                )
            known += [f"{prefix}.0.{source}" for container in stack.containers[:1] for source in container.sources()]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        nearest = f"The nearest known name is {near[0]}. " if near else ""
        return ContainerError(f"{name} is unexpected: no container has a row for it", hint=nearest + WAYS_OUT)

    def _check_unused(self, containers: Sequence[LayerContainer]) -> None:
        everything = [*(container for _, container in self.containers()), *containers]
        if len({id(container) for container in everything}) < len(everything):
            raise ContainerError("one container is set for two places", hint="Make one container a layer.")


class _Place(NamedTuple):
    container: LayerContainer
    name: str
    prefix: str


def _checked_layers(containers: Sequence[LayerContainer]) -> tuple[LayerContainer, ...]:
    if not isinstance(containers, list | tuple) or not all(isinstance(item, LayerContainer) for item in containers):
        raise ContainerError(f"a list of LayerContainers is needed, one a layer, not {containers!r}")
    return tuple(containers)


def _checked_prefixes(prefixes: str | Sequence[str]) -> tuple[str, ...]:
    found = tuple(prefixes) if isinstance(prefixes, list | tuple) else (prefixes,)
    for prefix in found:
        if not isinstance(prefix, str) or not all(prefix.split(".")):
            raise ContainerError(
                f"prefix {prefix!r} is not made of whole dotted components", hint="Write for instance model.layers."
            )
    return found
