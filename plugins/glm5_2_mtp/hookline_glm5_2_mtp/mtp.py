"""The unified model: the target, and its draft, which proposes what the target verifies in its next step.

The draft is one decoder layer. Of a row with the target's state g at position p and the token u at p + 1:

    z = J [norm(embed(u)), norm(g)]          h = layer(z) at position p          logits = head(norm(h)) for p + 2

Draft step 0 runs all rows of the target's step, with their latents, index keys and lists. Steps i = 1 to D - 1 run one
row a request: u is the draft before, g = norm(h) of the row before, and the position is that of the last accepted token
plus i. They attend to the list of the last accepted row, as it stands: it names no position behind that row, so that
every entry which is attended to was made from a state of the target. They write a latent each and no index key; the
next step 0 writes all of that anew. So it is where the config shares the list (`share_mtp_index`); without that each
later step runs the indexer on its own row and writes its key, and may attend to entries of drafts before it.

Embedding and head are the target's. Shape letters as in core/model.py, with D drafts in place of a head's size.

Sources: DeepSeek-V3 (multi-token prediction), GLM-5.2 (list and cache of the first step shared by the later ones).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hookline.config import EngineConfig
from hookline.errors import UsageError
from hookline.model import CacheSpec, DraftBatch, ForwardBatch, Proposer
from hookline.parallel import Parallel
from hookline_glm5_2_mtp.attention import LatentAttention
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig
from hookline_glm5_2_mtp.container import DraftLayer
from hookline_glm5_2_mtp.model import GlmMoeDsaModel, Shapes
from hookline_kernels.embedding import embedding
from hookline_kernels.linear import linear
from hookline_kernels.rms_norm import rms_norm
from hookline_kernels.rms_norm_pair import rms_norm_pair

_LATENT, _INDEX = "draft_latent", "draft_index"


class UnifiedMTPGlmMoeDsaModel(GlmMoeDsaModel):
    """The target with the draft's weights and cache groups, over the same block tables.

    Raises:
        UsageError: if the checkpoint has no layer for drafts.
    """

    has_draft = True

    def __init__(self, config: GlmMoeDsaConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        super().__init__(config, engine_config, parallel)
        if not config.num_mtp_layers:
            raise UsageError(
                "the checkpoint has no layer for drafts: num_nextn_predict_layers is 0",
                hint="Take --speculative-method ngram, or leave speculation out.",
            )
        self.proposer = MTPProposer(self)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        c = self.config
        latent, key = ("latent", (c.latent_width,)), ("key", (c.index_head_dim,))
        draft = (CacheSpec(_LATENT, 1, (latent,), self.dtype), CacheSpec(_INDEX, 1, (key,), self.dtype))
        return (*super().cache_specs(), *draft)

    def checkpoint_shapes(self) -> Shapes:
        yield from super().checkpoint_shapes()
        prefix, size = f"model.layers.{self.config.num_layers}", self.config.hidden_size
        for name, shape in self._layer_shapes(full=True, sparse=True):
            yield f"{prefix}.{name}", shape
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{name}.weight", (size,)
        yield f"{prefix}.eh_proj.weight", (size, 2 * size)


class MTPProposer(Proposer):
    """Proposes with the draft's layer of `model`, once its containers are filled."""

    def __init__(self, model: GlmMoeDsaModel) -> None:
        self.model = model
        self.attention = LatentAttention(
            config=model.config,
            num_heads=model.heads.num_heads,
            latent_group=_LATENT,
            index_group=_INDEX,
            needs_list=True,
        )

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        own, *later = _rows_of(batch.forward, batch.last_rows, batch.num_drafts)
        x = self._join(batch.next_token_ids, batch.hidden)
        hidden, positions = self._layer(x, batch.forward, None, last=(batch.last_rows, own))
        shared = positions.index_select(0, batch.last_rows) if self.model.config.share_mtp_index else None
        drafts = [batch.choose(self.model.compute_logits(hidden), 0)]
        for step, rows in enumerate(later, start=1):
            hidden, _ = self._layer(self._join(drafts[-1], hidden), rows, shared)
            drafts.append(batch.choose(self.model.compute_logits(hidden), step))
        return torch.stack(drafts, dim=1)

    @property
    def _draft(self) -> DraftLayer:
        if self.model.draft is None:
            raise RuntimeError("the draft has no weights: build the containers before anything is proposed")
        return self.model.draft

    def _join(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input [T, M] of the tokens and of the states [T, M] before them."""
        draft, eps = self._draft, self.model.config.norm_eps
        embedded = embedding(token_ids, self.model.weights.word_emb, self.model.dtype)
        return linear(rms_norm_pair(embedded, draft.embedding_norm, hidden, draft.hidden_norm, eps), draft.join_w)

    def _layer(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        positions: torch.Tensor | None,
        last: tuple[torch.Tensor, ForwardBatch] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States after the last norm, [B, M], and the list of all rows; fills the caches for all of `x` [T, M].

        Args:
            positions: the list; None runs the indexer.
            last: the rows [B] whose states are wanted, and the batch of those alone; None for all. Of the others
                nothing is read but their cache entries, so that experts are run for none of them.
        """
        model, draft, eps = self.model, self._draft, self.model.config.norm_eps
        hidden, positions = self.attention(
            draft,
            rms_norm(x, draft.attn_norm, eps),
            model.rotary(batch.positions, batch.rope_lengths),
            batch,
            positions,
            latent_place=0,
            index_place=0 if positions is None else None,
        )
        if positions is None:
            raise RuntimeError("the draft's attention made no list, which its later steps need")
        if last is not None:
            rows, batch = last
            hidden, x = hidden.index_select(0, rows), x.index_select(0, rows)
        hidden, x = rms_norm(hidden, draft.mlp_norm, eps, x)
        hidden = model.feed_forward(model.config.num_layers, draft, hidden, batch)
        norm = model.weights.final_norm if draft.final_norm is None else draft.final_norm
        return rms_norm(hidden, norm, eps, x)[0], positions


def _rows_of(forward: ForwardBatch, last_rows: torch.Tensor, num_drafts: int) -> list[ForwardBatch]:
    """The batch of each draft step, with one row a request: the last accepted one, then those behind it.

    Requests of padding, whose context is empty, keep an empty one and own no slot. A row for which the block table has
    no place writes nowhere: what it proposes is as good, for nothing that is attended to lies there.
    """
    tables, block_size = forward.block_tables, forward.cache[_LATENT][0]["latent"].shape[1]
    is_real = forward.context_lens > 0
    order = torch.arange(len(last_rows) + 1, device=last_rows.device)
    starts = order.int()
    steps = torch.arange(num_drafts, device=last_rows.device)[:, None]
    positions = forward.positions.index_select(0, last_rows) * is_real + steps * is_real  # [D, B]
    room = tables.shape[1] * block_size
    blocks = tables[order[:-1], positions.clamp(max=room - 1) // block_size].long()
    slots = torch.where(is_real & (positions < room), blocks * block_size + positions % block_size, -1)
    context_lens = ((positions + 1).clamp(max=room) * is_real).int()
    lengths = forward.rope_lengths
    if lengths is not None:
        lengths = torch.maximum(lengths.index_select(0, last_rows), positions + 1)
    return [
        replace(
            forward,
            token_ids=order[:0],  # each step's are the drafts of the one before
            positions=positions[step],
            slots=slots[step],
            query_starts=starts,
            context_lens=context_lens[step],
            logits_rows=order[:-1],
            num_decodes=len(last_rows),
            max_query_len=1,
            max_context_len=min(forward.max_context_len + step, room),
            rope_lengths=None if lengths is None else lengths[step],
        )
        for step in range(num_drafts)
    ]
