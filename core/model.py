"""Models: the contract of a forward pass, its batch, and what a model asks of the cache.

Shape letters: T tokens in the batch, B requests, H query heads, K key-value heads, D head size, M model size,
F feed-forward size, E experts, V vocabulary, S block size, R rows whose logits are wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hookline import parallel as sharding
from hookline.errors import ModelConfigError
from hookline.layers.moe import ForcedRouting, MoE
from hookline.parallel import Parallel
from hookline_kernels.activation import GATED_ACTIVATIONS
from hookline_kernels.grouped_gemm import pack_expert_weight
from hookline_kernels.linear import pack_linear_weight
from hookline_kernels.moe_routing import RoutingRule

if TYPE_CHECKING:
    from hookline.config import EngineConfig

CacheTensors = Mapping[str, torch.Tensor]

_UNSOUND = "The checkpoint's config.json is not sound for this architecture."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every architecture's config has; an architecture derives its own from it.

    Attributes:
        architecture: as the checkpoint names it.
        num_layers, hidden_size, vocab_size: the usual; `vocab_size` is the width of the logits.
        max_position_embeddings: the longest context that the model was made for.
        dtype: the checkpoint's own number format, such as `bfloat16`.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Shapes of a decoder with grouped-query attention and an MLP."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoETransformerConfig(TransformerConfig):
    """Shapes of such a decoder whose MLP is a mixture of experts, in all layers or in some.

    Attributes:
        n_experts: E.
        routing: how a token's experts and their weights follow from the router's logits.
        activation: of the experts.
        expert_intermediate_size: F of each expert; `intermediate_size` is that of layers without experts.
        shared_intermediate_size: F of the experts that every token passes, together; 0 where there are none.
    """

    n_experts: int
    routing: RoutingRule
    activation: str
    expert_intermediate_size: int
    shared_intermediate_size: int = 0

    @property
    def n_top_k(self) -> int:
        """Experts a token."""
        return self.routing.top_k


def read_count(hf_config: Mapping[str, Any], name: str, default: int | None = None, limit: int = 2**31) -> int:
    """A whole number from 1 to `limit` in a checkpoint's config; `default` stands in where the field is absent.

    Raises:
        ModelConfigError: naming the field and what it holds.
    """
    value = hf_config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelConfigError(f"{name} is {str(value)[:80]}; expected a whole number from 1 to {limit}", hint=_UNSOUND)
    return value


def read_flag(hf_config: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is absent or null.

    Raises:
        ModelConfigError: naming the field and what it holds.
    """
    value = hf_config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelConfigError(f"{name} is {value!r}; expected true or false", hint=_UNSOUND)
    return bool(value)


def read_activation(hf_config: Mapping[str, Any]) -> str:
    """`hidden_act`, which must be one that gated MLPs have.

    Raises:
        ModelConfigError: naming the field and what is known.
    """
    value = hf_config.get("hidden_act", "silu")
    if not isinstance(value, str) or value not in GATED_ACTIVATIONS:
        raise ModelConfigError(
            f"hidden_act is {value!r}; known are {', '.join(sorted(GATED_ACTIVATIONS))}",
            hint="The model would give wrong text with another activation, so it is refused.",
        )
    return value


def read_experts(hf_config: Mapping[str, Any], experts: str, per_token: str) -> tuple[int, int]:
    """E and the experts a token, under the names that the architecture gives them.

    Raises:
        ModelConfigError: naming the field that is missing or unsound.
    """
    n_experts, top_k = read_count(hf_config, experts, limit=2**16), read_count(hf_config, per_token)
    if top_k > n_experts:
        raise ModelConfigError(f"{per_token} is {top_k}, more than {experts}, {n_experts}", hint=_UNSOUND)
    return n_experts, top_k


def read_transformer_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `TransformerConfig` under the names that most `config.json` files give them.

    Raises:
        ModelConfigError: naming the field that is missing or unsound.
    """
    hidden_size = read_count(hf_config, "hidden_size", limit=2**24)
    num_heads = read_count(hf_config, "num_attention_heads", limit=2**16)
    num_kv_heads = read_count(hf_config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"num_attention_heads is {num_heads}, no multiple of num_key_value_heads, {num_kv_heads}",
            hint="Each key-value head must serve the same number of query heads.",
        )
    eps = hf_config.get("rms_norm_eps", hf_config.get("layer_norm_eps", 1e-6))
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ModelConfigError(f"rms_norm_eps is {eps!r}", hint="The norm's eps must be a small positive number.")
    return {
        "architecture": hf_config["architectures"][0],
        "num_layers": read_count(hf_config, "num_hidden_layers", limit=10_000),
        "hidden_size": hidden_size,
        "vocab_size": read_count(hf_config, "vocab_size"),
        "max_position_embeddings": read_count(hf_config, "max_position_embeddings"),
        "dtype": hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32",
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": read_count(hf_config, "head_dim", hidden_size // num_heads, limit=2**16),
        "intermediate_size": read_count(hf_config, "intermediate_size"),
        "norm_eps": float(eps),
    }


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache group: the same kind of cache entry for `num_layers` layers, addressed by the one block table.

    Attributes:
        name: unique among the model's groups.
        num_layers: layers that hold such an entry.
        entries: name and shape of what one token stores in one layer, such as `("k", (K, D)), ("v", (K, D))`.
        dtype: of the entries.
    """

    name: str
    num_layers: int
    entries: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype

    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers of the group."""
        width = sum(torch.Size(shape).numel() for _, shape in self.entries)
        return width * self.num_layers * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step. Tokens of all requests lie end to end; requests with one token come first.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's place in its request.
        slots: [T] int64, where each token's cache entry goes: block id * S + place in the block.
        block_tables: [B, blocks] int32; entries past a request's blocks are 0 and never read.
        query_starts: [B + 1] int32, first row of each request; the last entry is T.
        context_lens: [B] int32, tokens in the cache once this step's are written.
        logits_rows: [R] int64, rows whose logits are wanted, rising; R == T means all of them.
        num_decodes: how many requests at the front have one token.
        max_query_len, max_context_len: largest of the batch, known on the host.
        rope_lengths: [T] int64, max(the prompt's length, position + 1), for rotary types whose angles depend on the
            length; None for models that do not ask for it.
        cache: group name to one mapping of entry name to tensor [blocks, S, ...] for each layer of the group.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    logits_rows: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    rope_lengths: torch.Tensor | None
    cache: Mapping[str, Sequence[CacheTensors]]

    @property
    def num_requests(self) -> int:
        """B."""
        return self.context_lens.shape[0]


def likeliest_draft(logits: torch.Tensor, step: int) -> torch.Tensor:
    """The likeliest token of each row of `logits` [B, V]: [B] int64; the same rule for every draft step."""
    return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What a proposer has to go on: the target's step, and what came of it.

    Rows are those of the target's forward pass, T of B requests: each request's new tokens, then the drafts that the
    step verified. Rows after a request's last accepted token hold rejected drafts: nothing may depend on them.

    Attributes:
        forward: the target's batch. Block tables hold places for `num_drafts` tokens after each request's rows.
        hidden: [T, M], the target's states after its last norm.
        next_token_ids: [T] int64, the token after each row's token: of the prompt where it is known, else accepted
            or chosen. Of rows after the last accepted token it is any token.
        last_rows: [B] int64, the row of each request's last accepted token.
        num_drafts: D, tokens to propose.
        choose: which token a draft step proposes: logits [B, V] of all requests and the step, 0 to D - 1, to ids [B].
            Proposals are drawn, and their probabilities kept, where the options ask for that.
    """

    forward: ForwardBatch
    hidden: torch.Tensor
    next_token_ids: torch.Tensor
    last_rows: torch.Tensor
    num_drafts: int
    choose: Callable[[torch.Tensor, int], torch.Tensor] = likeliest_draft


class Proposer(ABC):
    """Proposes the tokens that may come next, for the target to verify in its next step."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> torch.Tensor:
        """Drafts [B, D] int64 that follow `next_token_ids[last_rows]`; fills the cache of the draft's own layers.

        It never waits for the device, and its shapes follow from those of the batch alone, so that the target's step,
        acceptance and this can be one CUDA graph.
        """


class TransformerModel(ABC):
    """A decoder on one rank. It is built without weights, and runs once its containers are filled.

    An architecture derives from this class, declares its containers, and writes `forward` on them. The `transform_*`
    methods take a whole tensor in the canonical layout (docs/containers.md), cut this rank's part and bring it to the
    layout that the kernels want, on the device.

    Attributes:
        proposer: the model's own draft, where it was built with one.
    """

    proposer: Proposer | None = None

    def __init__(self, config: TransformerConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        self.parallel = parallel
        self.dtype: torch.dtype = getattr(torch, engine_config.dtype)
        self.device = torch.device(engine_config.device)
        self.shapes = config
        self.heads = sharding.local_heads(config.num_heads, config.num_kv_heads, parallel)

    @abstractmethod
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache groups that the model needs on this rank."""

    @abstractmethod
    def checkpoint_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of a whole checkpoint, as the containers name them.

        Checkpoints are checked against this before anything is read, and random weights are made from it.
        """

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [R, M], after the last norm, of the batch's `logits_rows`. Fills the cache for every token."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V], best in fp32 (`linear(..., wide=True)`), of hidden states [R, M]."""

    def longest_context(self) -> int:
        """Most tokens, prompt plus output, for which the model gives sensible text."""
        return self.shapes.max_position_embeddings

    def prefix_salt(self, prompt_length: int) -> bytes:
        """What a cached prefix depends on beside its tokens; prompts share prefixes only where this is equal."""
        return b""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as a contiguous one of the model's type on its device."""
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def _matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] (or a bias [out]) in the layout of the linear kernels."""
        return pack_linear_weight(tensor, self.device, self.dtype) if tensor.ndim == 2 else self.place(tensor)

    def transform_embedding_param(self, param: torch.Tensor) -> torch.Tensor:
        """[V, M], whole on every rank."""
        return self._matrix(param)

    def transform_unembed_param(self, param: torch.Tensor) -> torch.Tensor:
        """[V, M], this rank's rows."""
        return self._matrix(sharding.shard_unembed(param, self.parallel))

    def transform_norm_param(self, param: torch.Tensor) -> torch.Tensor:
        """[M] or [D], whole on every rank."""
        return self.place(param)

    def transform_qkv_param(self, param: torch.Tensor) -> torch.Tensor:
        """[(H + 2K) * D, M] or its bias, rows all-Q, all-K, all-V; this rank's heads."""
        shapes = self.shapes
        cut = sharding.shard_qkv(param, shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, self.parallel)
        return self._matrix(cut)

    def transform_attn_out_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """[M, H * D], this rank's columns; the bias [M] on rank 0 alone."""
        shapes = self.shapes
        cut = sharding.shard_attn_out(param, shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, self.parallel)
        return None if cut is None else self._matrix(cut)

    def transform_mlp_1_param(self, param: torch.Tensor) -> torch.Tensor:
        """[2F, M] with gate before up, or [F, M], or their bias; this rank's rows."""
        gated = param.shape[0] == 2 * self.shapes.intermediate_size
        return self._matrix(sharding.shard_mlp_1(param, self.parallel, gated=gated))

    def transform_mlp_2_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """[M, F], this rank's columns; the bias [M] on rank 0 alone."""
        cut = sharding.shard_mlp_2(param, self.parallel)
        return None if cut is None else self._matrix(cut)


class MoETransformerModel(TransformerModel):
    """A decoder with experts. Every rank of a TP group holds a part of each expert that its EP rank holds.

    Attributes:
        moe: the layer; benchmarks exchange it for one that tells them the routes.
    """

    shapes: MoETransformerConfig

    def __init__(self, config: MoETransformerConfig, engine_config: EngineConfig, parallel: Parallel) -> None:
        super().__init__(config, engine_config, parallel)
        mode = engine_config.expert_routing
        forced = None if mode == "natural" else ForcedRouting.make(mode, config.n_experts, self.device)
        self.moe = MoE(rule=config.routing, num_experts=config.n_experts, activation=config.activation, forced=forced)

    def transform_mlp_1_param(self, param: torch.Tensor) -> torch.Tensor:
        """As of any decoder; the shared experts' too."""
        gated = param.shape[0] in (2 * self.shapes.intermediate_size, 2 * self.shapes.shared_intermediate_size)
        return self._matrix(sharding.shard_mlp_1(param, self.parallel, gated=gated))

    def transform_moe_gate_param(self, param: torch.Tensor) -> torch.Tensor:
        """[E, M], or the gate [1, M] of shared experts, whole on every rank; a correction bias [E] in fp32."""
        return self._matrix(param) if param.ndim == 2 else param.to(device=self.device, dtype=torch.float32)

    def transform_moe_mlp_1_param(self, param: torch.Tensor) -> torch.Tensor:
        """[E, 2F, M], each expert's gate before its up, or [E, F, M], or their bias; this rank's experts and rows."""
        gated = param.shape[1] == 2 * self.shapes.expert_intermediate_size
        own = sharding.shard_experts(param, self.parallel)
        return self._expert_matrices(sharding.shard_mlp_1(own, self.parallel, gated=gated, experts=True))

    def transform_moe_mlp_2_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """[E, M, F], this rank's experts and columns; the bias [E, M] on rank 0 alone."""
        own = sharding.shard_experts(param, self.parallel)
        cut = sharding.shard_mlp_2(own, self.parallel, experts=True)
        return None if cut is None else self._expert_matrices(cut)

    def _expert_matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Weights [E, out, in] (or biases [E, out]) in the layout of the grouped products."""
        return pack_expert_weight(tensor, self.device, self.dtype) if tensor.ndim == 3 else self.place(tensor)
