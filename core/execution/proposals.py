"""Drafts that are drawn instead of taken by argmax, and the probabilities that their verification needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hookline.errors import PluginError
from hookline.execution.sampling_state import SamplingState
from hookline.execution.speculative import draw, probabilities, sampled_matches
from hookline.model import DraftBatch, Proposer
from hookline.scheduling.request import Request

# Which of a request's draws for an output token chooses its draft.
_PROPOSAL = 1


class SampledProposals:
    """Draws the drafts of sampled requests at their own temperature, top-k, top-p and min-p.

    Args:
        device: where the logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._proposed: dict[Request, torch.Tensor] = {}  # [D, V] each

    def forget(self, request: Request) -> None:
        """Drops what is known of a request's drafts."""
        self._proposed.pop(request, None)

    def propose(
        self,
        proposer: Proposer,
        batch: DraftBatch,
        requests: Sequence[Request],
        states: Mapping[str, SamplingState],
        new: Mapping[Request, int],
    ) -> torch.Tensor:
        """Drafts [B, D] of all requests of the batch.

        Args:
            new: how many output tokens the step gives each request; those that it gives none are left out.

        Raises:
            PluginError: if the proposer does not choose its tokens by `DraftBatch.choose`.
        """
        rows = [states[request.request_id] for request in requests]
        options, greedy = _options(rows, self._device)
        kept: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            found = probabilities(logits, *options)
            ahead = [new.get(request, 0) + step for request in requests]
            draws = [state.uniform(count, _PROPOSAL) for state, count in zip(rows, ahead, strict=True)]
            kept.append(found)
            drawn = draw(found, torch.tensor(draws, dtype=torch.float64, device=self._device))
            return torch.where(greedy, logits.argmax(dim=-1), drawn)

        drafts = proposer.propose(replace(batch, choose=choose))
        if len(kept) != batch.num_drafts:
            raise PluginError(
                f"{type(proposer).__name__} asked {len(kept)} times which token to propose, for {batch.num_drafts}",
                hint="Sampled proposals need a proposer that takes each token from DraftBatch.choose. Use argmax.",
            )
        together = torch.stack(kept, dim=1)
        for row, request in enumerate(requests):
            if request in new and rows[row].temperature:
                self._proposed[request] = together[row]
        return drafts

    def verify(
        self,
        requests: Sequence[Request],
        drafts: torch.Tensor,
        scores: torch.Tensor,
        places: torch.Tensor,
        states: Sequence[SamplingState],
        coins: torch.Tensor,
        draws: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sampled_matches`: matches and recovered tokens [B, K].

        A draft whose probabilities are not known any more counts as proposed for certain, which keeps the distribution
        of what is committed, and only accepts it less often.

        Args:
            scores: [R, V] float32, logits after all edits.
            places: [B, K], the row of each draft.
            states: of each row.
        """
        width, vocab = drafts.shape[1], scores.shape[1]
        options, _ = _options(states, self._device)
        proposed = torch.zeros((*drafts.shape, vocab), device=self._device)
        for row, request in enumerate(requests):
            known = self._proposed.get(request)
            if known is None:
                proposed[row].scatter_(-1, drafts[row][:, None], 1.0)
            else:
                proposed[row, : len(known)] = known[:width]
        target = probabilities(scores, *options)[places]
        return sampled_matches(drafts, proposed, target, coins, draws)


def _options(
    states: Sequence[SamplingState], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Temperature, top-k, top-p and min-p of each row, [R, 1]; and which rows are greedy, [R]."""
    columns = [(s.temperature or 1.0, s.top_k, s.params.top_p, s.params.min_p) for s in states]
    packed = torch.tensor(columns, dtype=torch.float64, device=device).view(len(states), 4)
    greedy = torch.tensor([not s.temperature for s in states], device=device)
    return (packed[:, :1], packed[:, 1:2].long(), packed[:, 2:3], packed[:, 3:]), greedy
