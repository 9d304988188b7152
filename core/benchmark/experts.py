"""How many experts the tokens of a decode step choose, counted on the device when all that is timed is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean

import torch

from hookline.benchmark.roofline import ModelCosts, Speculation
from hookline.benchmark.workload import Lengths, fixed_lengths, make_prompts
from hookline.engine import Engine
from hookline.errors import InvalidRequestError
from hookline.execution.speculative import shift
from hookline.manual import SchedulingError
from hookline.model import DraftBatch, ForwardBatch, MoETransformerModel

# Decode steps that are looked at.
_STEPS = 2


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Experts that a decode step reads in a layer.

    Attributes:
        layers: of each of the target's layers that has experts, the mean over the steps.
        batch: requests of a step.
        drafts: that a step verifies of each.
        draft: of the draft's layer, the mean over its passes; None where the model has no draft of its own.
    """

    layers: tuple[float, ...]
    batch: int
    drafts: int = 0
    draft: float | None = None

    @property
    def mean(self) -> float:
        """Over the layers."""
        return fmean(self.layers)

    def line(self, routing: str, costs: ModelCosts) -> str:
        """As a person reads it, beside what the floors reckon with."""
        speculation = Speculation(self.drafts, routing == "correlated")
        expected = [costs.num_experts * costs.expert_share(speculation.choices(self.batch))]
        passes, rows = "", f"{self.batch}"
        if self.drafts:
            rows += f" with {self.drafts} drafts each"
        if self.draft is not None:
            passes = f", {self.draft:.1f} in a pass of the draft"
            expected.append(costs.num_experts * costs.expert_share(self.batch))
        return (
            f"Routing {routing}: {self.mean:.1f} distinct experts a layer in a decode step of {rows} "
            f"(least {min(self.layers):.1f}, most {max(self.layers):.1f}, of {costs.num_experts}){passes}; "
            f"the floors reckon with {' and '.join(f'{count:.1f}' for count in expected)}."
        )

    def speculation(self, routing: str) -> Speculation:
        """What a floor reckons with that takes these experts as read."""
        return Speculation(self.drafts, routing == "correlated", self.mean, self.draft)


def count_experts(engine: Engine, batch: int, length: Lengths) -> DistinctExperts | None:
    """Runs some greedy decode steps of such a batch, without graphs.

    With speculation each step takes a token and drafts of every request, and the model's own draft proposes the next,
    as if all had been accepted.

    Returns:
        None for a model of which no layer has experts, and where the cache does not hold the whole batch.
    """
    model, speculative = engine.loaded.opened.model, engine.config.speculative
    if not isinstance(model, MoETransformerModel):
        return None
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    used: dict[int, list[torch.Tensor]] = {}

    def watch(layer: int, expert_ids: torch.Tensor) -> None:
        chosen = torch.zeros(model.moe.num_experts, dtype=torch.int32, device=expert_ids.device)
        used.setdefault(layer, []).append(chosen.index_fill_(0, expert_ids.flatten().long(), 1))

    uids, plain = range(batch), model.moe
    try:
        prompts = make_prompts(fixed_lengths(batch, length.prompt, 1), engine.vocab_size)
        logits = torch.cat([_prefill(engine, uid, prompt) for uid, prompt in zip(uids, prompts, strict=True)])
        tokens = [[token] * (1 + drafts) for token in logits.argmax(dim=-1).tolist()]
        model.moe = dataclasses.replace(plain, watch=watch)
        for _ in range(min(_STEPS, length.output)):
            tokens = _step(engine, model, tokens, drafts)
    except SchedulingError:
        return None
    finally:
        model.moe = plain
        for uid in uids:
            with suppress(InvalidRequestError):  # one that was never put, after an error
                engine.flush(uid)
    counts = {layer: fmean(torch.stack(steps).sum(dim=1).tolist()) for layer, steps in sorted(used.items())}
    of_draft = [counts.pop(layer) for layer in list(counts) if layer >= model.shapes.num_layers]
    if not counts:
        return None
    return DistinctExperts(tuple(counts.values()), batch, drafts, fmean(of_draft) if of_draft else None)


@torch.inference_mode()
def _step(engine: Engine, model: MoETransformerModel, tokens: list[list[int]], drafts: int) -> list[list[int]]:
    """Each request's next token and drafts, after those that it brings."""
    seen: list[tuple[ForwardBatch, torch.Tensor]] = []
    forward = model.forward

    def run(batch: ForwardBatch) -> torch.Tensor:
        every = torch.arange(len(batch.token_ids), device=batch.token_ids.device)
        hidden = forward(dataclasses.replace(batch, logits_rows=every))
        seen.append((batch, hidden))
        return hidden.index_select(0, batch.logits_rows)

    with _instead(model, run):
        chosen = engine.put(range(len(tokens)), tokens).argmax(dim=-1)
    following = [[token] * (1 + drafts) for token in chosen.tolist()]
    if not drafts or model.proposer is None:
        return following
    ((batch, hidden),) = seen
    last_rows = batch.query_starts[1:].long() - 1
    proposed = model.proposer.propose(
        DraftBatch(batch, hidden, shift(batch.token_ids, last_rows, chosen), last_rows, drafts)
    )
    return [[row[0], *others] for row, others in zip(following, proposed.tolist(), strict=True)]


@contextmanager
def _instead(model: MoETransformerModel, run: Callable[[ForwardBatch], torch.Tensor]) -> Iterator[None]:
    """Has the model run another forward pass."""
    vars(model)["forward"] = run
    try:
        yield
    finally:
        del vars(model)["forward"]


def _prefill(engine: Engine, uid: int, prompt: list[int]) -> torch.Tensor:
    """Logits [1, V] of the last token; as many tokens a step as the engine takes."""
    most = engine.config.max_batch_tokens
    return [engine.put([uid], [prompt[at : at + most]]) for at in range(0, len(prompt), most)][-1]
