"""The native kernels against the references, and what happens where they cannot be built."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline_kernels import native
from hookline_kernels.activation import gated_activation
from hookline_kernels.attention_decode import attention_decode
from hookline_kernels.cache_write import cache_write
from hookline_kernels.linear import linear, pack_linear_weight
from hookline_kernels.rms_norm import rms_norm
from hookline_kernels.rotary import apply_rotary

REASON = native.load(torch.float32).reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels here: {REASON}")

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@TYPES
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("shape", [(960, 576), (100, 48), (17, 16), (33, 33), (1, 1), (2000, 31), (15, 1536)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(
    dtype: torch.dtype, tokens: int, shape: tuple[int, int], biased: bool, assert_close: Callable[..., None]
) -> None:
    """Widths that are no multiple of a vector, and fewer columns than a thread's tile."""
    x, weight = draw(tokens, shape[1], dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    bias = draw(shape[0], dtype=dtype, seed=2) if biased else None
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert_close(linear(x, pack_linear_weight(weight), bias, implementation="native"), want, looser=2.0)


@TYPES
def test_linear_does_not_depend_on_threads(dtype: torch.dtype) -> None:
    x, weight = draw(3, 64, dtype=dtype), pack_linear_weight(draw(1500, 64, dtype=dtype, seed=1))
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(linear(x, weight, implementation="native"))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@TYPES
def test_a_token_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    x, weight = draw(8, 96, dtype=dtype), pack_linear_weight(draw(130, 96, dtype=dtype, seed=1))
    whole = linear(x, weight, implementation="native")
    for row in range(8):
        assert torch.equal(linear(x[row : row + 1], weight, implementation="native")[0], whole[row])


@TYPES
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", [16, 576])
def test_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = draw(rows, 2 * size, dtype=dtype)[:, :size], draw(size, dtype=dtype, seed=1)
    residual, other = (draw(rows, size, dtype=dtype, seed=2) for _ in range(2))
    for options in ({}, {"residual": None}):
        found = rms_norm(x, weight, 1e-5, implementation="native", **options)
        same(found, rms_norm(x, weight, 1e-5, implementation="reference", **options))
    found, kept = rms_norm(x, weight, 1e-5, residual, implementation="native")
    want, wanted = rms_norm(x, weight, 1e-5, other, implementation="reference")
    same(found, want)
    assert kept is residual
    same(kept, wanted)


@TYPES
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_silu_and_mul(dtype: torch.dtype, rows: int) -> None:
    x = draw(rows, 160, dtype=dtype)[:, :96] * 8
    same(gated_activation(x, "silu", implementation="native"), gated_activation(x, "silu", implementation="reference"))


def test_silu_of_extremes() -> None:
    x = torch.tensor([-1e38, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 1e30] * 2 + [1.0] * 16)[None]
    found = gated_activation(x, "silu", implementation="native")
    same(found, gated_activation(x, "silu", implementation="reference"))
    x[0, 3] = float("nan")
    assert gated_activation(x, "silu", implementation="native").isnan().sum() == 1


@TYPES
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("half", [16, 32])
def test_rotary(dtype: torch.dtype, tokens: int, half: int) -> None:
    angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(3)) * 7
    cos, sin = angles.cos(), angles.sin()
    both = []
    for implementation in ("native", "reference"):
        qkv = draw(tokens, 7, 64, dtype=dtype)
        apply_rotary(qkv[:, :4], qkv[:, 4:6], cos, sin, implementation=implementation)
        both.append(qkv)
    same(*both)


@TYPES
def test_cache_write(dtype: torch.dtype) -> None:
    """Strided values, padding, and the entries around them left alone."""
    qkv = draw(4, 6, 16, dtype=dtype)
    slots = torch.tensor([5, -1, 0, 11])
    both = []
    for implementation in ("native", "reference"):
        caches = [torch.full((3, 4, 2, 16), 7.0, dtype=dtype) for _ in range(2)]
        cache_write((qkv[:, 2:4], qkv[:, 4:]), caches, slots, implementation=implementation)
        both.append(torch.stack(caches))
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="12"):
        cache_write((qkv[:, :2],), (both[0][0],), torch.tensor([0, 1, 2, 12]), implementation="native")


@TYPES
@pytest.mark.parametrize(
    ("options", "contexts"),
    [
        ({}, [1, 15, 16, 17, 90]),
        ({}, [33]),
        ({}, [0, 5, 0]),
        ({"window": 7}, [3, 7, 8, 64]),
        ({"window": 40, "soft_cap": 2.0}, [90, 12]),
        ({"soft_cap": 0.5}, [31]),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 1, 80)])
def test_attention_decode(
    dtype: torch.dtype, options: dict[str, Any], contexts: list[int], heads: int, kv_heads: int, size: int
) -> None:
    """Blocks out of order; what no request may read is NaN."""
    generator = torch.Generator().manual_seed(len(contexts))
    caches = [torch.full((60, 16, kv_heads, size), float("nan"), dtype=dtype) for _ in range(2)]
    tables = torch.randperm(60, generator=generator)[: len(contexts) * 6].view(len(contexts), 6).int()
    for row, context in enumerate(contexts):
        for position in range(max(0, context - options.get("window", context)), context):
            for cache in caches:
                entry = torch.randn(kv_heads, size, generator=generator)
                cache[tables[row, position // 16], position % 16] = entry.to(dtype)
    q = draw(len(contexts), heads + 2, size, dtype=dtype)[:, :heads]
    lens = torch.tensor(contexts, dtype=torch.int32)
    found, want = (
        attention_decode(
            q, *caches, tables, lens, size**-0.5, max_context_len=max(contexts), implementation=i, **options
        )
        for i in ("native", "reference")
    )
    same(found, torch.where((lens > 0)[:, None, None], want, torch.zeros_like(want)))


def test_attention_decode_says_when_the_context_has_nan() -> None:
    cache = torch.zeros(1, 16, 1, 16)
    cache[0, 3] = float("nan")
    tables, lens = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    q = torch.ones(2, 1, 16)
    found = attention_decode(q, cache, cache, tables, lens, 1.0, max_context_len=4, implementation="native")
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    x = torch.randn(1, 64 * 1024, generator=torch.Generator().manual_seed(0)) * 1e3
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.3895e38, 1e-40])
    x[0, :7] = special
    one = pack_linear_weight(torch.ones(1, 1, dtype=torch.bfloat16))
    for value in x[0, :512].tolist():
        found = linear(torch.tensor([[value]]).bfloat16(), one, implementation="native")
        assert torch.equal(found.nan_to_num(5.0), torch.tensor([[value]]).bfloat16().nan_to_num(5.0))


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of sums and one rounding."""
    tolerance = {"rtol": 1.6e-2, "atol": 2e-2} if found.dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(found, want, **tolerance)


class TestBuilding:
    def test_it_is_built_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second process, which finds the library in the cache, runs the compiler for its version alone."""
        commands = []
        run = subprocess.run

        def spy(command: list[str], **options: Any) -> Any:
            commands.append(command[1])
            return run(command, **options)

        monkeypatch.setattr(subprocess, "run", spy)
        assert native.load.__wrapped__(torch.float32).reason is None
        assert commands == ["--version"]

    def test_without_a_compiler_the_reason_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        found = native.load.__wrapped__(torch.float32)
        assert found.library is None
        assert "no C compiler" in str(found.reason)

    def test_a_broken_compiler_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
        assert "/bin/false could not build" in str(native.load.__wrapped__(torch.float32).reason)

    def test_other_types_have_none(self) -> None:
        assert "float16" in str(native.why_not(torch.zeros(1, dtype=torch.float16)))
        with pytest.raises(RuntimeError, match="float16"):
            native.native(torch.float16)
        with pytest.raises(ValueError, match="cannot be used"):
            linear(torch.zeros(1, 16).half(), torch.zeros(16, 16).half(), implementation="native")
