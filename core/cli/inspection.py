"""What can be said of a checkpoint without reading a weight: what it is, who serves it, whether it loads and fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.loader import adapted
from hookline.checkpoint.reader import CheckpointReader
from hookline.config import EngineConfig
from hookline.errors import HooklineError
from hookline.loading import OpenedModel, architecture_name, eos_token_ids, expected_bytes, open_model, read_tokenizer
from hookline.memory_planner import MemoryPlan, available_memory
from hookline.model import ModelConfig
from hookline.plugins import Claim
from hookline.weight_adapter import LazyTensor, WeightAdapter


@dataclasses.dataclass(slots=True)
class Inspection:
    """What is known of a checkpoint; what an error kept from being found out is None.

    Attributes:
        header: what the files say by themselves.
        plugin: what serves it.
        config: the plugin's view of the checkpoint's config.
        parameters: how many numbers the weights have.
        audit: the checkpoint's tensors against the plugin's mapping.
        plan: where this machine's memory would go.
        error: what went wrong first.
    """

    header: dict[str, Any]
    plugin: dict[str, Any] | None = None
    config: ModelConfig | None = None
    parameters: int | None = None
    audit: CheckpointAudit | None = None
    plan: MemoryPlan | None = None
    error: HooklineError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointAudit:
    """What would keep a checkpoint from loading, by tensor name; `matched` counts the tensors that have a place."""

    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    duplicate: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether the checkpoint would load."""
        return not (self.missing or self.unexpected or self.duplicate or self.wrong_shape)


def inspect_checkpoint(engine_config: EngineConfig, path: Path, reader: CheckpointReader) -> Inspection:
    """Looks at a checkpoint whose headers are read, as far as it can be understood."""
    found = Inspection(describe_header(path, reader))
    try:
        opened = open_model(engine_config, reader)
        found.plugin = _describe_plugin(opened.architecture.claim, engine_config)
        found.config = opened.config
        shapes = dict(opened.model.checkpoint_shapes())
        found.parameters = sum(map(math.prod, shapes.values()))
        found.audit = audit_checkpoint(opened, shapes)
        planner = opened.architecture.memory_planner(opened.config, opened.engine_config)
        available = available_memory(opened.model.device, opened.engine_config.memory)
        found.plan = planner.plan(opened.model.cache_specs(), expected_bytes(opened), available)
    except HooklineError as error:
        found.error = error
    return found


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


def audit_checkpoint(opened: OpenedModel, shapes: Mapping[str, tuple[int, ...]]) -> CheckpointAudit:
    """Compares the checkpoint's header with the plugin's mapping and the config's shapes."""
    reader = opened.reader
    if reader.weights_format == "snapshot":
        return _audit_snapshot(opened)
    adapter = opened.architecture.weight_adapter(opened.config, reader.weights_format)
    names = opened.containers.audit(adapted(reader, adapter))
    return CheckpointAudit(
        matched=names.matched,
        missing=names.missing,
        unexpected=names.unexpected,
        duplicate=names.duplicate,
        wrong_shape=tuple(_wrong_shapes(adapted(reader, adapter), shapes)),
        dropped=(*names.dropped, *_dropped_by(adapter, reader)),
    )


def _wrong_shapes(tensors: Iterable[LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    for tensor in tensors:
        expected = shapes.get(tensor.name)
        if expected is not None and tuple(tensor.shape) != tuple(expected):
            yield f"{tensor.name} is {list(tensor.shape)}, the config asks for {list(expected)}"


def _dropped_by(adapter: WeightAdapter, reader: CheckpointReader) -> Iterable[str]:
    return (tensor.name for tensor in reader.tensors() if not list(adapter.adapt(tensor)))


def _audit_snapshot(opened: OpenedModel) -> CheckpointAudit:
    """A snapshot holds parameters, not the checkpoint's tensors; one that may be None may also be absent."""
    known = {f"{path}.{name}" for path, one in opened.containers.containers() for name in one.parameter_names}
    found = [tensor.name for tensor in opened.reader.tensors()]
    return CheckpointAudit(
        matched=len(known.intersection(found)),
        missing=(),
        unexpected=tuple(name for name in found if name not in known),
        duplicate=(),
        wrong_shape=(),
        dropped=(),
    )
