"""What a benchmark runs on: the model's source, the engine's limits, and the frame of its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from hookline.benchmark.costs import model_costs
from hookline.benchmark.machine import describe_machine, describe_versions, known_limits, measure_limits
from hookline.benchmark.measure import Choice, Server, Steps, measure_steps
from hookline.benchmark.report import Figure, Report
from hookline.benchmark.roofline import Limits, ModelCosts
from hookline.benchmark.workload import Lengths
from hookline.checkpoint.random import RandomReader
from hookline.config import STORED_ENCODINGS, EngineConfig
from hookline.errors import UsageError
from hookline.loading import choose_device
from hookline.model import MoETransformerModel

if TYPE_CHECKING:
    from hookline.benchmark.step_profile import StepProfile
    from hookline.engine import Engine

# Settings of the engine that change a measure; where the model and its plugin are from is said elsewhere.
_SETTINGS = (
    *("dtype", "device", "load_format", "max_model_len", "max_batch_tokens", "max_running"),
    *("block_size", "memory", "kv_cache_memory", "prefix_caching", "seed", "expert_routing"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """Which model is measured.

    Attributes:
        name: a checkpoint, a reference shape or a file.
        source: which of these it is.
        hf_config: the fields of `config.json`, for a model that gets random weights; None for a checkpoint.
    """

    name: str
    source: Literal["checkpoint", "shape", "config"]
    hf_config: Mapping[str, Any] | None = None

    def reader(self) -> RandomReader | None:
        """Where its weights come from; None for a checkpoint."""
        return None if self.hf_config is None else RandomReader(self.hf_config)


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine that is to be measured, and what it could do at most."""

    subject: Subject
    engine: Engine
    costs: ModelCosts
    limits: Limits

    def report(
        self,
        measure: str,
        workload: Mapping[str, Any],
        figures: Sequence[Figure],
        notes: Sequence[str] = (),
        profile: StepProfile | None = None,
    ) -> Report:
        """The report of one measure, with all that it depends on."""
        engine = self.engine
        opened = engine.loaded.opened
        config = engine.config
        settings = {name: getattr(config, name) for name in _SETTINGS}
        return Report(
            measure=measure,
            machine=describe_machine(opened.model.device),
            versions=describe_versions(),
            model={
                "name": self.subject.name,
                "source": self.subject.source,
                "config": dict(opened.reader.hf_config),
                "weights_bytes": engine.memory_plan.weights,
                "costs": dataclasses.asdict(self.costs),
            },
            settings={**settings, "max_model_len": engine.max_model_len, "workload": dict(workload)},
            memory=dataclasses.asdict(engine.memory_plan),
            limits=self.limits,
            figures=figures,
            notes=notes,
            profile=profile,
        )

    def time_steps(self, batch: int, prompt: int, repeats: int, choice: Choice, server: Server | None = None) -> Steps:
        """See `measure_steps`; `server` stands in for the engine, such as one that watches it."""
        engine = self.engine
        return measure_steps(
            *(server or engine, engine.vocab_size, batch, prompt, repeats, choice),
            drafts=self.drafts,
            budget=engine.config.max_batch_tokens,
            room=engine.max_model_len,
        )

    def check_fits(self, work: Sequence[Lengths]) -> None:
        """Refuses a workload that the engine would cut short.

        Raises:
            UsageError: with the longest request and what the engine serves.
        """
        longest = max(length.total for length in work)
        if longest > self.engine.max_model_len:
            raise UsageError(
                f"a request of {longest:,} tokens, prompt and output, is longer than max_model_len, "
                f"{self.engine.max_model_len:,}",
                hint="Shorten it, or raise --max-model-len or --kv-cache-memory if the model was made for more.",
            )

    @property
    def drafts(self) -> int:
        """Drafts that a step verifies of each request; 0 without speculation."""
        speculative = self.engine.config.speculative
        return 0 if speculative is None else speculative.num_speculative_tokens

    @property
    def cache_tokens(self) -> int:
        """How many tokens the cache holds."""
        return self.engine.memory_plan.num_blocks * self.engine.memory_plan.block_size


def early_limits(config: EngineConfig, measured: bool) -> Limits | None:
    """Measures the device, if it is to be, before the engine takes its memory; None to look it up later.

    The product is measured in the type that the model most likely gets: 16 bits on a GPU.
    """
    if not measured:
        return None
    device = choose_device(config.device)
    likely = "float32" if device.type == "cpu" else "bfloat16"
    is_chosen = config.dtype != "auto" and config.dtype not in STORED_ENCODINGS
    return measure_limits(device, getattr(torch, config.dtype if is_chosen else likely))


def make_bench(subject: Subject, engine: Engine, limits: Limits | None) -> Bench:
    """Reads the model's costs; looks the device's limits up where they were not measured.

    Raises:
        UsageError: if routing is forced on a model without experts.
    """
    opened = engine.loaded.opened
    model, costs, routing = opened.model, model_costs(opened), engine.config.expert_routing
    # A config may leave all layers of such a model without experts.
    if routing != "natural" and not (isinstance(model, MoETransformerModel) and costs.expert_bytes):
        raise UsageError(
            f"--routing is {routing}, and {subject.name} has no experts",
            hint="Leave --routing out, or measure a mixture of experts.",
        )
    return Bench(subject, engine, costs, limits or known_limits(model.device, model.dtype))
