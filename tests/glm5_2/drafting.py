"""A target and its draft driven step by step, without scheduler or sampler, so that tests can look at every entry."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hookline import EngineConfig
from hookline.checkpoint.random import RandomReader
from hookline.config import SpeculativeConfig
from hookline.execution.kv_cache import allocate_cache
from hookline.execution.speculative import shift
from hookline.loading import load_model
from hookline.model import DraftBatch, ForwardBatch
from hookline.weight_adapter import LazyTensor
from hookline_glm5_2_mtp.attention import LatentAttention
from hookline_glm5_2_mtp.mtp import MTPProposer, UnifiedMTPGlmMoeDsaModel
from tests.glm5_2.models import GLM, SIZES

S = 4
BLOCKS = 64
TOP_K = 12
FIELDS: dict[str, Any] = (
    SIZES
    | GLM
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "index_topk": TOP_K,
        "indexer_types": ["full", "full", "shared", "shared"],
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
    }
)
GROUPS = ("target_latent", "target_index", "draft_latent", "draft_index")


class Reader(RandomReader):
    """Random weights that are large enough for each token to matter."""

    def tensors(self) -> Iterator[LazyTensor]:
        for tensor in super().tensors():
            factor = 8.0 if len(tensor.shape) == 2 else 1.0
            yield replace(tensor, load=lambda load=tensor.load, factor=factor: load() * factor)


@dataclass(eq=False)
class Request:
    """A request between two steps; `drafts` are verified by the next one, all that `tokens` has is committed."""

    tokens: list[int]
    table: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What a step computed, for each of its requests.

    Attributes:
        logits: the target's, of all rows [T, V].
        draft_logits: [D, B, V].
        drafts: [B, D].
        lists: what each draft step after step 0 attended to, [B, K] each.
        batches: of each draft step, as its attention got them.
        counts: accepted drafts.
    """

    logits: torch.Tensor
    draft_logits: torch.Tensor
    drafts: torch.Tensor
    lists: list[torch.Tensor]
    batches: list[ForwardBatch]
    counts: list[int]


class Watch:
    """The draft's attention, with notes of what it was given."""

    def __init__(self, attention: LatentAttention) -> None:
        self.attention = attention
        self.calls: list[tuple[ForwardBatch, torch.Tensor | None, torch.Tensor | None]] = []
        self.before: Callable[[int], None] = lambda step: None

    def __call__(self, layer: Any, x: Any, rotary: Any, batch: Any, positions: Any, **places: Any) -> Any:
        self.before(len(self.calls))
        result = self.attention(layer, x, rotary, batch, positions, **places)
        self.calls.append((batch, positions, result[1]))
        return result


@cache
def _load(source: Path | None, device: str, fields: str) -> UnifiedMTPGlmMoeDsaModel:
    options = EngineConfig(
        str(source or "random"),
        device=device,
        dtype="float32",
        load_format="auto" if source else "random",
        block_size=S,
        speculative=SpeculativeConfig(),
    )
    model = load_model(options, None if source else Reader(FIELDS | json.loads(fields))).opened.model
    assert isinstance(model, UnifiedMTPGlmMoeDsaModel)
    return model


class Drafting:
    """The unified model over a cache whose entries are all `fill` at first.

    Args:
        num_drafts: D.
        source: a checkpoint; random weights of `FIELDS` and `fields` without one.
    """

    def __init__(
        self,
        num_drafts: int = 3,
        source: Path | None = None,
        fill: float = torch.nan,
        device: str = "cpu",
        **fields: Any,
    ) -> None:
        model = copy.copy(_load(source, device, json.dumps(fields)))
        proposer = MTPProposer(model)
        self.model, self.num_drafts, self.proposer = model, num_drafts, proposer
        self.watch = Watch(proposer.attention)
        proposer.attention = self.watch  # type: ignore[assignment]
        self.cache: Any = allocate_cache(model.cache_specs(), BLOCKS, S, model.device)
        for tensor in self._tensors():
            tensor.fill_(fill)
        self._free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for group in self.cache.values() for layer in group for tensor in layer.values())

    def add(self, tokens: Sequence[int], room: int = 32) -> Request:
        """A request with cache blocks for so many tokens more."""
        blocks = -(-(len(tokens) + room) // S)
        table, self._free = self._free[:blocks], self._free[blocks:]
        return Request(list(tokens), table)

    def entries(self, request: Request, group: str, end: int, begin: int = 0) -> torch.Tensor:
        """Cache entries of positions `begin` to `end` in all layers of a group, [layers, end - begin, width]."""
        place = torch.arange(begin, end)
        slots = torch.tensor(request.table)[place // S] * S + place % S
        return torch.stack([next(iter(layer.values())).flatten(0, 1)[slots] for layer in self.cache[group]])

    def poison(self, request: Request, begin: int, groups: Sequence[str] = GROUPS, value: float = torch.nan) -> None:
        """Fills a request's entries from position `begin` on."""
        place = torch.arange(begin, len(request.table) * S)
        slots = torch.tensor(request.table)[place // S] * S + place % S
        for group in groups:
            for layer in self.cache[group]:
                for tensor in layer.values():
                    tensor.flatten(0, 1)[slots] = value

    def batch(self, requests: Sequence[Request], chunk: int, padding: int) -> tuple[ForwardBatch, list[int]]:
        """The merged batch, each request's next tokens (at most `chunk`) and its drafts; and the counts of the former.

        Requests of padding follow, as a captured graph has them: a row each, no context, a table of anything.
        """
        ids, positions, slots, counts, new = [], [], [], [], []
        width = max(len(request.table) for request in requests)
        tables = torch.full((len(requests) + padding, width), BLOCKS - 1, dtype=torch.int32)
        for row, request in enumerate(requests):
            fresh = request.tokens[request.computed :][:chunk]
            drafts = request.drafts if request.computed + len(fresh) == len(request.tokens) else []
            place = torch.arange(request.computed, request.computed + len(fresh) + len(drafts))
            tables[row, : len(request.table)] = torch.tensor(request.table)
            ids += [*fresh, *drafts]
            positions.append(place)
            slots.append(torch.tensor(request.table)[place // S] * S + place % S)
            counts.append(len(place))
            new.append(len(fresh))
        contexts = [request.computed + count for request, count in zip(requests, counts, strict=True)] + [0] * padding
        counts += [1] * padding
        device = self.model.device
        forward = ForwardBatch(
            token_ids=torch.tensor([*ids, *[0] * padding], device=device),
            positions=torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]).to(device),
            slots=torch.cat([*slots, torch.full((padding,), -1)]).to(device),
            block_tables=tables.to(device),
            query_starts=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            logits_rows=torch.arange(sum(counts), device=device),
            num_decodes=0,
            max_query_len=max(counts),
            max_context_len=max(contexts),
            rope_lengths=None,
            cache=self.cache,
        )
        return forward, new

    @torch.inference_mode()
    def step(
        self,
        requests: Sequence[Request],
        accept: Sequence[int] | None = None,
        following: Sequence[int] | None = None,
        chunk: int = 1000,
        padding: int = 0,
    ) -> Step:
        """One step of all requests, after which they are as it leaves them.

        Args:
            accept: how many drafts each accepts, right or wrong; by default as greedy verification says.
            following: the token after those, by default the target's likeliest.
        """
        forward, new = self.batch(requests, chunk, padding)
        hidden = self.model.forward(forward)
        logits = self.model.compute_logits(hidden)
        best, starts = logits.argmax(-1).tolist(), forward.query_starts.tolist()
        counts, last_rows, next_tokens = [], [], []
        for row, (request, fresh) in enumerate(zip(requests, new, strict=True)):
            last = starts[row] + fresh - 1
            n = 0
            if request.computed + fresh < len(request.tokens):
                next_tokens.append(request.tokens[request.computed + fresh])
            else:
                if request.drafts and accept is not None:
                    n = accept[row]
                elif request.drafts:
                    matches = [draft == best[last + place] for place, draft in enumerate(request.drafts)]
                    n = [*matches, False].index(False)
                request.tokens += request.drafts[:n]
                request.tokens.append(best[last + n] if following is None else following[row])
                next_tokens.append(request.tokens[-1])
            request.computed += fresh + n
            counts.append(n)
            last_rows.append(last + n)
        rows = torch.tensor([*last_rows, *starts[len(requests) : -1]], device=hidden.device)
        after = torch.tensor([*next_tokens, *[0] * padding], device=hidden.device)
        drafts, draft_logits = self._propose(forward, hidden, shift(forward.token_ids, rows, after), rows)
        for request, proposed in zip(requests, drafts.tolist(), strict=False):
            request.drafts = proposed
        kept = slice(len(requests))
        return Step(
            logits=logits,
            draft_logits=draft_logits[:, kept],
            drafts=drafts[kept],
            lists=[given[kept] for _, given, _ in self.watch.calls[1:] if given is not None],
            batches=[batch for batch, _, _ in self.watch.calls],
            counts=counts,
        )

    def _propose(
        self, forward: ForwardBatch, hidden: torch.Tensor, next_token_ids: torch.Tensor, last_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            assert step == len(found)
            found.append(logits)
            return logits.argmax(-1)

        self.watch.calls.clear()
        batch = DraftBatch(forward, hidden, next_token_ids, last_rows, self.num_drafts, choose)
        drafts = self.proposer.propose(batch)
        return drafts, torch.stack(found)


def prompt(length: int, seed: int = 0) -> list[int]:
    """So many random tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, FIELDS["vocab_size"], (length,), generator=generator).tolist()
