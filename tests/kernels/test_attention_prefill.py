"""attention_prefill: the CPU implementations and the Triton kernel against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hookline_kernels.attention_prefill
from hookline_kernels import native
from hookline_kernels.attention_prefill import attention_prefill

Make = Callable[..., Any]

NO_NATIVE = native.load(torch.float32).reason
NATIVE = pytest.param("native", marks=pytest.mark.skipif(NO_NATIVE is not None, reason=f"none here: {NO_NATIVE}"))

# Contexts of the requests, their rows, and what differs from the common shape.
SHAPES: list[tuple[list[int], list[int], dict[str, int]]] = [
    ([], [], {}),
    ([1], [1], {}),
    ([31], [31], {}),
    ([32], [32], {}),
    ([33], [33], {}),
    ([40, 7, 64], [40, 0, 20], {}),
    ([70, 33, 20, 1], [7, 1, 20, 1], {}),
    ([90, 35], [20, 35], {"heads": 4, "kv_heads": 4, "size": 32}),
    ([50], [34], {"heads": 5, "kv_heads": 1, "size": 80}),
    ([65, 12], [17, 12], {"heads": 2, "kv_heads": 2, "size": 96, "block_size": 32}),
    ([66, 20], [33, 3], {"heads": 4, "kv_heads": 2, "size": 128, "block_size": 5}),
    ([37, 40], [16, 40], {"heads": 2, "kv_heads": 1, "size": 256, "block_size": 1}),
]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 20}, {"window": 1}, {"window": 40}, {"window": 1000}]
OPTIONS += [{"soft_cap": 2.0}, {"window": 33, "soft_cap": 1.5}, {"window": 100}]
SMALL = {"heads": 3, "kv_heads": 1, "size": 32}


def run(case: Any, implementation: str | None, **options: Any) -> torch.Tensor:
    return attention_prefill(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        max_query_len=max(case.rows, default=0),
        max_context_len=max(case.contexts, default=0),
        implementation=implementation,
        **options,
    )


@pytest.mark.parametrize("implementation", ["torch", NATIVE, "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("contexts", "rows", "shape"), SHAPES, ids=str)
def test_cpu_equals_definition(
    attention_case: Make,
    assert_close: Make,
    contexts: Any,
    rows: Any,
    shape: Any,
    options: Any,
    implementation: str,
) -> None:
    case = attention_case(contexts, rows, **shape)
    assert_close(run(case, implementation, **options), case.oracle(**options))


@pytest.mark.parametrize("implementation", [NATIVE])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
def test_long_contexts(attention_case: Make, assert_close: Make, options: Any, implementation: str) -> None:
    """More positions than the native kernel holds scores of, some wholly outside of a row's window."""
    case = attention_case([700, 513, 256], [100, 513, 1], **SMALL)
    assert_close(run(case, implementation, **options), case.oracle(**options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torch_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, attention_case: Make, assert_close: Make, options: Any
) -> None:
    monkeypatch.setattr(hookline_kernels.attention_prefill, "CPU_ROWS", 8)
    case = attention_case([70, 33, 20], [25, 8, 20], **SMALL)
    assert_close(run(case, "torch", **options), case.oracle(**options))


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
def test_cpu_in_each_type(attention_case: Make, assert_close: Make, dtype: torch.dtype, options: Any) -> None:
    case = attention_case([33, 40, 9], [33, 12, 1], dtype=dtype)
    for implementation in ("torch", None):
        assert_close(run(case, implementation, **options), case.oracle(**options), looser=2.0)


@pytest.mark.parametrize(("contexts", "rows", "shape"), SHAPES, ids=str)
def test_triton_equals_definition(
    attention_case: Make,
    assert_close: Make,
    triton_device: torch.device,
    triton_dtype: torch.dtype,
    contexts: Any,
    rows: Any,
    shape: Any,
) -> None:
    case = attention_case(contexts, rows, dtype=triton_dtype, device=triton_device, **shape)
    assert_close(run(case, "triton"), case.oracle(), looser=2.0)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [([240, 20], [70, 20]), ([33, 1, 40], [33, 1, 1])],
    ids=str,
)
def test_triton_window_and_soft_cap(
    attention_case: Make, assert_close: Make, triton_device: torch.device, contexts: Any, rows: Any, options: Any
) -> None:
    case = attention_case(contexts, rows, device=triton_device, **SMALL)
    assert_close(run(case, "triton", **options), case.oracle(**options), looser=2.0)


@pytest.mark.parametrize("implementation", ["torch", NATIVE, "triton"])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"soft_cap": 2.0}], ids=str)
def test_unused_entries_never_change_a_bit(
    attention_case: Make, triton_device: torch.device, options: Any, implementation: str
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = attention_case([21, 40], [21, 5], device=device, **SMALL)
    clean = run(case.with_garbage(0.0), implementation, **options)
    for garbage in (float("nan"), float("inf"), -3e38):
        assert torch.equal(run(case.with_garbage(garbage), implementation, **options), clean)


@pytest.mark.parametrize("implementation", ["torch", NATIVE, "triton"])
def test_chunks_give_what_the_whole_prompt_gives(
    attention_case: Make, assert_close: Make, triton_device: torch.device, implementation: str
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = attention_case([45], [45], device=device, **SMALL)
    whole = run(case, implementation)
    for begin, end in ((0, 5), (5, 6), (6, 38), (38, 45)):
        out = attention_prefill(
            case.q[begin:end],
            case.k_cache,
            case.v_cache,
            case.block_tables,
            torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device),
            case.scale,
            max_query_len=end - begin,
            max_context_len=end,
            implementation=implementation,
        )
        assert_close(out, whole[begin:end])


def test_writes_into_out(attention_case: Make) -> None:
    case = attention_case([5, 9], [2, 9])
    out = torch.full(case.q.shape, 7.0)
    assert run(case, None, out=out) is out
    assert torch.equal(out, run(case, None))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(4, 10, 64)}, ValueError, "multiple of K"),
    ({"query_starts": torch.tensor([0, 2, 4])}, TypeError, "query_starts must be int32"),
    ({"query_starts": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "one entry more"),
    ({"window": -1}, ValueError, "window"),
    ({"out": torch.zeros(4, 9, 64, dtype=torch.float16)}, ValueError, "out"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 9, 64),
        "k_cache": torch.zeros(4, 16, 3, 64),
        "v_cache": torch.zeros(4, 16, 3, 64),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "query_starts": torch.tensor([0, 2, 4], dtype=torch.int32),
        "context_lens": torch.tensor([2, 3], dtype=torch.int32),
        "scale": 1.0,
        "max_query_len": 2,
        "max_context_len": 3,
    }
    attention_prefill(**arguments)
    with pytest.raises(error, match=message):
        attention_prefill(**{**arguments, **change})
