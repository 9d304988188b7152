"""attention_decode: the CPU implementation and the Triton kernels against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from benchmarks.tune_attention import DECODE
from hookline_kernels.attention_decode import IMPLEMENTATIONS, attention_decode
from hookline_kernels.attention_decode_triton import DecodeConfig, attention_decode_triton, decode_config
from hookline_kernels.implementations import explain
from hookline_kernels.native import why_not
from hookline_kernels.paged_context import Limits, PagedAttention

Make = Callable[..., Any]

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret

# Contexts of the requests of a batch, and what differs from the common shape.
SHAPES: list[tuple[list[int], dict[str, int]]] = [
    ([], {}),
    ([0], {}),
    ([1], {}),
    ([15, 16, 17], {}),
    ([63, 64, 65, 0], {}),
    ([64, 64], {}),
    ([40, 40], {}),
    ([200, 3], {"heads": 4, "kv_heads": 4, "size": 32}),
    ([70], {"heads": 5, "kv_heads": 1, "size": 80}),
    ([33, 100], {"heads": 6, "kv_heads": 2, "size": 96, "block_size": 32}),
    ([129, 5], {"heads": 8, "kv_heads": 2, "size": 128, "block_size": 5}),
    ([37, 90], {"heads": 2, "kv_heads": 1, "size": 256, "block_size": 1}),
    ([66, 20], {"heads": 20, "kv_heads": 1, "size": 32}),
]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 20}, {"window": 1}, {"window": 1000}, {"soft_cap": 2.0}]
OPTIONS += [{"window": 50, "soft_cap": 1.5}]
SOME = [SHAPES[i] for i in (3, 4, 8, 9)]


def run(case: Any, implementation: str | None, **options: Any) -> torch.Tensor:
    return attention_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.context_lens,
        case.scale,
        max_context_len=max(case.contexts, default=0),
        implementation=implementation,
        **options,
    )


def decode_case(make: Make, contexts: list[int], **shape: Any) -> Any:
    """One row for each request; the row of an empty context sees nothing."""
    return make(contexts, [1] * len(contexts), **shape)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("contexts", "shape"), SHAPES, ids=str)
def test_torch_equals_definition(
    attention_case: Make, assert_close: Make, contexts: Any, shape: Any, options: Any, implementation: str
) -> None:
    case = decode_case(attention_case, contexts, **shape)
    assert_close(run(case, implementation, **options), case.oracle(**options))


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
def test_torch_in_each_type(attention_case: Make, assert_close: Make, dtype: torch.dtype, options: Any) -> None:
    for contexts in ([37], [63, 64, 65], [48, 48]):
        case = decode_case(attention_case, contexts, dtype=dtype)
        assert_close(run(case, "torch", **options), case.oracle(**options), looser=2.0)


def test_torch_with_blocks_in_a_row(attention_case: Make, assert_close: Make) -> None:
    case = decode_case(attention_case, [60], block_size=16)
    case.block_tables[0, :4] = torch.arange(1, 5)
    layers = torch.randn(3, *case.k_cache.shape)  # a layer's cache may be a part of a larger tensor
    case = replace(case, k_cache=layers[1], v_cache=layers[2])
    assert_close(run(case, "torch"), case.oracle())
    assert_close(run(case, "torch", window=21), case.oracle(window=21))


@pytest.mark.parametrize(("contexts", "shape"), SHAPES, ids=str)
def test_triton_equals_definition(
    attention_case: Make,
    assert_close: Make,
    triton_device: torch.device,
    triton_dtype: torch.dtype,
    contexts: Any,
    shape: Any,
) -> None:
    case = decode_case(attention_case, contexts, dtype=triton_dtype, device=triton_device, **shape)
    assert_close(run(case, "triton"), case.oracle(), looser=2.0)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
@pytest.mark.parametrize(("contexts", "shape"), SOME, ids=str)
def test_triton_window_and_soft_cap(
    attention_case: Make, assert_close: Make, triton_device: torch.device, contexts: Any, shape: Any, options: Any
) -> None:
    case = decode_case(attention_case, contexts, device=triton_device, **shape)
    assert_close(run(case, "triton", **options), case.oracle(**options), looser=2.0)


def launch(case: Any, config: DecodeConfig, capacity: int, **options: Any) -> torch.Tensor:
    """The Triton kernels as in a captured graph: block tables and max_context_len for `capacity` tokens, counters."""
    columns = -(-capacity // case.k_cache.shape[1])
    tables = torch.zeros(len(case.contexts), columns, dtype=torch.int32, device=case.q.device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    counters = torch.zeros(len(case.contexts) * case.k_cache.shape[2], dtype=torch.int32, device=case.q.device)
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    window, soft_cap = options.get("window"), options.get("soft_cap")
    numbers = (case.scale, window, soft_cap, capacity)
    call = PagedAttention(case.q, case.k_cache, case.v_cache, tables, case.context_lens, *numbers, out, counters)
    attention_decode_triton(call, config)
    assert not counters.any()
    return out


def under_interpreter(configs: list[DecodeConfig]) -> list[DecodeConfig]:
    """Without those that only a compiler tells apart."""
    return list({(c.block_n, c.programs, c.least, c.fused): c for c in configs}.values())


@pytest.mark.parametrize("config", DECODE if ON_GPU else under_interpreter(DECODE), ids=str)
def test_each_configuration(
    attention_case: Make, assert_close: Make, triton_device: torch.device, config: DecodeConfig
) -> None:
    for contexts, shape, options in (
        ([130, 0, 17, 1], {"heads": 6, "kv_heads": 2, "size": 80, "block_size": 16}, {}),
        ([300], {"heads": 4, "kv_heads": 1, "size": 32, "block_size": 5}, {"window": 257, "soft_cap": 1.5}),
    ):
        case = decode_case(attention_case, contexts, dtype=torch.float16, device=triton_device, **shape)
        assert_close(launch(case, config, 5000, **options), case.oracle(**options), looser=2.0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "contexts",
    [
        [0],
        [0, 0, 0],
        [1, 1],
        [16, 17, 15, 0],
        [200, 1, 0, 33],
        [1, 2, 300],
        [*range(15, 32), 0, 0],
    ],
    ids=str,
)
def test_pieces_of_real_contexts(
    attention_case: Make, assert_close: Make, triton_device: torch.device, contexts: list[int], fused: bool
) -> None:
    """Far more room than tokens: programs without work, rows of padding, one long request, many requests."""
    case = decode_case(attention_case, contexts, heads=2, kv_heads=1, size=32, device=triton_device)
    for programs in (1, 4):
        out = launch(case, DecodeConfig(16, programs=programs, fused=fused), 100_000)
        assert_close(out, case.oracle(), looser=2.0)
        assert not out[case.context_lens == 0].any()


def test_counters_save_the_second_launch_only(
    attention_case: Make, assert_close: Make, triton_device: torch.device
) -> None:
    case = decode_case(attention_case, [150, 0, 40], heads=2, kv_heads=1, size=32, device=triton_device)
    counters = torch.zeros(20, dtype=torch.int32, device=triton_device)
    for _ in range(2):
        assert_close(run(case, "triton", counters=counters), run(case, "triton"))
        assert not counters.any()


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("with_counters", [True, False])
def test_a_captured_call_follows_the_device(
    attention_case: Make, assert_close: Make, triton_device: torch.device, with_counters: bool
) -> None:
    case = decode_case(attention_case, [300, 20, 40], device=triton_device)
    tables = torch.zeros(3, 4096, dtype=torch.int32, device=triton_device)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    lens, out = case.context_lens, torch.empty_like(case.q, memory_format=torch.contiguous_format)
    counters = torch.zeros(9, dtype=torch.int32, device=triton_device) if with_counters else None
    options: dict[str, Any] = {"max_context_len": 65536, "out": out, "counters": counters}
    attention_decode(case.q, case.k_cache, case.v_cache, tables, lens, case.scale, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_decode(case.q, case.k_cache, case.v_cache, tables, lens, case.scale, **options)
    for contexts in ([300, 20, 40], [7, 0, 40], [299, 1, 16], [0, 0, 0]):
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, replace(case, contexts=contexts).oracle(), looser=2.0)
        assert counters is None or not counters.any()


def test_the_configuration_fits_the_device(attention_case: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decode_case(attention_case, [40], heads=2, kv_heads=1, size=256)
    tables, lens = case.block_tables, case.context_lens
    call = PagedAttention(case.q, case.k_cache, case.v_cache, tables, lens, 1.0, None, None, 40, case.q)
    for room in (2**16, 2**17, 2**18):
        monkeypatch.setattr(
            "hookline_kernels.attention_decode_triton.limits", lambda device, room=room: Limits(8, room)
        )
        config = decode_config(call)
        assert config.stages * 2 * config.block_n * 256 * 4 <= room or config.stages == 1


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("contexts", [[21], [21, 40, 1]], ids=str)
def test_unused_entries_never_change_a_bit(
    attention_case: Make, triton_device: torch.device, contexts: Any, options: Any, implementation: str
) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    case = decode_case(attention_case, contexts, device=device)
    clean = run(case.with_garbage(0.0), implementation, **options)
    for garbage in (float("nan"), float("inf"), -3e38):
        assert torch.equal(run(case.with_garbage(garbage), implementation, **options), clean)


def test_writes_into_out(attention_case: Make) -> None:
    case = decode_case(attention_case, [5, 9])
    out = torch.full(case.q.shape, 7.0)
    assert run(case, None, out=out) is out
    assert torch.equal(out, run(case, None))


def test_the_choice_is_explained(attention_case: Make) -> None:
    case = decode_case(attention_case, [5])
    query = (case.q, case.k_cache)
    assert explain(IMPLEMENTATIONS, query).name == ("torch" if why_not(case.q) else "native")
    odd = (case.q[..., :8], case.k_cache)
    assert str(explain(IMPLEMENTATIONS, odd)).startswith("torch (not native: it takes head sizes")
    assert "'reference' was asked for" in str(explain(IMPLEMENTATIONS, query, "reference"))
    with pytest.raises(ValueError, match="known here: native, torch, triton, reference"):
        run(case, "cudnn")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 9)}, ValueError, r"q \[T, H, D\]"),
    ({"q": torch.zeros(3, 9, 64)}, ValueError, "3 tokens for 2 requests"),
    ({"q": torch.zeros(2, 10, 64)}, ValueError, "multiple of K"),
    ({"q": torch.zeros(2, 9, 32)}, ValueError, "D 32"),
    ({"block_tables": torch.zeros(2, 3)}, TypeError, "int32"),
    ({"block_tables": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, r"\[B, N\]"),
    ({"context_lens": torch.zeros(2, dtype=torch.int64)}, TypeError, "int32"),
    ({"context_lens": torch.ones(4, dtype=torch.int32)[::2]}, ValueError, "context_lens must be contiguous"),
    ({"block_tables": torch.zeros(2, 3, dtype=torch.int32, device="meta")}, ValueError, "on one device"),
    ({"max_context_len": 1000}, ValueError, "context of 1000"),
    ({"v_cache": torch.zeros(4, 16, 3, 32)}, ValueError, "two caches"),
    ({"k_cache": torch.zeros(4, 16, 3, 128)[..., ::2]}, ValueError, "contiguous"),
    ({"window": 0}, ValueError, "window"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap"),
    ({"scale": 0.0}, ValueError, "scale"),
    ({"out": torch.zeros(2, 9, 32)}, ValueError, "out"),
    ({"counters": torch.zeros(5, dtype=torch.int32)}, ValueError, "counters"),
    ({"counters": torch.zeros(6)}, ValueError, "got torch.float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 9, 64),
        "k_cache": torch.zeros(4, 16, 3, 64),
        "v_cache": torch.zeros(4, 16, 3, 64),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "max_context_len": 1,
    }
    attention_decode(**arguments)
    with pytest.raises(error, match=message):
        attention_decode(**{**arguments, **change})


UNSOUND: list[tuple[dict[str, list[int]], str]] = [
    ({"context_lens": [2, -30]}, "request 1 has a context of -30"),
    ({"context_lens": [2, 41]}, "max_context_len = 40"),
    ({"block_tables": [1, 0, 0, 2, 4, 0]}, "request 1 has block 4 in a cache of 4 blocks"),
    ({"block_tables": [-1, 0, 0, 2, 1, 0]}, "request 0 has block -1"),
]


@pytest.mark.parametrize("implementation", ["torch", "native", "reference"])
@pytest.mark.parametrize(("change", "message"), UNSOUND, ids=str)
def test_numbers_that_cannot_be_followed_are_refused(
    change: dict[str, list[int]], message: str, implementation: str
) -> None:
    q, cache = torch.zeros(2, 9, 64), torch.zeros(4, 16, 3, 64)
    if implementation == "native" and why_not(q):
        pytest.skip(f"none here: {why_not(q)}")
    numbers = {"context_lens": [2, 30], "block_tables": [1, 9, 9, 2, 3, -9]}

    def call(numbers: dict[str, list[int]], **options: Any) -> None:
        given = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
        given["block_tables"] = given["block_tables"].view(2, 3)
        options |= {"max_context_len": 40, "implementation": implementation}
        attention_decode(q, cache, cache, **given, scale=1.0, **options)

    call(numbers)
    with pytest.raises(ValueError, match=message):
        call(numbers | change)
    behind = numbers | {"block_tables": [1, 9, 9, -5, 3, 9]}  # a block that the window has left
    call(behind, window=14)
    with pytest.raises(ValueError, match="block -5"):
        call(behind, window=15)
