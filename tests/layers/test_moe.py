"""A mixture of experts against a loop over tokens in fp64, on every way to choose; forced routing; parts of ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from hookline.config import EngineConfig, resolve
from hookline.layers.moe import ForcedRouting, MoE, shared_expert
from hookline.model import MoETransformerConfig, MoETransformerModel
from hookline.parallel import Parallel
from hookline_kernels.grouped_gemm import pack_expert_weight
from hookline_kernels.moe_routing import RoutingRule

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
MODEL, FEED = 24, 16
SOFTMAX = RoutingRule(top_k=2, scoring="softmax", renormalize=True)
SIGMOID = RoutingRule(top_k=3, scoring="sigmoid", renormalize=True, scale=2.5, num_groups=4, top_groups=2)


@dataclasses.dataclass
class Weights:
    gate: torch.Tensor
    mlp_1: torch.Tensor
    mlp_2: torch.Tensor
    bias: torch.Tensor


def make_weights(experts: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((experts, MODEL), (experts, 2 * FEED, MODEL), (experts, MODEL, FEED), (experts,))
    return Weights(*(torch.randn(shape, generator=generator) for shape in shapes))


def make_input(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((tokens, MODEL), generator=torch.Generator().manual_seed(seed))


def run(moe: MoE, x: torch.Tensor, w: Weights, batch: Any = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    return moe(0, x, w.gate, pack_expert_weight(w.mlp_1), pack_expert_weight(w.mlp_2), batch, bias)


def routes(moe: MoE, x: torch.Tensor, w: Weights, batch: Any = None, layer: int = 0) -> torch.Tensor:
    """The experts that each token goes to, [T, k]."""
    seen: list[torch.Tensor] = []
    watched = dataclasses.replace(moe, watch=lambda _, ids: seen.append(ids.clone()))
    watched(layer, x, w.gate, w.mlp_1, w.mlp_2, batch)
    return seen[0]


def by_token(x: torch.Tensor, w: Weights, rule: RoutingRule, bias: torch.Tensor | None = None) -> torch.Tensor:
    """One token after the other, one expert after the other, in fp64."""
    rows = []
    for row in x.double():
        logits = w.gate.double() @ row
        scores = logits.softmax(0) if rule.scoring == "softmax" else logits.sigmoid()
        biased = scores if bias is None else scores + bias
        groups = biased.reshape(rule.num_groups, -1)
        if rule.num_groups > 1:
            best = groups.topk(2, dim=1).values.sum(1).topk(rule.top_groups).indices.tolist()
            groups = torch.stack([g if i in best else torch.full_like(g, -9.0) for i, g in enumerate(groups)])
        chosen = groups.flatten().topk(rule.top_k).indices.tolist()
        total = sum(scores[e] for e in chosen) if rule.renormalize else 1.0
        y = torch.zeros(MODEL, dtype=torch.float64)
        for e in chosen:
            g, u = (w.mlp_1[e].double() @ row).chunk(2)
            y += scores[e] / total * rule.scale * (w.mlp_2[e].double() @ (torch.nn.functional.silu(g) * u))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize(
    ("rule", "experts"),
    [
        (SOFTMAX, 8),
        (dataclasses.replace(SOFTMAX, renormalize=False), 8),
        (dataclasses.replace(SOFTMAX, top_k=5), 5),  # all of them
        (dataclasses.replace(SOFTMAX, top_k=1), 1),
        (SIGMOID, 16),
    ],
)
def test_equals_a_loop_over_tokens(rule: RoutingRule, experts: int, tokens: int) -> None:
    x, w = make_input(tokens), make_weights(experts)
    bias = w.bias if rule.scoring == "sigmoid" else None
    found = run(MoE(rule=rule, num_experts=experts, activation="silu"), x, w, bias=bias)
    expected = by_token(x, w, rule, bias)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_correction_bias_changes_the_choice_alone() -> None:
    x, w = make_input(5), make_weights(16)
    rule = dataclasses.replace(SIGMOID, num_groups=1, top_groups=1, renormalize=False, scale=1.0)
    moe = MoE(rule=rule, num_experts=16, activation="silu")
    every = torch.full((16,), 3.0)
    assert torch.equal(run(moe, x, w, bias=every), run(moe, x, w))
    some = torch.zeros(16).index_fill_(0, torch.tensor([2, 7, 9]), 3.0)
    assert (run(moe, x, w, bias=some) - by_token(x, w, rule, some)).abs().max() < 1e-4


def test_all_tokens_to_one_expert_and_none_to_the_others() -> None:
    x, w = make_input(9).abs(), make_weights(6)
    w.gate[:] = -1.0
    w.gate[4] = 1.0
    for other in (0, 1, 2, 3, 5):  # never read: their values would show
        w.mlp_1[other] = torch.nan
        w.mlp_2[other] = torch.nan
    rule = dataclasses.replace(SOFTMAX, top_k=1)
    found = run(MoE(rule=rule, num_experts=6, activation="silu"), x, w)
    assert (found - by_token(x, w, rule)).abs().max() < 1e-4


def test_among_equals_the_lower_expert_is_chosen() -> None:
    x, w = make_input(7), make_weights(4)
    w.gate[3] = w.gate[1]
    w.gate[0] = w.gate[2] = -w.gate[1]
    chosen = routes(MoE(rule=dataclasses.replace(SOFTMAX, top_k=1), num_experts=4, activation="silu"), x, w)
    expected = torch.where(x @ w.gate[1] > 0, 1, 0)
    assert 0 < expected.sum() < 7
    assert torch.equal(chosen[:, 0].long(), expected)


def test_logits_are_not_rounded_to_a_short_type() -> None:
    """Rounded to bf16, 256.5 would be 256, and the lower expert would be chosen."""
    w = Weights(*(each.bfloat16() for each in dataclasses.astuple(make_weights(3))))
    w.gate.zero_()
    w.gate[:2, 0], w.gate[1, 1] = 256.0, 0.5
    moe = MoE(rule=dataclasses.replace(SOFTMAX, top_k=1), num_experts=3, activation="silu")
    assert routes(moe, torch.ones(2, MODEL).bfloat16(), w).tolist() == [[1], [1]]


def test_routes_and_values_are_the_same_in_every_run() -> None:
    x, w = make_input(11), make_weights(8)
    w.gate[5] = w.gate[2]
    moe = MoE(rule=SOFTMAX, num_experts=8, activation="silu")
    first, values = routes(moe, x, w), run(moe, x, w)
    for _ in range(50):
        assert torch.equal(routes(moe, x, w), first)
        assert torch.equal(run(moe, x, w), values)


def test_shared_experts_plain_and_gated() -> None:
    x, w = make_input(5), make_weights(1)
    gate = torch.randn((1, MODEL), generator=torch.Generator().manual_seed(3))
    g, u = (x.double() @ w.mlp_1[0].double().T).chunk(2, dim=1)
    plain = (torch.nn.functional.silu(g) * u) @ w.mlp_2[0].double().T
    assert torch.allclose(shared_expert(x, w.mlp_1[0], w.mlp_2[0], "silu").double(), plain, atol=1e-4)
    gated = plain * (x.double() @ gate.double().T).sigmoid()
    assert torch.allclose(shared_expert(x, w.mlp_1[0], w.mlp_2[0], "silu", gate).double(), gated, atol=1e-4)
    half = [tensor.bfloat16() for tensor in (x, w.mlp_1[0], w.mlp_2[0], gate)]
    found = shared_expert(*half[:3], "silu", half[3])
    weight = (half[0].float() @ half[3].float().T).sigmoid()  # neither it nor its logit is rounded
    assert torch.equal(found, (shared_expert(*half[:3], "silu") * weight).bfloat16())


def forward_batch(lengths: list[int], blocks: list[int], size: int = 16) -> Any:
    """What forced routing reads of a batch: requests of so many tokens, each with blocks of its own from a first on."""
    slots = [first * size + place for length, first in zip(lengths, blocks, strict=True) for place in range(length)]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    tables = torch.tensor([[first, first + 1, 0] for first in blocks], dtype=torch.int32)
    return SimpleNamespace(slots=torch.tensor(slots), block_tables=tables, query_starts=starts)


def forced(mode: Any, experts: int = 16) -> tuple[MoE, Weights]:
    routing = ForcedRouting.make(mode, experts, torch.device("cpu"))
    return MoE(rule=SOFTMAX, num_experts=experts, activation="silu", forced=routing), make_weights(experts)


def test_uniform_routing_is_independent_of_the_router_and_of_neighbours() -> None:
    moe, w = forced("uniform")
    w.gate.zero_()  # the router itself would send all tokens to the first two
    batch = forward_batch([600], [3])
    chosen = routes(moe, make_input(600), w, batch)
    counts = chosen.flatten().bincount(minlength=16)
    assert counts.min() > 600 * 2 / 16 / 2 and counts.max() < 600 * 2 / 16 * 2
    together = (chosen[1:, 0] == chosen[:-1, 0]).float().mean()
    assert together < 0.15, "neighbours agree by chance alone"
    assert not torch.equal(routes(moe, make_input(600), w, batch, layer=1), chosen)
    alone = forward_batch([1], [3])
    assert torch.equal(routes(moe, make_input(1), w, alone), chosen[:1])
    bias = torch.zeros(16).index_fill_(0, torch.tensor([5, 6]), 9.0)
    assert torch.equal(
        run(moe, make_input(9), w, forward_batch([9], [3]), bias), run(moe, make_input(9), w, forward_batch([9], [3]))
    )


def test_correlated_routing_is_a_requests_own() -> None:
    moe, w = forced("correlated")
    lengths, blocks = [1, 1, 40, 40, 40], [9, 30, 50, 70, 90]
    chosen = routes(moe, make_input(122), w, forward_batch(lengths, blocks))
    favourites = []
    for start in (2, 42, 82):
        counts = chosen[start : start + 40].flatten().bincount(minlength=16)
        favourites.append(tuple(counts.topk(2).indices.tolist()))
        assert counts.topk(4).values.sum() > 40, "most choices fall on a quarter of the experts"
    assert len(set(favourites)) == 3
    decode = forward_batch([1] * 5, blocks)
    decoded = routes(moe, make_input(5), w, decode)
    assert torch.equal(decoded[:2], chosen[:2]), "a request's first token is the same alone and beside chunks"


def test_padding_rows_of_a_captured_step_are_served() -> None:
    for mode in ("uniform", "correlated"):
        moe, w = forced(mode)
        batch = forward_batch([1] * 4, [5, 0, 0, 0])
        batch.slots[1:] = -1
        assert run(moe, make_input(4), w, batch).isfinite().all()


class Ranked(MoETransformerModel):
    """No model, but what its transforms need."""

    def cache_specs(self) -> Any: ...
    def checkpoint_shapes(self) -> Any: ...
    def forward(self, batch: Any) -> Any: ...
    def compute_logits(self, hidden: torch.Tensor) -> Any: ...


def ranked(parallel: Parallel, dtype: Any = "float32") -> Ranked:
    config = MoETransformerConfig(
        architecture="X",
        num_layers=1,
        hidden_size=MODEL,
        vocab_size=8,
        max_position_embeddings=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        intermediate_size=FEED,
        norm_eps=1e-5,
        n_experts=4,
        routing=SOFTMAX,
        activation="silu",
        expert_intermediate_size=FEED,
        shared_intermediate_size=3 * FEED,
    )
    return Ranked(config, resolve(EngineConfig("x"), "cpu", dtype), parallel)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_ranks_add_up(ranks: int) -> None:
    x, w = make_input(6), make_weights(4)
    whole = run(MoE(rule=SOFTMAX, num_experts=4, activation="silu"), x, w)
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        model = ranked(Parallel(tp_rank=rank, tp_size=ranks))
        gate = model.transform_moe_gate_param(w.gate)
        mlp_1, mlp_2 = model.transform_moe_mlp_1_param(w.mlp_1), model.transform_moe_mlp_2_param(w.mlp_2)
        assert mlp_2 is not None and mlp_1.shape[1] == 2 * mlp_2.shape[2] == 2 * (FEED // ranks + (rank < FEED % ranks))
        total += model.moe(0, x, gate, mlp_1, mlp_2, None)  # type: ignore[arg-type]
    assert torch.allclose(total, whole, atol=1e-4)


def test_biases_and_expert_parts_of_ranks() -> None:
    w, bias_1, bias_2 = make_weights(4), torch.randn(4, 2 * FEED), torch.randn(4, MODEL)
    model = ranked(Parallel(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2))
    half = FEED // 2
    rows = torch.cat([w.mlp_1[2:, half:FEED], w.mlp_1[2:, FEED + half :]], dim=1)
    assert torch.equal(model.transform_moe_mlp_1_param(w.mlp_1), rows)
    assert torch.equal(
        model.transform_moe_mlp_1_param(bias_1), torch.cat([bias_1[2:, half:FEED], bias_1[2:, FEED + half :]], dim=1)
    )
    assert model.transform_moe_mlp_2_param(bias_2) is None
    first = ranked(Parallel(tp_rank=0, tp_size=2, ep_rank=1, ep_size=2))
    found = first.transform_moe_mlp_2_param(bias_2)
    assert found is not None and torch.equal(found, bias_2[2:])
    shared = torch.randn(6 * FEED, MODEL)  # gate above up: a rank has rows of both
    expected = torch.cat([shared[3 * half : 3 * FEED], shared[3 * FEED + 3 * half :]])
    assert torch.equal(model.transform_mlp_1_param(shared), expected)


def test_a_correction_bias_stays_in_fp32() -> None:
    """Whatever the model's type: rounded, it would change the choice."""
    model = ranked(Parallel(), "bfloat16")
    bias = 1 + torch.arange(4.0) * 1e-4
    assert torch.equal(model.transform_moe_gate_param(bias), bias)
    assert model.transform_moe_gate_param(bias.double()).dtype == torch.float32
    assert model.transform_moe_gate_param(torch.zeros(4, MODEL)).dtype == torch.bfloat16


def experts_of(x: torch.Tensor, w: Weights, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The chosen experts in x's type, each product and each addition rounded to it."""
    y = torch.zeros_like(x)
    for expert in range(len(w.gate)):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        g, u = (x[rows] @ w.mlp_1[expert].T).chunk(2, dim=1)
        out = (torch.nn.functional.silu(g) * u) @ w.mlp_2[expert].T
        y.index_add_(0, rows, (out * weights[rows, place, None]).to(y.dtype))
    return y


def check_precision(dtype: torch.dtype, device: torch.device, tokens: int, sizes: tuple[int, int, int]) -> None:
    """At most twice as far from fp64 as plain torch in the same type on the same routes."""
    experts, model, feed = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((experts, model), (experts, 2 * feed, model), (experts, model, feed), (experts,))
    parts = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes)
    w = Weights(*(part.to(device=device, dtype=dtype) for part in parts))
    x = torch.randn((tokens, model), generator=generator).to(device=device, dtype=dtype)
    moe = MoE(rule=SOFTMAX, num_experts=experts, activation="silu")
    exact = Weights(*(part.double() for part in dataclasses.astuple(w)))
    ids = routes(moe, x, w).long()
    scores = (x.double() @ exact.gate.T).softmax(dim=1).gather(1, ids)
    scores = scores / scores.sum(dim=1, keepdim=True)
    truth = experts_of(x.double(), exact, ids, scores)
    plain = experts_of(x, w, ids, scores.float()).double()
    mlp_1, mlp_2 = (pack_expert_weight(weight, device, dtype) for weight in (w.mlp_1, w.mlp_2))
    found = moe(0, x, w.gate, mlp_1, mlp_2, None).double()  # type: ignore[arg-type]
    error, allowed = (found - truth).square().mean().sqrt(), 2 * (plain - truth).square().mean().sqrt()
    assert 0 < error <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_precision_on_the_cpu(dtype: torch.dtype, tokens: int) -> None:
    check_precision(dtype, torch.device("cpu"), tokens, (6, 256, 192))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 1500])
@pytest.mark.parametrize("sizes", [(8, 1024, 1792), (60, 1024, 704)], ids=["8 experts", "60 experts"])
def test_precision_on_the_gpu(dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int]) -> None:
    check_precision(dtype, torch.device("cuda"), tokens, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("mode", ["natural", "uniform", "correlated"])
def test_a_graph_holds_the_layer(mode: Any) -> None:
    """Nothing in it waits for the device, and a replay follows its inputs."""
    moe, w = forced("uniform" if mode == "natural" else mode)
    routing = None if mode == "natural" else ForcedRouting.make(mode, 16, torch.device("cuda"))
    moe = dataclasses.replace(moe, forced=routing)
    gate, mlp_1, mlp_2 = (tensor.cuda().bfloat16() for tensor in (w.gate, w.mlp_1, w.mlp_2))
    x = make_input(4).cuda().bfloat16()
    batch = forward_batch([1] * 4, [5, 9, 20, 31])
    on_device = SimpleNamespace(**{name: tensor.cuda() for name, tensor in vars(batch).items()})

    def layer() -> torch.Tensor:
        return moe(3, x, gate, mlp_1, mlp_2, on_device)  # type: ignore[arg-type]

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    x.copy_(make_input(4, seed=7))
    on_device.slots.add_(5 * 16)
    graph.replay()
    assert torch.equal(y, layer())
