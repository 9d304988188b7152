"""Runs steps that verify drafts, accept what the target would have written itself, and propose the next ones.

Options that edit logits and log probabilities work as without drafts: each row is edited and reported as if the drafts
before it were output already, which they are where the row counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hookline.batch_processor import BatchProcessor, PreparedBatch, upload
from hookline.config import SpeculativeConfig
from hookline.errors import UsageError
from hookline.execution.ngram import NgramIndex
from hookline.execution.proposals import SampledProposals
from hookline.execution.runner import Flight, Runner, StepResult
from hookline.execution.sampler import token_logprobs
from hookline.execution.sampling_state import SamplingState, edit_logits
from hookline.execution.speculative import (
    accept,
    exact_matches,
    relaxed_matches,
    shift,
    synthetic_chance,
)
from hookline.execution.thinking import Thinking
from hookline.execution.token_masks import TokenMatcher, make_masks
from hookline.model import CacheTensors, DraftBatch, ForwardBatch, TransformerModel
from hookline.scheduling.output import SpeculativeStep, TokenLogprob
from hookline.scheduling.request import Request, ScheduledBatch, ScheduledRequest

# Which of a request's draws for an output token decides whether its draft is accepted.
COIN = 2


@dataclass(frozen=True, slots=True)
class _Rows:
    """The logits rows of a step's parts that sample: K + 1 each, those of a part one after the other.

    Attributes:
        parts: B of them.
        own: the sampling state of each part.
        states: of each row, with the drafts before it taken in.
        places: [B, K + 1] int64, the rows of each part; those past its own repeat its last.
        drafts: [B, K] int64, zeros behind each part's own.
        counts: [B] int64, how many drafts each part has.
        greedy: [B] bool, parts that take the likeliest token.
    """

    parts: Sequence[ScheduledRequest]
    own: Sequence[SamplingState]
    states: Sequence[SamplingState]
    places: torch.Tensor
    drafts: torch.Tensor
    counts: torch.Tensor
    greedy: torch.Tensor


class SpeculativeRunner(Runner):
    """The plain runner with drafts.

    Args:
        config: how drafts are proposed and accepted.
    """

    def __init__(
        self,
        model: TransformerModel,
        processor: BatchProcessor,
        cache: Mapping[str, Sequence[CacheTensors]],
        config: SpeculativeConfig,
    ) -> None:
        super().__init__(model, processor, cache)
        self.config = config
        self.proposer = model.proposer if config.method == "mtp" else None
        if config.method == "mtp":
            if self.proposer is None:
                raise UsageError("the model has no draft of its own", hint="Use the method ngram.")
            self.lookahead = config.num_speculative_tokens
        self._thinking: Thinking | None = None
        if config.use_relaxed_acceptance_for_thinking:
            if config.think_token_ids is None:
                raise UsageError("relaxed acceptance needs the tokens of thinking", hint="Give think_token_ids.")
            self._thinking = Thinking(*config.think_token_ids)
        rate = config.synthetic_acceptance_rate
        self._chance = None if rate is None else synthetic_chance(rate, config.num_speculative_tokens)
        self._sampled = SampledProposals(model.device) if config.draft_proposal == "sampled" else None
        self._ngrams: dict[Request, NgramIndex] = {}

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, states: Mapping[str, SamplingState]) -> Flight:
        prepared = self.processor.prepare(batch, self.cache)
        hidden, wanted = self._forward(prepared)
        prompts = {
            span.request.request_id: (span.start + 1, self._prompt_logprobs(span, wanted))
            for span in prepared.prompt_spans
        }
        parts = [part for part in batch.requests if part.samples]
        new, logprobs = list[list[int]](), dict[str, Sequence[TokenLogprob]]()
        if parts:
            rows = wanted if prepared.sample_rows is None else wanted.index_select(0, prepared.sample_rows)
            logits, own = self.model.compute_logits(rows), self._rows(parts, states)
            new = self._verify(own, self._mask(own, logits))
            logprobs = dict(_logprobs(parts, new, logits))
        drafts = self._propose(batch, parts, prepared.forward, hidden, states, new)
        result = StepResult(
            token_ids=new,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            failed=tuple(part.request for part, tokens in zip(parts, new, strict=True) if tokens[-1] < 0),
            speculative=[
                SpeculativeStep(len(part.drafts), len(tokens) - 1, tokens[-1], tuple(proposed))
                for part, tokens, proposed in zip(parts, new, drafts, strict=True)
            ],
        )
        return Flight(batch, result)

    def release(self, request: Request) -> None:
        super().release(request)
        self._ngrams.pop(request, None)
        if self._thinking is not None:
            self._thinking.forget(request)
        if self._sampled is not None:
            self._sampled.forget(request)

    def _forward(self, prepared: PreparedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all rows, where the model's own draft needs them, and of those whose logits are wanted."""
        if self.proposer is None:
            hidden = self.model.forward(prepared.forward)
            return hidden, hidden
        return hidden_states(self.model, prepared)

    def _rows(self, parts: Sequence[ScheduledRequest], states: Mapping[str, SamplingState]) -> _Rows:
        counts = [len(part.drafts) for part in parts]
        width, first = max(counts), 0
        own = [states[part.request.request_id] for part in parts]
        places, drafts, row_states = list[list[int]](), list[list[int]](), list[SamplingState]()
        for part, count, state in zip(parts, counts, own, strict=True):
            state.follow(part.request.output_token_ids)
            row_states.append(state)
            for draft in part.drafts:
                row_states.append(row_states[-1].after(draft))
            places.append([first + min(column, count) for column in range(width + 1)])
            drafts.append([*part.drafts, *[0] * (width - count)])
            first += count + 1
        return _Rows(
            parts=parts,
            own=own,
            states=row_states,
            places=self._tensor(places),
            drafts=self._tensor(drafts).view(len(parts), width),
            counts=self._tensor(counts),
            greedy=self._tensor([not state.temperature for state in own], torch.bool),
        )

    def _verify(self, rows: _Rows, logits: torch.Tensor) -> list[list[int]]:
        """The new tokens of each part: the drafts that are accepted, and the token after them, or -1 alone for none.

        Where there is no token after accepted drafts, they may be the request's end, behind which it needs none: the
        last of them stands in as the token after the others, and the next step finds what there is.
        """
        targets = self._tensor(self.sampler.sample(logits, rows.states).token_ids)[rows.places]
        if self._chance is not None:
            usable = targets >= 0
            targets = torch.where(usable, logits.argmax(dim=-1)[rows.places], targets)
            matches = usable[:, :-1] & (self._uniforms(rows, COIN) < self._chance)
        else:
            matches = exact_matches(rows.drafts, targets)
        if rows.drafts.numel() and (self._thinking is not None or self._sampled is not None):
            edited = [(row, state) for row, state in enumerate(rows.states) if state.edits_logits]
            scores = logits.float().clone() if edited else logits.float()
            if edited:
                edit_logits(scores, edited)
            matches, targets = self._verify_softly(rows, scores, matches, targets)
        verdict = accept(matches, targets, rows.counts)
        answer: list[list[int]] = torch.stack([verdict.counts, verdict.next_tokens], dim=1).tolist()
        return [
            [*part.drafts[:n], token] if token >= 0 or n == 0 else [*part.drafts[:n]]
            for part, (n, token) in zip(rows.parts, answer, strict=True)
        ]

    def _verify_softly(
        self, rows: _Rows, scores: torch.Tensor, matches: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`matches` and `targets` with those of parts that accept other drafts than the target's own choice.

        Args:
            scores: [R, V] float32, the logits after all edits.
        """
        places = rows.places[:, :-1]
        usable = targets[:, :-1] >= 0
        if self._thinking is not None:
            thinks = self._tensor([self._thinking.is_thinking(part.request) for part in rows.parts], torch.bool)
            soft = (thinks & ~rows.greedy)[:, None] & usable
            config = self.config
            found = relaxed_matches(scores[places], rows.drafts, config.relaxed_topk, config.relaxed_delta)
            recovered = scores.argmax(dim=-1)[places]
        elif self._sampled is not None:
            soft = ~rows.greedy[:, None] & usable
            requests = [part.request for part in rows.parts]
            found, recovered = self._sampled.verify(
                requests, rows.drafts, scores, places, rows.states, self._uniforms(rows, COIN), self._uniforms(rows)
            )
        else:
            return matches, targets
        soft = soft & (torch.arange(soft.shape[1], device=soft.device) < rows.counts[:, None])
        matches = torch.where(soft, found, matches)
        return matches, torch.cat([torch.where(soft, recovered, targets[:, :-1]), targets[:, -1:]], dim=1)

    def _uniforms(self, rows: _Rows, stream: int = 0) -> torch.Tensor:
        """[B, K] float64, each part's draws for the output tokens in its drafts' places."""
        width = rows.drafts.shape[1]
        values = [[state.uniform(ahead, stream) for ahead in range(width)] for state in rows.own]
        return self._tensor(values, torch.float64).view(len(rows.own), width)

    def _mask(self, rows: _Rows, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [R, V] with only the tokens that the parts' matchers allow."""
        limited, first = list[tuple[int, TokenMatcher, Sequence[int]]](), 0
        for part, state in zip(rows.parts, rows.own, strict=True):
            if state.matcher is not None:
                limited.append((first, state.matcher, part.drafts))
            first += len(part.drafts) + 1
        masks = make_masks(limited, logits.shape[1], logits.device)
        return logits if masks is None else masks.apply(logits)

    def _propose(
        self,
        batch: ScheduledBatch,
        parts: Sequence[ScheduledRequest],
        forward: ForwardBatch,
        hidden: torch.Tensor,
        states: Mapping[str, SamplingState],
        new: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Drafts behind the new tokens of each of `parts`, which are those of the batch that sample."""
        if self.proposer is None:
            return [self._look_up(part.request, tokens) for part, tokens in zip(parts, new, strict=True)]
        ends, following, row, rest = list[int](), list[int](), 0, iter(new)
        for part in batch.requests:
            row += part.count
            if part.samples:
                tokens = next(rest)
                ends.append(row - 1 - len(part.drafts) + len(tokens) - 1)
                following.append(max(tokens[-1], 0))  # of a request that fails it is no token
            else:
                ends.append(row - 1)
                following += part.request.token_ids(part.start + part.count, part.start + part.count + 1)
        last_rows = self._tensor(ends)
        drafting = DraftBatch(
            forward=forward,
            hidden=hidden,
            next_token_ids=shift(forward.token_ids, last_rows, self._tensor(following)),
            last_rows=last_rows,
            num_drafts=self.config.num_speculative_tokens,
        )
        if self._sampled is None:
            drafts = self.proposer.propose(drafting)
        else:
            requests = [part.request for part in batch.requests]
            ahead = {part.request: len(tokens) for part, tokens in zip(parts, new, strict=True)}
            drafts = self._sampled.propose(self.proposer, drafting, requests, states, ahead)
        every: list[list[int]] = drafts.tolist()
        return [row for part, row in zip(batch.requests, every, strict=True) if part.samples]

    def _look_up(self, request: Request, tokens: Sequence[int]) -> list[int]:
        index = self._ngrams.get(request)
        if index is None:
            index = self._ngrams[request] = NgramIndex(self.config.ngram_min, self.config.ngram_max)
        prompt = request.prompt_token_ids
        if len(index) < len(prompt):
            index.extend(prompt)
        index.extend(request.output_token_ids[len(index) - len(prompt) :])
        index.extend(tokens)
        return index.propose(self.config.num_speculative_tokens)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self.model.device)


def hidden_states(model: TransformerModel, prepared: PreparedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """States of all rows [T, M], which a draft needs, and of those whose logits are wanted [R, M]."""
    forward = prepared.forward
    every = torch.arange(forward.token_ids.shape[0], device=forward.token_ids.device)
    hidden = model.forward(replace(forward, logits_rows=every))
    return hidden, hidden.index_select(0, forward.logits_rows)


def _logprobs(
    parts: Sequence[ScheduledRequest], new: Sequence[Sequence[int]], logits: torch.Tensor
) -> Iterator[tuple[str, list[TokenLogprob]]]:
    """Entries of the new tokens of each part that wants them, by request id."""
    first = 0
    for part, tokens in zip(parts, new, strict=True):
        top = part.request.params.logprobs
        if top is not None and tokens[-1] >= 0:
            yield part.request.request_id, token_logprobs(logits[first : first + len(tokens)].float(), tokens, top)
        first += len(part.drafts) + 1
