"""From `EngineConfig` to a model that is ready to run: resolve, open, choose the plugin, build, load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.loader import adapted, load_weights
from hookline.checkpoint.random import RandomReader
from hookline.checkpoint.reader import CheckpointReader, Progress
from hookline.checkpoint.snapshot import SnapshotOrigin, SnapshotReader
from hookline.checkpoint.snapshot_writer import write_snapshot
from hookline.config import STORED_ENCODINGS, Dtype, EngineConfig, ResolvedConfig, read_environment, resolve
from hookline.container import ContainerMap, LayerContainer
from hookline.errors import (
    CheckpointError,
    ContainerError,
    DeviceError,
    ModelConfigError,
    NotEnoughMemoryError,
    UsageError,
)
from hookline.execution.starting import settle_speculation
from hookline.memory_planner import available_memory, format_bytes
from hookline.model import ModelConfig, TransformerModel
from hookline.model_store import resolve_model
from hookline.parallel import Parallel
from hookline.plugins import LoadedArchitecture, PluginRegistry, engine_version
from hookline.tokenizer import Tokenizer
from hookline.weight_adapter import LazyTensor
from hookline_kernels.linear import unpack_linear_weight
from hookline_kernels.native import why_not_on
from hookline_kernels.packed import bits_of, unpacked_shape, weight_bytes

# Formats that hold the names of the containers themselves, which every plugin reads.
_OWN_FORMATS = ("snapshot", "random", "module")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose plugin is found and whose model is built, without weights.

    Attributes:
        engine_config: with all that depends on the device decided.
    """

    reader: CheckpointReader
    architecture: LoadedArchitecture
    config: ModelConfig
    engine_config: ResolvedConfig
    model: TransformerModel
    containers: ContainerMap


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An opened model with its weights in place.

    Attributes:
        tokenizer: None where the checkpoint has none; prompts must then be token ids.
        eos_token_ids: every end token that the checkpoint names.
        weights_bytes: bytes of the parameters on the device.
        available_bytes: memory that could be used before the weights came.
    """

    opened: OpenedModel
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    weights_bytes: int
    available_bytes: int


def open_model(
    engine_config: EngineConfig, reader: CheckpointReader | None = None, ranks: int | None = None
) -> OpenedModel:
    """Everything short of reading weights; `reader` stands in for `engine_config.model` where it is given.

    Args:
        ranks: plan for so many GPUs, which need not be there: the model is the first rank's, and is never to run.
    """
    if reader is None:
        environment = read_environment()
        path = resolve_model(engine_config.model, environment, offline=engine_config.offline or environment.offline)
        reader = open_checkpoint(path, engine_config.load_format)
    name = architecture_name(reader.hf_config)
    architecture = PluginRegistry(engine_config.plugins).load(name)
    _check_format(reader.weights_format, architecture)
    config = architecture.read_config(reader.hf_config)
    device = choose_device(engine_config.device) if ranks is None else torch.device("cuda")
    wanted: str = engine_config.dtype
    if wanted == "auto" and isinstance(reader, SnapshotReader):
        wanted = reader.origin.dtype
    if wanted in STORED_ENCODINGS:
        _check_stored(wanted, reader, config, architecture)
    resolved = resolve(engine_config, str(device), _dtype(wanted, config.dtype, device, architecture))
    parallel = Parallel(tp_size=ranks or 1)
    built_for = resolved if ranks is None else dataclasses.replace(resolved, device="cpu")
    model = architecture.build_model(config, built_for, parallel)
    _check_draft(engine_config, model)
    _check_context(engine_config.max_model_len, model.longest_context())
    containers = architecture.build_containers(model)
    if isinstance(reader, RandomReader):
        shapes = model.checkpoint_shapes()
        reader = reader.with_shapes(shapes, model.dtype, engine_config.seed, str(model.device))
    return OpenedModel(reader, architecture, config, resolved, model, containers)


def _check_draft(engine_config: EngineConfig, model: TransformerModel) -> None:
    speculative = engine_config.speculative
    if speculative is not None and speculative.method == "mtp" and model.proposer is None:
        raise UsageError(
            f"{model.shapes.architecture} has no draft of its own, which the method mtp proposes with",
            hint="Use --speculative-method ngram, which serves every model, or leave speculation out.",
        )


def load_model(
    engine_config: EngineConfig, reader: CheckpointReader | None = None, progress: Progress | None = None
) -> LoadedModel:
    """Opens the model and loads its weights onto the device."""
    opened = open_model(engine_config, reader)
    tokenizer = read_tokenizer(opened.reader)
    find_token = (lambda text: None) if tokenizer is None else tokenizer.find_token
    settled = settle_speculation(opened.engine_config, find_token)
    opened = dataclasses.replace(opened, engine_config=settled)
    reader, model, containers = opened.reader, opened.model, opened.containers
    available = available_memory(model.device, opened.engine_config.memory)
    needed = expected_bytes(opened)
    if needed > available:
        raise NotEnoughMemoryError(
            f"The weights take {format_bytes(needed)} as {opened.engine_config.dtype}; "
            f"{format_bytes(available)} are available on {model.device}",
            hint="Use --dtype bfloat16, a smaller model, a larger --memory, or a machine with more memory.",
        )
    if isinstance(reader, SnapshotReader):
        reader.check_origin(_origin(opened))
        for container, parameter, tensor in _unpacked(reader.entries(model.device, progress), model.dtype):
            containers.direct_injection(container, parameter, tensor)
        _check_snapshot(reader, containers)
        containers.validate()
    else:
        adapter = opened.architecture.weight_adapter(opened.config, reader.weights_format)
        load_weights(reader, adapter, containers, dict(model.checkpoint_shapes()), progress)
    return LoadedModel(
        opened=opened,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(i for i in eos_token_ids(reader, tokenizer) if i < opened.config.vocab_size),
        weights_bytes=parameter_bytes(containers),
        available_bytes=available,
    )


def expected_bytes(opened: OpenedModel) -> int:
    """Bytes that the weights will take on the device, from the checkpoint's header: an estimate from above.

    It is too low only where codes are given up on the way without a word: by a scale that is not finite, or by a
    `finalize` of a plugin's own. A parameter of several tensors is taken for their rows joined, which stay quantised
    where all of them have codes of the same bits.
    """
    reader, model = opened.reader, opened.model
    if isinstance(reader, SnapshotReader):
        return _snapshot_bytes(reader, model)
    parts: dict[tuple[int, str], list[LazyTensor]] = {}
    for tensor in adapted(reader, opened.architecture.weight_adapter(opened.config, reader.weights_format)):
        for key, in_list in _parameters_of(opened.containers, tensor.name).items():
            part = dataclasses.replace(tensor, code_bits=None) if in_list else tensor
            parts.setdefault(key, []).append(part)
    return sum(_joined_bytes(tensors, model.device, model.dtype) for tensors in parts.values())


def rank_bytes(opened: OpenedModel, tensors: Iterable[LazyTensor]) -> tuple[int, int]:
    """Bytes of the weights that a rank keeps: as the checkpoint stores them, and in the type of the computation.

    Args:
        opened: of no use afterwards: containers are filled with tensors that have no memory, one of each kind.
        tensors: the checkpoint's, as the weight adapter gives them.
    """
    model = opened.model
    model.device = torch.device("meta")
    given: dict[LayerContainer, list[tuple[str, LazyTensor]]] = {}
    for tensor in tensors:
        place = opened.containers.route(tensor.name)
        if place is not None:
            given.setdefault(place[0], []).append((place[1], tensor))
    stored, computed = 0.0, 0
    known: dict[object, dict[str, torch.Tensor]] = {}
    for container, parts in given.items():
        kind = (type(container), frozenset((name, tensor.shape) for name, tensor in parts))
        if kind not in known:
            for name, tensor in parts:
                container.set_dependency(name, torch.empty(tensor.shape, dtype=model.dtype, device="meta"))
            container.finish()
            known[kind] = {name: getattr(container, name) for name in container.parameter_names}
        sizes: dict[str, tuple[int, int]] = {}  # of each parameter, what its sources have of numbers and bytes
        for name, tensor in parts:
            for target in {target.parameter for target in container.match(name) or ()}:
                numbers, nbytes = sizes.get(target, (0, 0))
                sizes[target] = numbers + math.prod(tensor.shape), nbytes + tensor.nbytes
        for name, (numbers, nbytes) in sizes.items():
            kept = known[kind][name]
            if kept is not None:
                computed += kept.nbytes
                stored += nbytes * kept.numel() / numbers
    return int(stored), computed


def _parameters_of(containers: ContainerMap, name: str) -> dict[tuple[int, str], bool]:
    """The parameters that the tensor `name` goes into, and whether as one of a list, which no packed weight is made of.

    A name that nothing maps stands for itself here; `load_weights` refuses it.
    """
    try:
        found = containers.route(name)
    except ContainerError:
        return {(0, name): False}
    if found is None:
        return {}
    container, inner = found
    return {(id(container), target.parameter): target.index is not None for target in container.match(inner) or ()}


def _joined_bytes(parts: list[LazyTensor], device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the parameter that `parts` are joined to, as rows of one matrix."""
    kinds = {(part.code_bits, *part.shape[1:]) for part in parts}
    if len(kinds) > 1 or len(parts[0].shape) != 2:
        return sum(weight_bytes(part.shape, None, device, dtype) for part in parts)
    rows = sum(part.shape[0] for part in parts)
    return weight_bytes((rows, parts[0].shape[1]), parts[0].code_bits, device, dtype)


def _check_snapshot(reader: SnapshotReader, containers: ContainerMap) -> None:
    held = {entry.container for entry in reader.stored()}
    absent = [name for name, _ in containers.containers() if name not in held]
    if absent:
        raise CheckpointError(
            f"the snapshot has nothing for {', '.join(absent)}",
            hint="If that is the model's own draft, write the snapshot again with the options of speculation.",
        )


def _snapshot_bytes(reader: SnapshotReader, model: TransformerModel) -> int:
    """The buffer, which stays whole, and beside it the packed weights that `_unpacked` multiplies out."""
    if why_not_on(model.device, model.dtype) is None:
        return reader.nbytes
    shapes = (entry.shape for entry in reader.stored() if entry.dtype == "uint8" and bits_of(entry.shape))
    return reader.nbytes + sum(math.prod(unpacked_shape(shape)) * model.dtype.itemsize for shape in shapes)


def _unpacked(
    entries: Iterable[tuple[str, str, torch.Tensor | None]], dtype: torch.dtype
) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """A snapshot's entries, packed weights as this machine takes them; those that share memory go on sharing it."""
    made: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for container, parameter, tensor in entries:
        if tensor is not None:
            key = (tensor.data_ptr(), tensor.shape)
            if key not in made:
                made[key] = unpack_linear_weight(tensor, dtype)
            tensor = made[key]
        yield container, parameter, tensor


def architecture_name(hf_config: Mapping[str, Any]) -> str:
    """The architecture that a checkpoint's config names.

    Raises:
        ModelConfigError: if it names none.
    """
    names = hf_config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelConfigError(
            f"architectures is {names!r} in config.json; expected a list with the architecture's name",
            hint="The file is damaged, or is no model's config. Download it again.",
        )
    return names[0]


def save_snapshot(loaded: LoadedModel, folder: Path, progress: Progress | None = None) -> None:
    """Writes the model as it lies in memory, with its config and tokenizer, as a snapshot that loads as a model."""
    opened = loaded.opened
    write_snapshot(
        folder,
        parameters(opened.containers),
        _origin(opened),
        opened.reader.hf_config,
        opened.reader.generation_config,
        opened.reader.tokenizer_source,
        progress,
        loaded.weights_bytes,
    )


def _origin(opened: OpenedModel) -> SnapshotOrigin:
    claim, parallel = opened.architecture.claim, opened.model.parallel
    return SnapshotOrigin(
        engine_version=str(engine_version()),
        plugin=claim.distribution,
        plugin_version=claim.version,
        architecture=architecture_name(opened.reader.hf_config),
        dtype=opened.engine_config.dtype,
        layout=opened.model.device.type,
        rank=parallel.tp_rank,
        ranks=parallel.tp_size,
    )


def parameters(containers: ContainerMap) -> Iterator[tuple[str, Mapping[str, torch.Tensor | None]]]:
    """Every container's name with its final parameters."""
    for name, container in containers.containers():
        yield name, {parameter: getattr(container, parameter) for parameter in container.parameter_names}


def parameter_bytes(containers: ContainerMap) -> int:
    """Bytes of all parameters, tied ones counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, held in parameters(containers)
        for tensor in held.values()
        if tensor is not None
    }
    return sum(storages.values())


def _check_format(weights_format: str, architecture: LoadedArchitecture) -> None:
    known = (*architecture.record.weight_formats, *_OWN_FORMATS)
    if weights_format not in known:
        raise CheckpointError(
            f"the weights are in the format {weights_format}, which {architecture.claim.title} does not read for "
            f"{architecture.record.name}",
            hint=f"It reads {', '.join(architecture.record.weight_formats)}. Convert the weights, or ask its author.",
        )


def _check_context(wanted: int | None, longest: int) -> None:
    if wanted is not None and wanted > longest:
        raise UsageError(
            f"max_model_len is {wanted:,}; the model was made for {longest:,} tokens",
            hint=f"Beyond that it would give senseless text. Choose at most {longest}, or leave it out.",
        )


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a CUDA device where there is one.

    Raises:
        DeviceError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(
            f"device is {name!r}, and torch {torch.__version__} sees no CUDA device",
            hint="Run `engine doctor`, or use --device cpu.",
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device is {name!r}; the CUDA devices are cuda:0 to cuda:{torch.cuda.device_count() - 1}",
            hint="Run `engine doctor` to see them.",
        )
    return device


def _dtype(wanted: str, checkpoint: str, device: torch.device, architecture: LoadedArchitecture) -> Dtype:
    """What is computed in."""
    encodings = [name for name in architecture.record.encodings if name not in STORED_ENCODINGS]
    if wanted == "auto" or wanted in STORED_ENCODINGS:
        # Arithmetic in 16 bits is slower than in 32 on most CPUs, and the memory is there.
        wanted = "float32" if device.type == "cpu" else checkpoint
        if wanted not in encodings:
            default = architecture.record.default_encoding
            wanted = encodings[0] if default in STORED_ENCODINGS and encodings else default
    if wanted not in encodings:
        raise UsageError(
            f"dtype is {wanted!r}, which the plugin for {architecture.record.name} does not load",
            hint=f"Choose one of {', '.join(encodings)}.",
        )
    return cast(Dtype, wanted)


def _check_stored(wanted: str, reader: CheckpointReader, config: ModelConfig, architecture: LoadedArchitecture) -> None:
    """That the plugin knows the encoding, and that weights are in it, as the weight adapter reads them."""
    if wanted not in architecture.record.encodings:
        raise UsageError(
            f"dtype is {wanted!r}, which the plugin for {architecture.record.name} does not load",
            hint=f"Choose one of {', '.join(architecture.record.encodings)}.",
        )
    found: set[str] = set()
    if reader.weights_format not in _OWN_FORMATS:
        adapter = architecture.weight_adapter(config, reader.weights_format)
        found = {tensor.encoding for tensor in adapted(reader, adapter)}
    if wanted not in found:
        raise UsageError(
            f"dtype is {wanted!r}, and no weight is in that encoding",
            hint=f"The weights are in {', '.join(sorted(found)) or 'the type of the computation'}. Leave --dtype out.",
        )


def read_tokenizer(reader: CheckpointReader) -> Tokenizer | None:
    """The checkpoint's tokenizer; None where it has none."""
    source = reader.tokenizer_source
    return Tokenizer.from_source(source) if source.has_tokenizer else None


def eos_token_ids(reader: CheckpointReader, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The generation config's end tokens; without any, the config's; without those, the tokenizer's own."""
    for fields in (reader.generation_config, reader.hf_config):
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    return frozenset() if tokenizer is None else tokenizer.eos_token_ids
