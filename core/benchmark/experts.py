"""How many experts the tokens of a decode step choose, counted on the device when all that is timed is over."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

import torch

from hookline.benchmark.roofline import ModelCosts
from hookline.benchmark.workload import Lengths, fixed_lengths, make_prompts
from hookline.engine import Engine
from hookline.errors import InvalidRequestError
from hookline.manual import SchedulingError
from hookline.model import MoETransformerModel

# Decode steps that are looked at.
_STEPS = 2


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Experts that a decode step reads in a layer.

    Attributes:
        layers: of each layer that has experts, the mean over the steps.
        batch: tokens of a step.
    """

    layers: tuple[float, ...]
    batch: int

    @property
    def mean(self) -> float:
        """Over the layers."""
        return fmean(self.layers)

    def line(self, routing: str, costs: ModelCosts) -> str:
        """As a person reads it, beside what the floors reckon with."""
        independent = costs.num_experts * (1 - (1 - costs.experts_per_token / costs.num_experts) ** self.batch)
        return (
            f"Routing {routing}: {self.mean:.1f} distinct experts a layer in a decode step of {self.batch} "
            f"(least {min(self.layers):.1f}, most {max(self.layers):.1f}, of {costs.num_experts}); "
            f"the floors reckon with {independent:.1f}."
        )


def count_experts(engine: Engine, batch: int, length: Lengths) -> DistinctExperts | None:
    """Runs some greedy decode steps of such a batch, without graphs.

    Returns:
        None for a model of which no layer has experts, and where the cache does not hold the whole batch.
    """
    model = engine.loaded.opened.model
    if not isinstance(model, MoETransformerModel):
        return None
    used: dict[int, list[torch.Tensor]] = {}

    def watch(layer: int, expert_ids: torch.Tensor) -> None:
        chosen = torch.zeros(model.moe.num_experts, dtype=torch.int32, device=expert_ids.device)
        used.setdefault(layer, []).append(chosen.index_fill_(0, expert_ids.flatten().long(), 1))

    uids, plain = range(batch), model.moe
    try:
        prompts = make_prompts(fixed_lengths(batch, length.prompt, 1), engine.vocab_size)
        logits = torch.cat([_prefill(engine, uid, prompt) for uid, prompt in zip(uids, prompts, strict=True)])
        model.moe = dataclasses.replace(plain, watch=watch)
        for _ in range(min(_STEPS, length.output)):
            logits = engine.put(uids, [[token] for token in logits.argmax(dim=-1).tolist()])
    except SchedulingError:
        return None
    finally:
        model.moe = plain
        for uid in uids:
            with suppress(InvalidRequestError):  # one that was never put, after an error
                engine.flush(uid)
    counts = [torch.stack(steps).sum(dim=1).tolist() for _, steps in sorted(used.items())]
    return DistinctExperts(tuple(fmean(count) for count in counts), batch) if counts else None


def _prefill(engine: Engine, uid: int, prompt: list[int]) -> torch.Tensor:
    """Logits [1, V] of the last token; as many tokens a step as the engine takes."""
    most = engine.config.max_batch_tokens
    return [engine.put([uid], [prompt[at : at + most]]) for at in range(0, len(prompt), most)][-1]
