"""attention_prefill: the CPU implementations and the Triton kernel against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

import hookline_kernels.attention_prefill
from benchmarks.tune_attention import PREFILL
from hookline_kernels import native
from hookline_kernels.attention_prefill import attention_prefill
from hookline_kernels.attention_prefill_triton import PrefillConfig, attention_prefill_triton, prefill_config
from hookline_kernels.paged_context import Limits, PagedAttention

Make = Callable[..., Any]

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret

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


def launch(case: Any, config: PrefillConfig, **options: Any) -> torch.Tensor:
    """The Triton kernel with bounds far above what the batch needs."""
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    numbers = (case.scale, options.get("window"), options.get("soft_cap"), case.block_tables.shape[1])
    tables, lens = case.block_tables, case.context_lens
    call = PagedAttention(case.q, case.k_cache, case.v_cache, tables, lens, *numbers, out)
    attention_prefill_triton(call, case.query_starts, 10_000, config)
    return out


def under_interpreter(configs: list[PrefillConfig]) -> list[PrefillConfig]:
    """Without those that only a compiler tells apart, and small tiles that make many in short contexts."""
    distinct = {(c.block_m, c.block_n, c.packed): c for c in configs}
    small = [PrefillConfig(16, 16), PrefillConfig(16, 32), PrefillConfig(32, 16, packed=True)]
    return [*distinct.values(), *small]


@pytest.mark.parametrize("config", PREFILL if ON_GPU else under_interpreter(PREFILL), ids=str)
def test_each_configuration(
    attention_case: Make, assert_close: Make, triton_device: torch.device, config: PrefillConfig
) -> None:
    for contexts, rows, shape, options in (
        ([150, 1, 40, 30], [21, 1, 0, 30], {"heads": 4, "kv_heads": 2, "size": 80, "block_size": 16}, {}),
        ([110], [30], {"heads": 4, "kv_heads": 1, "size": 32, "block_size": 5}, {"window": 70, "soft_cap": 1.5}),
        ([70, 19], [33, 19], {"heads": 3, "kv_heads": 1, "size": 32, "block_size": 8}, {"window": 20}),
    ):
        case = attention_case(contexts, rows, dtype=torch.float16, device=triton_device, **shape)
        assert_close(launch(case, config, **options), case.oracle(**options), looser=2.0)


def test_more_requests_than_a_tile(attention_case: Make, assert_close: Make, triton_device: torch.device) -> None:
    rows = [0, 3, 1] * 6 + [20]
    case = attention_case([n + 5 for n in rows], rows, device=triton_device, **SMALL)
    assert_close(launch(case, PrefillConfig(16, 16)), case.oracle(), looser=2.0)


@pytest.mark.parametrize("most", [1, 4, 16, 17, 64, 65, 1000])
def test_the_configuration_fits_the_device(attention_case: Make, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    case = attention_case([40], [40], heads=8, kv_heads=2, size=128, dtype=torch.float16)
    tables, lens = case.block_tables, case.context_lens
    call = PagedAttention(case.q, case.k_cache, case.v_cache, tables, lens, 1.0, None, None, 40, case.q)
    for room in (2**16, 2**17, 2**18):
        monkeypatch.setattr(
            "hookline_kernels.attention_prefill_triton.limits", lambda device, room=room: Limits(8, room)
        )
        config = prefill_config(call, most)
        assert (config.block_m + config.stages * 2 * config.block_n) * 256 <= room or config.stages == 1
        assert config.block_m >= min(most * (4 if config.packed else 1), 64)


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


@pytest.mark.skipif(NO_NATIVE is not None, reason=f"none here: {NO_NATIVE}")
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"soft_cap": 2.0}], ids=str)
def test_native_rows_do_not_depend_on_chunks_or_threads(attention_case: Make, options: Any) -> None:
    """Nor on how many rows go together, to the last bit."""
    case = attention_case([700], [300], **SMALL)
    whole, threads = run(case, "native", **options), torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for begin, end in ((0, 1), (1, 150), (150, 300)):
            part = replace(case, q=case.q[begin:end], rows=[end - begin], contexts=[400 + end])
            assert torch.equal(run(part, "native", **options), whole[begin:end])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [16, 272, 512])
def test_native_head_sizes(attention_case: Make, assert_close: Make, size: int) -> None:
    if NO_NATIVE is not None:
        pytest.skip(f"none here: {NO_NATIVE}")
    case = attention_case([40, 9], [33, 2], heads=2, kv_heads=1, size=size)
    assert_close(run(case, "native"), case.oracle())


@pytest.mark.skipif(NO_NATIVE is not None, reason=f"none here: {NO_NATIVE}")
def test_native_with_more_heads_than_a_part_has_rows(attention_case: Make, assert_close: Make) -> None:
    case = attention_case([20], [3], heads=300, kv_heads=1, size=16)
    assert_close(run(case, "native"), case.oracle())


def test_writes_into_out(attention_case: Make) -> None:
    case = attention_case([5, 9], [2, 9])
    out = torch.full(case.q.shape, 7.0)
    assert run(case, None, out=out) is out
    assert torch.equal(out, run(case, None))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(4, 10, 64)}, ValueError, "multiple of K"),
    ({"query_starts": torch.tensor([0, 2, 4])}, TypeError, "query_starts must be int32"),
    ({"query_starts": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "one entry more"),
    (
        {"query_starts": torch.tensor([0, 9, 2, 9, 4, 9], dtype=torch.int32)[::2]},
        ValueError,
        "query_starts must be con",
    ),
    (
        {"context_lens": torch.tensor([2, 9, 3, 9], dtype=torch.int32)[::2]},
        ValueError,
        "context_lens must be contiguous",
    ),
    ({"context_lens": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "on one device"),
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


UNSOUND: list[tuple[dict[str, list[int]], str]] = [
    ({"query_starts": [0, 2, 5]}, "rise from 0 to T = 4"),
    ({"query_starts": [0, 2, 3]}, "rise from 0 to T = 4"),
    ({"query_starts": [1, 2, 4]}, "rise from 0 to T = 4"),
    ({"query_starts": [0, 5, 4]}, "rise from 0 to T = 4"),
    ({"query_starts": [0, -2, 4]}, "rise from 0 to T = 4"),
    ({"context_lens": [1, 30]}, "request 0 has a context of 1"),
    ({"context_lens": [2, -30]}, "request 1 has a context of -30"),
    ({"context_lens": [2, 41]}, "max_context_len = 40"),
    ({"block_tables": [1, 0, 0, 2, 4, 0]}, "request 1 has block 4 in a cache of 4 blocks"),
    ({"block_tables": [-1, 0, 0, 2, 1, 0]}, "request 0 has block -1"),
]


@pytest.mark.parametrize("implementation", ["torch", NATIVE, "reference"])
@pytest.mark.parametrize(("change", "message"), UNSOUND, ids=str)
def test_numbers_that_cannot_be_followed_are_refused(
    change: dict[str, list[int]], message: str, implementation: str
) -> None:
    numbers = {"query_starts": [0, 2, 4], "context_lens": [2, 30], "block_tables": [1, 9, 9, 2, 3, -9]}

    def call(numbers: dict[str, list[int]], **options: Any) -> None:
        given = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
        given["block_tables"] = given["block_tables"].view(2, 3)
        q, cache = torch.zeros(4, 9, 64), torch.zeros(4, 16, 3, 64)
        bounds = {"max_query_len": 2, "max_context_len": 40}
        attention_prefill(q, cache, cache, **given, scale=1.0, implementation=implementation, **bounds, **options)

    call(numbers)
    with pytest.raises(ValueError, match=message):
        call(numbers | change)
    behind = numbers | {"block_tables": [1, 9, 9, -5, 3, 9]}  # a block that the window has left
    if implementation != "reference":  # which reads what it then masks
        call(behind, window=12)
    with pytest.raises(ValueError, match="block -5"):
        call(behind, window=16)
