"""index_topk: the CPU implementation and the Triton kernels against the definition in fp64.

The numbers are small and whole, so that scores are exact in each type, and many are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from hookline_kernels import indexer as module
from hookline_kernels.implementations import explain
from hookline_kernels.indexer import IMPLEMENTATIONS, index_topk
from hookline_kernels.indexer_triton import IndexConfig, IndexTopk, index_topk_triton
from hookline_kernels.paged_rows import PagedRows
from tests.kernels.latent_cases import LatentCase, make_case

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret

# Contexts and rows of the requests of a batch, top_k, and what differs from the common shape.
SHAPES: list[tuple[list[int], list[int], int, dict[str, int]]] = [
    ([], [], 4, {"padding": 2}),
    ([0], [1], 4, {}),
    ([1], [1], 1, {}),
    ([15, 16, 17, 0], [1, 1, 1, 1], 16, {}),
    ([15, 16, 17, 0], [1, 1, 1, 1], 100, {}),
    ([40, 17, 0, 33], [4, 3, 4, 0], 7, {"heads": 6, "padding": 3}),
    ([66, 5], [9, 5], 16, {"heads": 3, "width": 24, "block_size": 5}),
    ([140], [2], 20, {"heads": 32, "width": 16, "block_size": 1}),
    ([50, 64], [5, 6], 33, {"heads": 1, "width": 48, "block_size": 8}),
]


def whole_case(contexts: list[int], counts: list[int], **shape: Any) -> LatentCase:
    case = make_case(contexts, counts, **{"width": 32, **shape})
    case = replace(case, q=(case.q * 1.5).round(), cache=(case.cache * 1.5).round())
    return case.with_garbage(float("nan"))


def weights_of(case: LatentCase) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-4, 9, case.q.shape[:2], generator=generator) / 4).to(case.q.device)


def oracle(case: LatentCase, top_k: int) -> list[list[int]]:
    """In fp64, a row at a time; `sorted` is stable, so the lower position comes first among equals."""
    weights, chosen = weights_of(case).double().cpu(), []
    for row, (request, position) in enumerate(case.rows):
        seen = list(range(position + 1))
        scores = []
        if seen:
            keys = case.entries(request, seen)
            scores = (weights[row] @ (case.q[row].double().cpu() @ keys.T).relu()).tolist()
        best = sorted(sorted(seen, key=lambda j: -scores[j])[:top_k])
        chosen.append(best + [-1] * (top_k - len(best)))
    return chosen


def run(case: LatentCase, top_k: int, implementation: str | None, **options: Any) -> list[list[int]]:
    options = {**case.bounds, **options, "implementation": implementation}
    got = index_topk(case.q, weights_of(case), *case.lists, top_k, **options)
    assert got.dtype == torch.int32 and got.shape == (len(case.rows), top_k)
    return got.tolist()


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize(("contexts", "counts", "top_k", "shape"), SHAPES, ids=str)
def test_torch_equals_definition(contexts: Any, counts: Any, top_k: int, shape: Any, implementation: str) -> None:
    case = whole_case(contexts, counts, **shape)
    assert run(case, top_k, implementation) == oracle(case, top_k)


def test_torch_in_each_type(dtype: torch.dtype) -> None:
    for contexts, counts in (([60], [20]), ([40, 17], [3, 1])):
        case = whole_case(contexts, counts, dtype=dtype)
        assert run(case, 8, "torch") == oracle(case, 8)


def test_torch_takes_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_ELEMENTS", 500)
    case = whole_case([40, 35], [20, 9], padding=2)
    assert run(case, 8, "torch") == oracle(case, 8)


@pytest.mark.parametrize(("contexts", "counts", "top_k", "shape"), SHAPES, ids=str)
def test_triton_equals_definition(
    triton_device: torch.device, contexts: Any, counts: Any, top_k: int, shape: Any
) -> None:
    case = whole_case(contexts, counts, device=triton_device, **shape)
    assert run(case, top_k, "triton") == oracle(case, top_k)


def test_triton_in_each_type(triton_device: torch.device, triton_dtype: torch.dtype) -> None:
    case = whole_case([40, 33], [3, 1], dtype=triton_dtype, device=triton_device)
    assert run(case, 8, "triton") == oracle(case, 8)


CAPACITY = 160  # so many tokens there is room for, in tests of contexts of up to 99


def launch(case: LatentCase, top_k: int, config: IndexConfig) -> list[list[int]]:
    """The Triton kernels as in a captured graph: bounds far above the batch."""
    capacity = CAPACITY
    tables = torch.full((len(case.contexts), -(-capacity // case.cache.shape[1])), 1_000_000, dtype=torch.int32)
    tables = tables.to(case.q.device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    rows = PagedRows(tables, case.query_starts, case.context_lens, 40, capacity)
    out = torch.full((len(case.rows), top_k), -99, dtype=torch.int32, device=case.q.device)
    index_topk_triton(IndexTopk(case.q, weights_of(case), case.cache, rows, out), config)
    return out.tolist()


@pytest.mark.parametrize(
    "config",
    [
        IndexConfig(block_m=16, lanes=16, chunk=32, programs=1),
        IndexConfig(block_m=32, lanes=32, chunk=16, scratch=CAPACITY * 3),
        IndexConfig(block_m=16, lanes=16, chunk=64, segment=32, scratch=CAPACITY * 5),
        IndexConfig(block_m=64, lanes=8, chunk=16, segment=16),
    ],
    ids=str,
)
def test_rows_and_contexts_in_pieces(triton_device: torch.device, config: IndexConfig) -> None:
    """Far more room than tokens, scores of a few rows at a time, segments that are longer or shorter than top_k."""
    for contexts, counts in (([99, 0, 17], [1, 1, 1]), ([50, 3], [5, 3])):
        case = whole_case(contexts, counts, padding=1, device=triton_device)
        assert launch(case, 20, config) == oracle(case, 20)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_unused_entries_never_matter(triton_device: torch.device, implementation: str) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    for contexts, counts in (([21, 30, 0], [1, 2, 2]), ([21], [3])):
        case = whole_case(contexts, counts, device=device)
        for garbage in (0.0, float("inf"), -3e38):
            assert run(case.with_garbage(garbage), 6, implementation) == oracle(case, 6)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter's
@pytest.mark.parametrize("implementation", ["torch", "reference", "triton"])
def test_any_scores_give_different_valid_positions(triton_device: torch.device, implementation: str) -> None:
    """NaN is the largest score, whatever its sign; zeros of both signs are equal."""
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = whole_case([12], [1], heads=1, width=16, block_size=12, device=device)
    case.q.fill_(1.0)
    block = int(case.block_tables[0, 0])
    case.cache[block] = torch.tensor([1.0] * 3 + [-1.0] * 9, device=device)[:, None] / 16
    case.cache[block, 7] = float("nan")
    case.cache[block, 9] = float("inf")

    def choose(weight: float, top_k: int) -> list[int]:
        weights = torch.tensor([[weight]], device=device)
        got = index_topk(case.q, weights, *case.lists, top_k, **case.bounds, implementation=implementation)
        return got[0].tolist()

    assert choose(1.0, 3) == [0, 7, 9]
    assert choose(-1.0, 3) == [3, 4, 7]  # scores of -1, -0 and -inf
    case.cache[block] = -float("nan")
    assert choose(1.0, 3) == [0, 1, 2]


def test_a_bound_need_not_be_tight(triton_device: torch.device) -> None:
    case = whole_case([9, 30], [1, 2], device=triton_device)
    for implementation in ("triton",) if ON_GPU else ("torch", "triton"):
        loose = run(case, 8, implementation, max_query_len=30, max_context_len=48)
        assert loose == oracle(case, 8)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_captured_call_follows_the_device(triton_device: torch.device) -> None:
    shape = {"heads": 32, "width": 128, "dtype": torch.bfloat16}
    case = whole_case([5000, 20, 40], [4, 4, 4], device=triton_device, **shape)
    tables = torch.zeros(3, 8192, dtype=torch.int32, device=triton_device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    lens, starts, weights = case.context_lens, case.query_starts, weights_of(case)
    options: dict[str, Any] = {"max_query_len": 4, "max_context_len": 131072}
    index_topk(case.q, weights, case.cache, tables, starts, lens, 2048, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_topk(case.q, weights, case.cache, tables, starts, lens, 2048, **options)
    for contexts in ([5000, 20, 40], [7, 0, 40], [4000, 4, 16], [0, 0, 0]):
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        out.fill_(-99)
        graph.replay()
        assert out.tolist() == oracle(replace(case, contexts=contexts), 2048)


def test_the_choice_is_explained() -> None:
    case = whole_case([5], [1])
    assert explain(IMPLEMENTATIONS, (case.q,)).name == "torch"
    with pytest.raises(ValueError, match="known here: torch, triton, reference"):
        run(case, 4, "cudnn")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(3, 4, 16)}, ValueError, "width"),
    ({"weights": torch.zeros(3, 4, dtype=torch.float64)}, TypeError, "weights must be float32"),
    ({"weights": torch.zeros(2, 4)}, ValueError, r"\[T, I\]"),
    ({"weights": torch.zeros(4, 3).T}, ValueError, "contiguous"),
    ({"top_k": 0}, ValueError, "top_k"),
    ({"context_lens": torch.tensor([2, 41], dtype=torch.int32)}, ValueError, "max_context_len = 40"),
    ({"block_tables": torch.tensor([[1, 0, 0], [2, 4, 0]], dtype=torch.int32)}, ValueError, "request 1 has block 4"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 4, 32),
        "weights": torch.zeros(3, 4),
        "cache": torch.zeros(4, 16, 32),
        "block_tables": torch.tensor([[1, 9, 9], [2, 3, -9]], dtype=torch.int32),
        "query_starts": torch.tensor([0, 2, 3], dtype=torch.int32),
        "context_lens": torch.tensor([2, 30], dtype=torch.int32),
        "top_k": 4,
        "max_query_len": 2,
        "max_context_len": 40,
    }
    index_topk(**arguments)
    with pytest.raises(error, match=message):
        index_topk(**{**arguments, **change})
