"""What the hardware allows: the least time of a decode step, a prefill and a whole workload. Pure arithmetic.

    decode step   (weight bytes read + sum over requests of context * cache bytes a token) / bandwidth,
                  and not less than FLOPs / peak
    prefill       2 * tokens * active weights / peak + 2 * S^2 * H * D * layers / attention rate  (causal, S tokens)
    workload      its prefills, its cache reads, and for each decoded token max(2 * weights / peak, weight bytes /
                  (batch * bandwidth)), one after the other
    experts       of E experts, k chosen by each of T tokens independently, E * (1 - (1 - k / E)^T) are read
    speculation   a step of B requests with K drafts each reads the target's weights for B * (K + 1) rows and its head,
                  then K times the draft's layers for B rows and the head; each pass reads its own cache once

Letters as in model.py: S tokens of one prompt here, H heads, D head size. Windows of attention are not considered;
where a token attends to a list, no more than the list's entries are read of a context, index keys excepted. The draft's
first pass has its attention run all rows, and its experts the last row of each request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hookline.benchmark.workload import Lengths


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do; None where that is not known.

    Attributes:
        bandwidth: bytes a second that a kernel can read.
        peak: FLOP a second of large matrix products in the model's type.
        attention: FLOP a second of the best known causal attention.
        source: where the numbers are from.
    """

    bandwidth: float | None = None
    peak: float | None = None
    attention: float | None = None
    source: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What a model costs, read from its parameters and cache groups.

    Attributes:
        layer_bytes, layer_weights: bytes and number of weights that every token passes, experts and head left out.
        head_bytes, head_weights: of the output head, which only tokens that sample pass.
        cache_bytes: bytes of cache that one token takes, over all groups.
        attention_width: query heads * head size * layers.
        expert_bytes, expert_weights: of all experts of all layers; 0 without experts.
        num_experts, experts_per_token: E and k of a layer.
        listed_bytes, list_length: of `cache_bytes`, those of which a token reads no more than so many entries; 0 where
            it reads all.
        draft: of the draft's own layers, without a head; None where the model has no draft of its own.
    """

    layer_bytes: int
    layer_weights: int
    head_bytes: int
    head_weights: int
    cache_bytes: int
    attention_width: int
    expert_bytes: int = 0
    expert_weights: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    listed_bytes: int = 0
    list_length: int = 0
    draft: ModelCosts | None = None

    def step_bytes(self, tokens: float, distinct: float | None = None) -> float:
        """Weight bytes that one step over `tokens` tokens reads; the embedding's few rows are not counted.

        Args:
            distinct: experts of a layer that it reads, if that is known.
        """
        share = self.expert_share(tokens) if distinct is None else distinct / max(1, self.num_experts)
        return self.layer_bytes + self.head_bytes + self.expert_bytes * share

    def context_bytes(self, context: float) -> float:
        """Cache bytes that one token reads of a context of so many."""
        return self.cache_bytes * context - self.listed_bytes * max(0.0, context - self.list_length)

    def attended(self, length: int) -> float:
        """Pairs of query and key in a causal prompt of so many tokens."""
        listed = min(length, self.list_length) if self.listed_bytes else length
        return listed * listed / 2 + (length - listed) * listed

    def expert_share(self, tokens: float) -> float:
        """The part of a layer's experts that are chosen by any of `tokens` tokens; 0 without experts."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** tokens if self.num_experts else 0.0

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with, the head left out."""
        chosen = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return self.layer_weights + self.expert_weights * chosen

    @property
    def token_flops(self) -> float:
        """FLOP of one decoded token in matrix products, the head included, attention not."""
        return 2 * (self.active_weights + self.head_weights)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a decode step speculates, by default not at all.

    Attributes:
        drafts: K, drafts that it verifies of each request, or their mean.
        correlated: whether all rows of a request are taken to choose the same experts.
        distinct, draft_distinct: experts of a layer that the target and each pass of the draft read, if that is known.
    """

    drafts: float = 0
    correlated: bool = False
    distinct: float | None = None
    draft_distinct: float | None = None

    def choices(self, batch: int) -> float:
        """Rows of the target's that choose their experts independently."""
        return batch if self.correlated else batch * (1 + self.drafts)


PLAIN = Speculation()


def decode_floor(
    costs: ModelCosts, limits: Limits, batch: int, context: float, speculation: Speculation = PLAIN
) -> float | None:
    """Least seconds of a decode step of `batch` requests with `context` tokens each; None without a bandwidth."""
    if limits.bandwidth is None:
        return None
    weights, cache, flops = _decode(costs, batch, context, speculation)
    seconds = (weights + cache) / limits.bandwidth
    return seconds if limits.peak is None else max(seconds, flops / limits.peak)


def serial_decode_floor(
    costs: ModelCosts, limits: Limits, batch: int, context: float, speculation: Speculation = PLAIN
) -> float | None:
    """The same where matrix products and attention run one after the other, as kernels do."""
    if limits.bandwidth is None or limits.peak is None:
        return None
    weights, cache, flops = _decode(costs, batch, context, speculation)
    return max(weights / limits.bandwidth, flops / limits.peak) + cache / limits.bandwidth


def _decode(costs: ModelCosts, batch: int, context: float, speculation: Speculation) -> tuple[float, float, float]:
    """Weight bytes, cache bytes, and FLOP of matrix products of one decode step."""
    drafts, draft = speculation.drafts, costs.draft
    weights = costs.step_bytes(speculation.choices(batch), speculation.distinct)
    cache = costs.context_bytes(context)
    flops = (1 + drafts) * costs.token_flops
    if draft is not None:
        weights += drafts * (draft.step_bytes(batch, speculation.draft_distinct) + costs.head_bytes)
        cache += drafts * draft.context_bytes(context)
        flops += drafts * (draft.token_flops + 2 * costs.head_weights)
    return weights, batch * cache, batch * flops


def prefill_floor(costs: ModelCosts, limits: Limits, prompts: Sequence[int]) -> float | None:
    """Least seconds to compute prompts of these lengths and the first token of each."""
    if limits.peak is None or limits.attention is None:
        return None
    products = 2 * costs.active_weights * sum(prompts) + 2 * costs.head_weights * len(prompts)
    attention = 4 * costs.attention_width * sum(costs.attended(length) for length in prompts)
    seconds = products / limits.peak + attention / limits.attention
    if limits.bandwidth is not None:
        seconds = max(seconds, costs.step_bytes(sum(prompts)) / limits.bandwidth)
    return seconds


def workload_floor(costs: ModelCosts, limits: Limits, work: Sequence[Lengths], batch: int) -> float | None:
    """Least seconds to serve `work`, all of it there at the start, with `batch` requests decoding at a time.

    The first token of a request comes with its prefill; the others are decoded, with half the output in the context.
    """
    prefill = prefill_floor(costs, limits, [length.prompt for length in work])
    if prefill is None or limits.bandwidth is None or limits.peak is None:
        return None
    decoded = sum(length.output - 1 for length in work)
    cached = sum((length.output - 1) * costs.context_bytes(length.prompt + length.output / 2) for length in work)
    token = max(costs.token_flops / limits.peak, costs.step_bytes(batch) / (batch * limits.bandwidth))
    return prefill + decoded * token + cached / limits.bandwidth
