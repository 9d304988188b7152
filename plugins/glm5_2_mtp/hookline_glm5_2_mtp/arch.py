"""What this plugin serves, and its answers to the engine's questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.hookspecs import Architecture, hookimpl
from hookline_glm5_2_mtp.shapes import DEEPSEEK_V32, GLM_5_2, GLM_5_2_6L, TINY_GLM_5_2

if TYPE_CHECKING:
    from hookline.batch_processor import BatchProcessor
    from hookline.config import EngineConfig, ResolvedConfig
    from hookline.container import ContainerMap
    from hookline.memory_planner import MemoryPlanner
    from hookline.parallel import Parallel
    from hookline.parsers.contract import ReasoningFormat, ToolFormat
    from hookline.weight_adapter import WeightAdapter
    from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
    from hookline_glm5_2_mtp.model import GlmMoeDsaModel

_STORED = ("float8_e4m3fn", "bfloat16", "float4_e2m1fnx2")
_ENCODINGS = (*_STORED, "float16", "float32")
# The name under which other engines know GLM's tool calls and reasoning, too.
_TEXT_FORMAT = "glm45"


@hookimpl
def hookline_architectures() -> tuple[Architecture, ...]:
    """GLM-5.2 under its own name and under that of its unified step, and DeepSeek-V3.2, which has the same blocks."""
    glm = Architecture(
        name="GlmMoeDsaForCausalLM",
        example_repositories=("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.2", "nvidia/GLM-5.2-NVFP4"),
        encodings=_ENCODINGS,
        default_encoding="float8_e4m3fn",
        tool_parser=_TEXT_FORMAT,
        reasoning_parser=_TEXT_FORMAT,
        structured_output_backend="xgrammar",
        reference_shapes={"glm-5.2": GLM_5_2, "glm-5.2-6l": GLM_5_2_6L, "tiny-glm5.2-mtp": TINY_GLM_5_2},
    )
    return (
        glm,
        Architecture(
            name="UnifiedMTPGlmMoeDsaForCausalLM",
            example_repositories=("zai-org/GLM-5.2-FP8",),
            encodings=_ENCODINGS,
            default_encoding="float8_e4m3fn",
            tool_parser=_TEXT_FORMAT,
            reasoning_parser=_TEXT_FORMAT,
            structured_output_backend="xgrammar",
        ),
        Architecture(
            name="DeepseekV32ForCausalLM",
            example_repositories=("deepseek-ai/DeepSeek-V3.2-Exp",),
            encodings=_ENCODINGS,
            default_encoding="float8_e4m3fn",
            reasoning_parser="think",
            structured_output_backend="xgrammar",
            reference_shapes={"deepseek-v3.2": DEEPSEEK_V32},
        ),
    )


@hookimpl
def hookline_read_config(hf_config: Mapping[str, Any]) -> GlmMoeDsaConfig:
    from hookline_glm5_2_mtp.config import read_config

    return read_config(hf_config)


@hookimpl
def hookline_build_model(config: GlmMoeDsaConfig, engine_config: EngineConfig, parallel: Parallel) -> GlmMoeDsaModel:
    """The unified model where the model's own draft proposes, the plain one otherwise, under either name."""
    from hookline_glm5_2_mtp.model import GlmMoeDsaModel
    from hookline_glm5_2_mtp.mtp import UnifiedMTPGlmMoeDsaModel

    speculative = engine_config.speculative
    unified = speculative is not None and speculative.method == "mtp"
    return (UnifiedMTPGlmMoeDsaModel if unified else GlmMoeDsaModel)(config, engine_config, parallel)


@hookimpl
def hookline_build_containers(model: GlmMoeDsaModel) -> ContainerMap:
    from hookline_glm5_2_mtp.container import build_containers

    return build_containers(model)


@hookimpl
def hookline_weight_adapter(config: GlmMoeDsaConfig, weights_format: str) -> WeightAdapter:
    from hookline_glm5_2_mtp.weight_adapter import GlmAdapter

    return GlmAdapter(config)


@hookimpl
def hookline_memory_planner(config: GlmMoeDsaConfig, engine_config: ResolvedConfig) -> MemoryPlanner:
    from hookline_glm5_2_mtp.memory_planner import GlmMemoryPlanner

    return GlmMemoryPlanner(config, engine_config)


@hookimpl
def hookline_batch_processor(config: GlmMoeDsaConfig, engine_config: EngineConfig) -> BatchProcessor:
    from hookline.batch_processor import BatchProcessor

    return BatchProcessor(config, engine_config, rope_lengths=config.rope.depends_on_length)


@hookimpl
def hookline_tool_parser(name: str) -> ToolFormat | None:
    from hookline_glm5_2_mtp.tool_parser import Glm45ToolFormat

    return Glm45ToolFormat() if name == _TEXT_FORMAT else None


@hookimpl
def hookline_reasoning_parser(name: str) -> ReasoningFormat | None:
    from hookline_glm5_2_mtp.reasoning_parser import Glm45ReasoningFormat

    return Glm45ReasoningFormat() if name == _TEXT_FORMAT else None
