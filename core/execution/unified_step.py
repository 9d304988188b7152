"""A whole speculative step on the device: verify the drafts, settle them, propose the next ones.

It reads nothing from the host, not even where a request stands, and its shapes are fixed by the number of requests and
of drafts, so that one CUDA graph holds it and the next step can be launched before the host knows what it gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hookline.execution.decode_step import DeviceStep, choose_tokens
from hookline.execution.draft_batch import DraftDeviceBatch
from hookline.execution.token_masks import StepMasks
from hookline.model import CacheTensors, DraftBatch, Proposer, TransformerModel
from hookline_kernels.draft_inputs import SLOT, draft_inputs
from hookline_kernels.settle_drafts import settle_drafts


class UnifiedStep(DeviceStep):
    """Steps of K + 1 rows a request.

    Args:
        proposer: the model's own draft.
        chance: accepts each draft by a coin of this chance, and chooses greedily, for benchmarks; None verifies.

    Attributes:
        masks: what the rows of the next step may choose; the host writes them where a request is limited.
    """

    batch: DraftDeviceBatch

    def __init__(
        self,
        model: TransformerModel,
        cache: Mapping[str, Sequence[CacheTensors]],
        batch: DraftDeviceBatch,
        max_context_len: int,
        rope_lengths: bool,
        *,
        proposer: Proposer,
        chance: float | None,
    ) -> None:
        super().__init__(model, cache, batch, max_context_len, rope_lengths)
        self.proposer = proposer
        self.chance = chance
        self.num_drafts = self.each - 1
        self.masks = StepMasks(self.sizes[-1] * self.each, model.shapes.vocab_size, batch.device)

    @torch.inference_mode()
    def _run(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The answer [B, 2K + 2] int64: how many tokens each request gets, those (see `Settled`), the next drafts."""
        batch, num_drafts = self.batch, self.num_drafts
        inputs = batch.inputs.first(rows.shape[1])
        draft_inputs(rows, batch.kept, batch.drafting, inputs, batch.block_size, num_drafts)
        if self.chance is not None:
            inputs.temperature.zero_()
        forward = self._forward_batch(inputs)
        hidden = self.model.forward(forward)
        logits = self.model.compute_logits(hidden)
        self.masks.apply(logits)
        targets = choose_tokens(logits, inputs.options)
        settled = settle_drafts(rows, inputs, targets, batch.kept, batch.drafting, chance=self.chance)
        drafts = self.proposer.propose(
            DraftBatch(
                forward=forward,
                hidden=hidden,
                next_token_ids=settled.next_token_ids,
                last_rows=settled.last_rows,
                num_drafts=num_drafts,
            )
        )
        batch.drafting.drafts.index_copy_(0, rows[SLOT].long(), drafts)
        settled.answer[:, num_drafts + 2 :].copy_(drafts)
        return (settled.answer,)
