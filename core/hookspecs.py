"""The questions that the engine asks an architecture.

A plugin answers with functions of the same names, each marked with `hookimpl`. All hooks are `firstresult`; the core
registers defaults last, so a plugin answers only what is special about it. Hooks build objects; the step loop then
calls methods of those objects, never a hook.

This module imports nothing heavy: `engine list-models --long` imports a plugin's `arch` module, which imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pluggy

if TYPE_CHECKING:
    from hookline.batch_processor import BatchProcessor
    from hookline.config import ResolvedConfig
    from hookline.container import ContainerMap
    from hookline.memory_planner import MemoryPlanner
    from hookline.model import ModelConfig, TransformerModel
    from hookline.parallel import Parallel
    from hookline.parsers.contract import ReasoningFormat, ToolFormat
    from hookline.weight_adapter import WeightAdapter

PROJECT = "hookline"
ENTRY_POINT_GROUP = "hookline.architectures"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The record of one architecture: what a plugin says it can do, readable without torch.

    Attributes:
        name: the string that a checkpoint's `config.json` holds under `architectures`.
        task: what the model is for.
        example_repositories: hub ids of real checkpoints.
        encodings: number formats of weights that the plugin loads.
        default_encoding: the one that is taken where the user names none.
        weight_formats: checkpoint formats that the plugin's weight adapters read.
        gguf_name: GGUF's own name of the architecture (`general.architecture`), or "" where there is none. The plugin
            then also claims the entry point `gguf.<name>`.
        parallel_kinds: ways in which the model can be split over ranks.
        serves_empty_batches: whether `forward` may be called with no request at all.
        tool_parser, reasoning_parser, structured_output_backend: names of the defaults; "" for none.
        reference_shapes: named configs (`config.json` fields) for benchmarks and audits.
        stability: how settled the plugin's support is.
    """

    name: str
    task: Literal["text-generation"] = "text-generation"
    example_repositories: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ("bfloat16", "float16", "float32")
    default_encoding: str = "bfloat16"
    weight_formats: tuple[str, ...] = ("safetensors",)
    gguf_name: str = ""
    parallel_kinds: tuple[str, ...] = ()
    serves_empty_batches: bool = False
    tool_parser: str = ""
    reasoning_parser: str = ""
    structured_output_backend: str = ""
    reference_shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stability: Literal["experimental", "beta", "stable"] = "beta"


@hookspec(firstresult=True)
def hookline_architectures() -> tuple[Architecture, ...] | None:
    """Which architectures does this plugin serve? The names must be those of its entry points."""


@hookspec(firstresult=True)
def hookline_read_config(hf_config: Mapping[str, Any]) -> ModelConfig | None:
    """Is this checkpoint's config sound? Answers a frozen config of the architecture.

    Args:
        hf_config: the fields of the checkpoint's `config.json`.

    Raises:
        ModelConfigError: naming the field that is missing, unsound or not supported.
    """


@hookspec(firstresult=True)
def hookline_build_model(
    config: ModelConfig, engine_config: ResolvedConfig, parallel: Parallel
) -> TransformerModel | None:
    """Model construction: a model without weights, ready to have its containers built."""


@hookspec(firstresult=True)
def hookline_build_containers(model: TransformerModel) -> ContainerMap | None:
    """Containers: which checkpoint prefix belongs to which container of `model`."""


@hookspec(firstresult=True)
def hookline_weight_adapter(config: ModelConfig, weights_format: str) -> WeightAdapter | None:
    """Weight adapters: how checkpoint names and values of `weights_format` become the containers' names.

    The default leaves names and values as they are.
    """


@hookspec(firstresult=True)
def hookline_memory_planner(config: ModelConfig, engine_config: ResolvedConfig) -> MemoryPlanner | None:
    """Memory planners: how many bytes the model's activations and caches need."""


@hookspec(firstresult=True)
def hookline_batch_processor(config: ModelConfig, engine_config: ResolvedConfig) -> BatchProcessor | None:
    """Batch processors: how a scheduled batch becomes tensors."""


@hookspec(firstresult=True)
def hookline_tool_parser(name: str) -> ToolFormat | None:
    """Tool parsers: the format of tool calls that is called `name`; None if it is not the plugin's."""


@hookspec(firstresult=True)
def hookline_reasoning_parser(name: str) -> ReasoningFormat | None:
    """Reasoning parsers: the format of reasoning that is called `name`; None if it is not the plugin's."""
