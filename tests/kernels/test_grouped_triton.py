"""The Triton kernels of the grouped products against a definition a pair at a time, and the choice between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline_kernels.activation import GELU, GELU_TANH, SILU, gated_activation
from hookline_kernels.grouped_gemm import grouped_linear_combine, grouped_linear_gated
from hookline_kernels.grouped_gemm_triton import TilesConfig, combine_tiles, gated_tiles
from hookline_kernels.grouped_library import why_no_library
from hookline_kernels.grouped_rows import most_items
from hookline_kernels.grouped_small import GroupedSmallConfig, combine_small, gated_small
from hookline_kernels.grouped_tuning import GroupedShape, small_config
from hookline_kernels.launch import arrival_counters
from hookline_kernels.moe_routing import RoutingRule, choose_experts, sort_by_expert
from tests.kernels.test_grouped_gemm import SHAPES, Case, distinct, make

SMALL = [
    GroupedSmallConfig(form="columns", block_m=16, block_n=16, block_k=32),
    GroupedSmallConfig(form="columns", block_m=16, block_n=32, block_k=16, splits=3),
    GroupedSmallConfig(form="rows", block_m=16, block_n=32, block_k=16, splits=2),
    GroupedSmallConfig(form="rows", block_m=32, block_n=16, block_k=32),
    GroupedSmallConfig(form="vector", block_m=1, block_n=32, block_k=32, splits=2),
]
TILES = [
    TilesConfig(block_m=16, block_n=32, block_k=16, group_m=1, tma="none", persistent=False),
    TilesConfig(block_m=16, block_n=16, block_k=32, group_m=2, tma="none", persistent=True),
    TilesConfig(block_m=32, block_n=16, block_k=16, tma="weight", persistent=True),
    TilesConfig(block_m=16, block_n=16, block_k=16, group_m=4, tma="both", persistent=True),
    TilesConfig(block_m=16, block_n=32, block_k=32, tma="both", persistent=False),
    TilesConfig(block_m=16, block_n=64, block_k=32, tma="both", overlap=False),
]


def name(config: GroupedSmallConfig | TilesConfig) -> str:
    if isinstance(config, GroupedSmallConfig):
        return f"{config.form}-{config.block_m}x{config.block_n}-{config.splits}"
    return f"{config.tma}-{config.block_m}x{config.block_n}{'-persistent' if config.persistent else ''}"


def gated_by(
    case: Case, config: GroupedSmallConfig | TilesConfig, code: int | None = SILU, biased: bool = True
) -> torch.Tensor:
    bias = case.gate_up_bias if biased else None
    if isinstance(config, GroupedSmallConfig):
        return gated_small(case.x, case.gate_up, case.dispatch, code, bias, config)
    return gated_tiles(case.x, case.gate_up, case.dispatch, code, bias, config)


def combine_by(
    case: Case, h: torch.Tensor, config: GroupedSmallConfig | TilesConfig, biased: bool = True
) -> torch.Tensor:
    bias = case.down_bias if biased else None
    if isinstance(config, GroupedSmallConfig):
        return combine_small(h, case.down, case.dispatch, case.weights, bias, config)
    return combine_tiles(h, case.down, case.dispatch, case.weights, bias, config)


# Each way of working with the shapes that it could mistake.
CASES: list[tuple[GroupedSmallConfig | TilesConfig, str]] = [
    (SMALL[0], "none"),
    (SMALL[0], "one token"),
    (SMALL[0], "some idle"),
    (SMALL[1], "all experts"),
    (SMALL[2], "all to one"),
    (SMALL[3], "many experts"),
    (SMALL[4], "one token"),
    (TILES[0], "none"),
    (TILES[0], "some idle"),
    (TILES[1], "all experts"),
    (TILES[2], "one token"),
    (TILES[2], "all to one"),
    (TILES[3], "none"),
    (TILES[3], "some idle"),
    (TILES[4], "many experts"),
    (TILES[5], "some idle"),
]


def check_triton(case: Case, config: GroupedSmallConfig | TilesConfig, biased: bool, assert_close: Any) -> None:
    h = gated_by(case, config, biased=biased)
    assert h.dtype == case.x.dtype and h.is_contiguous()
    assert_close(h, case.h(bias=biased), looser=2.0)
    y = combine_by(case, h, config, biased=biased)
    assert y.dtype == case.x.dtype and y.is_contiguous()
    assert_close(y, case.y(h, biased), looser=2.0)
    assert not arrival_counters(case.x.device).any()


@pytest.mark.parametrize(("config", "shape"), CASES, ids=lambda value: value if isinstance(value, str) else name(value))
def test_triton_equals_the_definition(
    config: GroupedSmallConfig | TilesConfig, shape: str, triton_device: torch.device, assert_close: Any
) -> None:
    ids, experts, model, size = SHAPES[shape]
    if isinstance(config, TilesConfig) and config.tma != "none":
        model, size = -(-model // 8) * 8, -(-size // 8) * 8  # rows aligned to 16 bytes
    case = make(ids, experts, model, size, device=triton_device)
    check_triton(case, config, shape in ("one token", "some idle"), assert_close)


@pytest.mark.parametrize("config", [*SMALL, *TILES], ids=name)
def test_triton_in_each_type(
    config: GroupedSmallConfig | TilesConfig, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Any
) -> None:
    check_triton(make(distinct(2, 2, 4), 4, 40, 24, triton_dtype, triton_device), config, True, assert_close)


@pytest.mark.parametrize("config", [SMALL[1], TILES[0], TILES[3]], ids=name)
def test_equal_calls_give_equal_bits_and_a_token_does_not_depend_on_others(
    config: GroupedSmallConfig | TilesConfig, triton_device: torch.device
) -> None:
    case = make(distinct(5, 2, 4), 4, 32, 16, device=triton_device)
    h, again = gated_by(case, config), gated_by(case, config)
    y, y_again = combine_by(case, h, config), combine_by(case, again, config)
    assert torch.equal(h, again) and torch.equal(y, y_again)
    few = [0, 3]
    alone = replace(
        case,
        x=case.x[few],
        expert_ids=case.expert_ids[few],
        weights=case.weights[few],
        dispatch=sort_by_expert(case.expert_ids[few], 4, implementation="reference"),
    )
    assert torch.equal(combine_by(alone, gated_by(alone, config), config), y[few])


@pytest.mark.parametrize("config", [SMALL[0], TILES[0], TILES[3]], ids=name)
def test_rows_of_nan_spoil_no_other_row(config: GroupedSmallConfig | TilesConfig, triton_device: torch.device) -> None:
    case = make(distinct(4, 2, 4), 4, 16, 24, device=triton_device)
    h = gated_by(case, config)
    y = combine_by(case, h, config)
    case.x[2] = float("nan")
    spoilt = gated_by(case, config)
    found = combine_by(case, spoilt, config)
    assert bool(found[2].isnan().all()) and bool(spoilt[case.dispatch.order // 2 == 2].isnan().all())
    others = [0, 1, 3]
    assert torch.equal(found[others], y[others])


@pytest.mark.parametrize("code", [GELU, GELU_TANH, None])
@pytest.mark.parametrize("config", [SMALL[1], TILES[3]], ids=name)
def test_codes_of_the_kernels(
    code: int | None, config: GroupedSmallConfig | TilesConfig, triton_device: torch.device, assert_close: Any
) -> None:
    case = make(distinct(1, 2, 4), 4, 32, 16, device=triton_device)
    h = gated_by(case, config, code)
    if code is None:
        h = gated_activation(h, "relu")
    names: dict[int | None, str] = {GELU: "gelu", GELU_TANH: "gelu_pytorch_tanh", None: "relu"}
    assert_close(h, case.h(names[code]), looser=2.0)


@pytest.mark.parametrize("splits", [4, 7])
def test_parts_of_k(splits: int, triton_device: torch.device, assert_close: Any) -> None:
    """In more parts than K has blocks, and in as many as go."""
    case = make(distinct(1, 2, 4), 4, 80, 40, device=triton_device)
    config = GroupedSmallConfig(block_n=64, block_k=16, splits=splits)
    check_triton(case, config, True, assert_close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_a_graph_follows_the_routing_of_each_replay(
    tokens: int, triton_dtype: torch.dtype, triton_device: torch.device
) -> None:
    rule = RoutingRule(top_k=2, scoring="softmax", renormalize=True)
    case = make(distinct(4, 4, 4), 4, 256, 512, triton_dtype, triton_device)
    x, logits = torch.zeros(tokens, 256).to(case.x), torch.zeros(tokens, 4).to(case.x)

    def layer() -> torch.Tensor:
        ids, weights = choose_experts(logits, rule)
        dispatch = sort_by_expert(ids, 4)
        h = grouped_linear_gated(x, case.gate_up, dispatch, "silu", case.gate_up_bias)
        return grouped_linear_combine(h, case.down, dispatch, weights, case.down_bias)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator))
        logits.copy_(torch.randn(logits.shape, generator=generator))
        graph.replay()
        assert torch.equal(captured, layer())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_library_equals_the_reference(triton_device: torch.device, assert_close: Any) -> None:
    case = make(distinct(40, 2, 4), 4, 256, 512, torch.bfloat16, triton_device)
    if why_no_library(case.x.contiguous(), case.gate_up) is not None:
        pytest.skip("this torch has no grouped product")
    x = case.x.contiguous()
    found, wanted = (
        grouped_linear_gated(x, case.gate_up, case.dispatch, implementation=name) for name in ("library", "reference")
    )
    assert_close(found, wanted.double(), looser=2.0)
    found, wanted = (
        grouped_linear_combine(wanted, case.down, case.dispatch, case.weights, implementation=name)
        for name in ("library", "reference")
    )
    assert_close(found, wanted.double(), looser=2.0)


def test_the_most_items_bound_every_spread() -> None:
    for pairs in range(20):
        for experts in (1, 2, 5, 40):
            most = most_items(pairs, experts, 4)
            even = [pairs // experts + (expert < pairs % experts) for expert in range(experts)]
            skewed = [1] * min(pairs, experts)
            if skewed:
                skewed[0] += pairs - len(skewed)
            for counts in (even, skewed, [pairs]):
                assert sum(-(-count // 4) for count in counts) <= most
            assert sum(-(-count // 4) for count in skewed) == most or pairs <= experts


def test_few_pairs_take_the_small_kernel_and_many_the_tiles() -> None:
    def config(tokens: int, experts: int = 8, k: int = 2) -> GroupedSmallConfig | None:
        shape = GroupedShape(tokens=tokens, pairs=tokens * k, experts=experts, n=28672, k=4096, has_gate=True, width=2)
        return small_config(shape, torch.device("cpu"))

    found = [config(tokens) for tokens in (1, 4, 64, 128, 1024)]
    assert [None if one is None else one.block_m for one in found] == [1, 16, 32, 64, None]
    assert config(1024, experts=256, k=8) is not None and config(4096, experts=256, k=8) is None


@pytest.mark.parametrize(
    "changes", [{"form": "diagonal"}, {"block_m": 8}, {"form": "vector"}, {"block_n": 8}, {"splits": 0}, {"pdl": 1}]
)
def test_unsound_configurations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="GroupedSmallConfig"):
        GroupedSmallConfig(**changes)
    with pytest.raises(ValueError, match="TilesConfig"):
        TilesConfig(tma="some")
