"""latent_attention: the CPU implementation and the Triton kernels against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from hookline_kernels import latent_attention as module
from hookline_kernels.implementations import explain
from hookline_kernels.latent_attention import IMPLEMENTATIONS, latent_attention
from hookline_kernels.latent_attention_triton import (
    LatentAttention,
    LatentConfig,
    latent_attention_triton,
    latent_config,
)
from hookline_kernels.paged_context import Limits
from hookline_kernels.paged_rows import PagedRows
from tests.kernels.latent_cases import LatentCase, make_case

Check = Callable[..., None]

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
SCALE = 0.2

# Contexts and rows of the requests of a batch, L, and what differs from the common shape.
SHAPES: list[tuple[list[int], list[int], int, dict[str, int]]] = [
    ([], [], 64, {"padding": 2}),
    ([0], [1], 64, {}),
    ([1], [1], 64, {}),
    ([15, 16, 17, 0], [1, 1, 1, 1], 64, {}),
    ([40, 17, 0, 33], [4, 3, 4, 0], 64, {"heads": 6, "padding": 3}),
    ([33, 65], [33, 5], 48, {"heads": 3, "width": 64, "block_size": 5}),
    ([130], [2], 64, {"heads": 16, "block_size": 1}),
    ([20, 7], [8, 7], 32, {"heads": 70, "width": 40, "block_size": 8}),
    ([31], [31], 16, {"heads": 1, "width": 16}),
]
SOME = [SHAPES[i] for i in (3, 4, 5)]


def some_positions(case: LatentCase, size: int = 24) -> torch.Tensor:
    """Lists with positions in no order and -1 anywhere; every fifth list is empty. Padding has stale ones."""
    generator = torch.Generator().manual_seed(size)
    lists = torch.full((len(case.rows), size), -1, dtype=torch.int32)
    for row, (request, position) in enumerate(case.rows):
        context = case.contexts[request] if position >= 0 else 3
        if row % 5 != 4:
            count = min(size - row % 3, context)
            places = torch.randperm(size, generator=generator)[:count]
            lists[row, places] = torch.randperm(context, generator=generator)[:count].int()
    return lists.to(case.q.device)


def oracle(case: LatentCase, value_size: int, lists: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64, a row at a time, from the definition."""
    out = torch.zeros(*case.q.shape[:2], value_size, dtype=torch.float64)
    for row, (request, position) in enumerate(case.rows):
        seen = list(range(position + 1))
        if lists is not None and position >= 0:
            seen = [j for j in lists[row].tolist() if j >= 0]
        if seen:
            entries = case.entries(request, seen)
            weights = (SCALE * case.q[row].double().cpu() @ entries.T).softmax(-1)
            out[row] = weights @ entries[:, :value_size]
    return out


def run(case: LatentCase, value_size: int, implementation: str | None, **options: Any) -> torch.Tensor:
    options = {**case.bounds, **options, "implementation": implementation}
    return latent_attention(case.q, *case.lists, SCALE, value_size, **options)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
@pytest.mark.parametrize(("contexts", "counts", "value_size", "shape"), SHAPES, ids=str)
def test_torch_equals_definition(
    assert_close: Check, contexts: Any, counts: Any, value_size: int, shape: Any, listed: bool, implementation: str
) -> None:
    case = make_case(contexts, counts, **shape)
    lists = some_positions(case) if listed else None
    assert_close(run(case, value_size, implementation, positions=lists), oracle(case, value_size, lists))


@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
def test_torch_in_each_type(assert_close: Check, dtype: torch.dtype, listed: bool) -> None:
    for contexts, counts in (([37], [20]), ([40, 17], [3, 1])):
        case = make_case(contexts, counts, dtype=dtype)
        lists = some_positions(case) if listed else None
        assert_close(run(case, 64, "torch", positions=lists), oracle(case, 64, lists), looser=2.0)


@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
def test_torch_takes_few_rows_at_a_time(assert_close: Check, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_ELEMENTS", 24 * 80 * 3)
    case = make_case([40, 35], [20, 9], padding=2)
    lists = some_positions(case) if listed else None
    assert_close(run(case, 64, "torch", positions=lists), oracle(case, 64, lists))


@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
@pytest.mark.parametrize(("contexts", "counts", "value_size", "shape"), SHAPES, ids=str)
def test_triton_equals_definition(
    assert_close: Check,
    triton_device: torch.device,
    contexts: Any,
    counts: Any,
    value_size: int,
    shape: Any,
    listed: bool,
) -> None:
    case = make_case(contexts, counts, device=triton_device, **shape)
    lists = some_positions(case) if listed else None
    assert_close(run(case, value_size, "triton", positions=lists), oracle(case, value_size, lists), looser=2.0)


@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
@pytest.mark.parametrize(("contexts", "counts", "value_size", "shape"), SOME[1:], ids=str)
def test_triton_in_each_type(
    assert_close: Check,
    triton_device: torch.device,
    triton_dtype: torch.dtype,
    contexts: Any,
    counts: Any,
    value_size: int,
    shape: Any,
    listed: bool,
) -> None:
    case = make_case(contexts, counts, dtype=triton_dtype, device=triton_device, **shape)
    lists = some_positions(case) if listed else None
    assert_close(run(case, value_size, "triton", positions=lists), oracle(case, value_size, lists), looser=2.0)


def test_triton_with_a_cache_of_another_type(assert_close: Check, triton_device: torch.device) -> None:
    case = make_case([40, 5], [3, 1], cache_dtype=torch.float16, device=triton_device)
    assert_close(run(case, 64, "triton"), oracle(case, 64), looser=2.0)


def launch(case: LatentCase, value_size: int, config: LatentConfig, lists: torch.Tensor | None) -> torch.Tensor:
    """The Triton kernels as in a captured graph: bounds far above the batch."""
    capacity = 500
    tables = torch.full((len(case.contexts), -(-capacity // case.cache.shape[1])), 1_000_000, dtype=torch.int32)
    tables = tables.to(case.q.device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    rows = PagedRows(tables, case.query_starts, case.context_lens, 40, capacity)
    shape = (*case.q.shape[:2], value_size)
    out = torch.full(shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    latent_attention_triton(LatentAttention(case.q, case.cache, rows, SCALE, lists, out), config)
    return out


@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
@pytest.mark.parametrize(
    "config",
    [
        LatentConfig(block_m=16, block_n=16, programs=8),
        LatentConfig(block_m=64, block_n=16, programs=2, least=2),
        LatentConfig(block_m=32, block_n=64, programs=1),
        LatentConfig(block_m=16, block_n=32, programs=20),
    ],
    ids=str,
)
def test_pieces_of_real_contexts(
    assert_close: Check, triton_device: torch.device, config: LatentConfig, listed: bool
) -> None:
    """Far more room than tokens: programs without work, rows of padding, one long request, many rows."""
    for contexts, counts in (([99, 0, 17], [1, 1, 1]), ([50, 3, 0], [4, 3, 4]), ([0, 0], [1, 1])):
        case = make_case(contexts, counts, heads=3, padding=1, device=triton_device)
        lists = some_positions(case, 60) if listed else None
        assert_close(launch(case, 64, config, lists), oracle(case, 64, lists), looser=2.0)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
def test_unused_entries_never_change_a_bit(triton_device: torch.device, listed: bool, implementation: str) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    for contexts, counts in (([21, 40, 0], [1, 4, 4]), ([21], [9])):
        case = make_case(contexts, counts, padding=1, device=device)
        options = {"positions": some_positions(case) if listed else None}
        clean = run(case.with_garbage(0.0), 64, implementation, **options)
        for garbage in (float("nan"), float("inf"), -3e38):
            assert torch.equal(run(case.with_garbage(garbage), 64, implementation, **options), clean)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_entries_outside_of_a_list_never_change_a_bit(triton_device: torch.device, implementation: str) -> None:
    """So draft steps that reuse a list are independent of what later rows hold, as are lists' rows of one another."""
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = make_case([40], [2], block_size=8, device=device)
    lists = torch.tensor([[-1, 3, 30, -1], [5, -1, -1, 12]], dtype=torch.int32, device=device)
    clean = run(case, 64, implementation, positions=lists)
    listed = torch.zeros(40, dtype=torch.bool, device=device)
    listed[[3, 30, 5, 12]] = True
    cache = case.cache.clone()
    for position in (~listed).nonzero().flatten().tolist():
        cache[int(case.block_tables[0, position // 8]), position % 8] = float("nan")
    assert torch.equal(run(replace(case, cache=cache), 64, implementation, positions=lists), clean)


@pytest.mark.parametrize("implementation", ["torch", "triton", "reference"])
def test_a_list_of_all_positions_equals_causal(
    assert_close: Check, triton_device: torch.device, implementation: str
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = make_case([33, 12], [3, 12], device=device)
    place = torch.arange(40)
    lists = torch.stack([torch.where(place <= position, place, -1) for _, position in case.rows]).int().to(device)
    got = run(case, 64, implementation, positions=lists)
    assert_close(got, run(case, 64, implementation), looser=2.0)


def test_a_wider_list_may_be_a_view(assert_close: Check, triton_device: torch.device) -> None:
    case = make_case([33, 12], [3, 2], device=triton_device)
    wide = torch.cat([some_positions(case), torch.full((5, 7), 999_999, device=triton_device)], 1).int()
    for implementation in (None, "triton"):
        got = run(case, 64, implementation, positions=wide[:, :24])
        assert_close(got, oracle(case, 64, wide[:, :24]), looser=2.0)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("listed", [False, True], ids=["causal", "listed"])
def test_a_captured_call_follows_the_device(assert_close: Check, triton_device: torch.device, listed: bool) -> None:
    case = make_case([300, 20, 40], [4, 4, 4], heads=64, width=576, dtype=torch.bfloat16, device=triton_device)
    lists = some_positions(case, 300) if listed else None
    tables = torch.zeros(3, 4096, dtype=torch.int32, device=triton_device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    lens, starts = case.context_lens, case.query_starts
    out = torch.empty(12, 64, 512, dtype=case.q.dtype, device=triton_device)
    options: dict[str, Any] = {"max_query_len": 4, "max_context_len": 65536, "out": out, "positions": lists}
    latent_attention(case.q, case.cache, tables, starts, lens, SCALE, 512, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent_attention(case.q, case.cache, tables, starts, lens, SCALE, 512, **options)
    for contexts in ([300, 20, 40], [7, 0, 40], [299, 4, 16], [0, 0, 0]):
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        changed = replace(case, contexts=contexts)
        if lists is not None:
            lists.copy_(some_positions(changed, 300))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, oracle(changed, 512, lists), looser=2.0)


def test_writes_into_out() -> None:
    case = make_case([5, 9], [1, 2])
    out = torch.full((3, 4, 64), 7.0)
    assert run(case, 64, None, out=out) is out
    assert torch.equal(out, run(case, 64, None))


def test_the_choice_is_explained() -> None:
    case = make_case([5], [1])
    assert explain(IMPLEMENTATIONS, (case.q,)).name == "torch"
    with pytest.raises(ValueError, match="known here: torch, triton, reference"):
        run(case, 64, "cudnn")


def test_the_configuration_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = torch.zeros(2, 64, 576, dtype=torch.float16), torch.zeros(1, 16, 576, dtype=torch.float16)
    lists = torch.zeros(1, 1, dtype=torch.int32)
    rows = PagedRows(lists, lists[0], lists[0], 1, 1)
    for room in (2**16, 2**17, 232448):
        monkeypatch.setattr(
            "hookline_kernels.latent_attention_triton.limits", lambda device, room=room: Limits(8, room)
        )
        config = latent_config(LatentAttention(q, cache, rows, 1.0, None, q))
        assert (config.block_m + config.stages * config.block_n) * 1152 <= room or config.stages == 1
    assert config.stages == 2


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(3, 80)}, ValueError, r"q \[T, heads, width\]"),
    ({"q": torch.zeros(3, 4, 64)}, ValueError, "width"),
    ({"q": torch.zeros(3, 4, 80, dtype=torch.int32)}, TypeError, "floating point"),
    ({"q": torch.zeros(3, 4, 160)[..., ::2]}, ValueError, "contiguous"),
    ({"cache": torch.zeros(4, 16, 160)[..., ::2]}, ValueError, "contiguous"),
    ({"block_tables": torch.zeros(2, 3)}, TypeError, "int32"),
    ({"block_tables": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, r"\[B, N\]"),
    ({"query_starts": torch.zeros(2, dtype=torch.int32)}, ValueError, r"\[B \+ 1\]"),
    ({"context_lens": torch.zeros(2, dtype=torch.int64)}, TypeError, "int32"),
    ({"context_lens": torch.ones(4, dtype=torch.int32)[::2]}, ValueError, "must be contiguous"),
    ({"block_tables": torch.zeros(2, 3, dtype=torch.int32, device="meta")}, ValueError, "must be on cpu"),
    ({"max_context_len": 1000}, ValueError, "context of 1000"),
    ({"max_query_len": -1}, ValueError, "negative"),
    ({"value_size": 81}, ValueError, "value_size"),
    ({"value_size": 0}, ValueError, "value_size"),
    ({"scale": 0.0}, ValueError, "scale"),
    ({"positions": torch.zeros(3, 8)}, TypeError, "positions must be int32"),
    ({"positions": torch.zeros(2, 8, dtype=torch.int32)}, ValueError, r"positions \[T, K\]"),
    ({"positions": torch.zeros(3, 0, dtype=torch.int32)}, ValueError, r"positions \[T, K\]"),
    ({"out": torch.zeros(3, 4, 80)}, ValueError, "out"),
    # Numbers that cannot be followed:
    ({"positions": torch.full((3, 8), 48, dtype=torch.int32)}, ValueError, "from -1 to 47"),
    ({"positions": torch.full((3, 8), -2, dtype=torch.int32)}, ValueError, "got -2"),
    ({"query_starts": torch.tensor([0, 3, 2], dtype=torch.int32)}, ValueError, "must rise"),
    ({"query_starts": torch.tensor([0, 2, 4], dtype=torch.int32)}, ValueError, "at most T = 3"),
    ({"max_query_len": 1}, ValueError, "max_query_len = 1"),
    ({"context_lens": torch.tensor([1, 30], dtype=torch.int32)}, ValueError, "request 0 has a context of 1"),
    ({"context_lens": torch.tensor([2, 41], dtype=torch.int32)}, ValueError, "max_context_len = 40"),
    ({"block_tables": torch.tensor([[1, 0, 0], [2, 4, 0]], dtype=torch.int32)}, ValueError, "request 1 has block 4"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 4, 80),
        "cache": torch.zeros(4, 16, 80),
        "block_tables": torch.tensor([[1, 9, 9], [2, 3, -9]], dtype=torch.int32),
        "query_starts": torch.tensor([0, 2, 3], dtype=torch.int32),
        "context_lens": torch.tensor([2, 30], dtype=torch.int32),
        "scale": 1.0,
        "value_size": 64,
        "max_query_len": 2,
        "max_context_len": 40,
    }
    latent_attention(**arguments)
    with pytest.raises(error, match=message):
        latent_attention(**{**arguments, **change})
