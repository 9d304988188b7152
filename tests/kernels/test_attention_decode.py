"""attention_decode: the CPU implementation and the Triton kernels against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline_kernels.attention_decode import IMPLEMENTATIONS, attention_decode
from hookline_kernels.implementations import explain
from hookline_kernels.native import why_not

Make = Callable[..., Any]

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
    ({"max_context_len": 1000}, ValueError, "context of 1000"),
    ({"v_cache": torch.zeros(4, 16, 3, 32)}, ValueError, "two caches"),
    ({"k_cache": torch.zeros(4, 16, 3, 128)[..., ::2]}, ValueError, "contiguous"),
    ({"window": 0}, ValueError, "window"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap"),
    ({"out": torch.zeros(2, 9, 32)}, ValueError, "out"),
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
