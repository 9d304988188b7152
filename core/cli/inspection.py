"""What can be said of a checkpoint without reading a weight: what it is, who serves it, whether it loads and fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.checkpoint.loader import adapted
from hookline.checkpoint.reader import CheckpointReader
from hookline.config import EngineConfig
from hookline.errors import HooklineError, UsageError
from hookline.loading import (
    OpenedModel,
    architecture_name,
    eos_token_ids,
    expected_bytes,
    open_model,
    rank_bytes,
    read_tokenizer,
)
from hookline.memory_planner import MemoryPlan, available_memory, planned_memory
from hookline.model import ModelConfig
from hookline.plugins import Claim
from hookline.weight_adapter import LazyTensor


@dataclasses.dataclass(slots=True)
class Inspection:
    """What is known of a checkpoint; what an error kept from being found out is None.

    Attributes:
        header: what the files say by themselves.
        plugin: what serves it.
        config: the plugin's view of the checkpoint's config.
        parameters: how many numbers the weights have.
        audit: the checkpoint's tensors against the plugin's mapping.
        plan: where the memory would go, of this machine or of the devices that were asked for.
        computed_weights: bytes of the weights in the type of the computation, where the plan counts stored ones.
        error: what went wrong first.
    """

    header: dict[str, Any]
    plugin: dict[str, Any] | None = None
    config: ModelConfig | None = None
    parameters: int | None = None
    audit: CheckpointAudit | None = None
    plan: MemoryPlan | None = None
    computed_weights: int | None = None
    error: HooklineError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointAudit:
    """What would keep a checkpoint from loading, by tensor name.

    Attributes:
        matched: how many tensors have a place, as the weight adapter gives them.
        joined: how many tensors of the checkpoint are part of such a one beside its first, such as scales.
    """

    matched: int
    joined: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    duplicate: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether the checkpoint would load."""
        return not (self.missing or self.unexpected or self.duplicate or self.wrong_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """GPUs to plan for, which need not be there: so many, each with so many bytes."""

    count: int
    memory: int


def inspect_checkpoint(
    engine_config: EngineConfig, path: Path, reader: CheckpointReader, devices: Devices | None = None
) -> Inspection:
    """Looks at a checkpoint whose headers are read, as far as it can be understood."""
    found = Inspection(describe_header(path, reader))
    try:
        opened = open_model(engine_config, reader, None if devices is None else devices.count)
        found.plugin = _describe_plugin(opened.architecture.claim, engine_config)
        found.config = opened.config
        shapes = dict(opened.model.checkpoint_shapes())
        found.parameters = sum(map(math.prod, shapes.values()))
        tensors = _adapted(opened)
        found.audit = _audit_snapshot(opened) if tensors is None else audit_checkpoint(opened, shapes, tensors)
        _plan(found, opened, devices, tensors)
    except HooklineError as error:
        found.error = error
    return found


def _adapted(opened: OpenedModel) -> list[LazyTensor] | None:
    """The checkpoint's tensors under the containers' names; None for a snapshot, which holds parameters instead."""
    reader = opened.reader
    if reader.weights_format == "snapshot":
        return None
    return list(adapted(reader, opened.architecture.weight_adapter(opened.config, reader.weights_format)))


def _plan(
    found: Inspection, opened: OpenedModel, devices: Devices | None, tensors: Sequence[LazyTensor] | None
) -> None:
    planner = opened.architecture.memory_planner(opened.config, opened.engine_config)
    specs = opened.model.cache_specs()
    if devices is None:
        available = available_memory(opened.model.device, opened.engine_config.memory)
        found.plan = planner.plan(specs, expected_bytes(opened), available)
    elif tensors is None:
        raise UsageError("a snapshot is of one device", hint="Give the checkpoint that it was made from.")
    elif found.audit is not None and found.audit.is_clean:
        available = planned_memory(devices.memory, opened.engine_config.memory)
        stored, found.computed_weights = rank_bytes(opened, tensors)
        plan = planner.plan(specs, stored, available)
        found.plan = dataclasses.replace(plan, device=f"each of {devices.count} devices")


def describe_header(path: Path, reader: CheckpointReader) -> dict[str, Any]:
    """The part that needs no plugin."""
    tensors = list(reader.tensors())
    source = reader.tokenizer_source
    encodings: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        entry = encodings.setdefault(tensor.encoding, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return {
        "path": str(path),
        "architecture": architecture_name(reader.hf_config),
        "format": reader.weights_format,
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in reader.files],
        "tensors": len(tensors),
        "tensor_bytes": reader.nbytes,
        "encodings": encodings,
        "context_length": reader.hf_config.get("max_position_embeddings"),
        "tokenizer": source.has_tokenizer,
        "chat_template": source.chat_template is not None,
        "end_tokens": _end_tokens(reader),
    }


def _end_tokens(reader: CheckpointReader) -> list[dict[str, Any]]:
    """Ids and texts, the text None without a tokenizer that knows it."""
    tokenizer = read_tokenizer(reader)
    return [
        {"id": token, "text": tokenizer.token_text(token) if tokenizer is not None and tokenizer.knows(token) else None}
        for token in sorted(eos_token_ids(reader, tokenizer))
    ]


def _describe_plugin(claim: Claim, engine_config: EngineConfig) -> dict[str, Any]:
    chosen = engine_config.plugins.prefer.get(claim.architecture)
    return {
        "id": claim.plugin,
        "distribution": claim.distribution,
        "version": claim.version,
        "why": f"--plugin {claim.architecture}={chosen} chooses it"
        if chosen
        else f"the only plugin in use that claims {claim.architecture}",
    }


def audit_checkpoint(
    opened: OpenedModel, shapes: Mapping[str, tuple[int, ...]], tensors: Sequence[LazyTensor]
) -> CheckpointAudit:
    """Compares the checkpoint's `tensors` with the plugin's mapping and the config's shapes."""
    names = opened.containers.audit(tensors)
    by_name = {tensor.name: tensor.origins for tensor in tensors}
    used = {origin for origins in by_name.values() for origin in origins}
    dropped = [origin for name in names.dropped for origin in by_name[name]]
    dropped += [tensor.name for tensor in opened.reader.tensors() if tensor.name not in used]
    left_out = set(names.dropped)
    return CheckpointAudit(
        matched=names.matched,
        joined=sum(len(origins) - 1 for name, origins in by_name.items() if name not in left_out),
        missing=names.missing,
        unexpected=names.unexpected,
        duplicate=names.duplicate,
        wrong_shape=tuple(_wrong_shapes(tensors, shapes)),
        dropped=tuple(dropped),
    )


def _wrong_shapes(tensors: Iterable[LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    for tensor in tensors:
        expected = shapes.get(tensor.name)
        if expected is not None and tuple(tensor.shape) != tuple(expected):
            yield f"{tensor.name} is {list(tensor.shape)}, the config asks for {list(expected)}"


def _audit_snapshot(opened: OpenedModel) -> CheckpointAudit:
    """A snapshot holds parameters, not the checkpoint's tensors; one that may be None may also be absent."""
    containers = dict(opened.containers.containers())
    known = {f"{path}.{name}" for path, one in containers.items() for name in one.parameter_names}
    found = [tensor.name for tensor in opened.reader.tensors()]
    held = {name.rpartition(".")[0] for name in found}
    dropped = {path for path in held if path not in containers and opened.containers.drops_layer(path)}
    return CheckpointAudit(
        matched=len(known.intersection(found)),
        joined=0,
        missing=tuple(path for path in containers if path not in held),
        unexpected=tuple(name for name in found if name not in known and name.rpartition(".")[0] not in dropped),
        duplicate=(),
        wrong_shape=(),
        dropped=tuple(name for name in found if name.rpartition(".")[0] in dropped),
    )
