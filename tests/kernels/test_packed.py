"""Packed weights: the same values, the same products, whichever way they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hookline_kernels.linear
import hookline_kernels.packed
from hookline_kernels import native
from hookline_kernels.embedding import embedding
from hookline_kernels.implementations import explain
from hookline_kernels.linear import (
    GATED_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    linear,
    linear_gated,
    pack_linear_weight,
    unpack_linear_weight,
)
from hookline_kernels.packed import pack, unpack, weight_bytes
from tests.kernels.test_quantized import draw

REASON = native.load(torch.float32).reason
BITS = pytest.mark.parametrize("bits", [4, 8])
TYPES = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NO_COMPILER = lambda dtype: native.Native(None, "there is no C compiler")  # noqa: E731
NATIVE = pytest.mark.skipif(REASON is not None, reason=f"no native kernels here: {REASON}")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@BITS
@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (64, 160)])
def test_packing_keeps_every_value(bits: int, shape: tuple[int, int]) -> None:
    weight = draw(*shape, bits=bits)
    packed = pack(weight)
    assert torch.equal(unpack(packed), weight.values())
    assert packed.nbytes == shape[0] * shape[1] * (5 if bits == 4 else 8.5) / 8


@NATIVE
@BITS
@TYPES
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 65, 130])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_linear(
    bits: int,
    kind: torch.dtype,
    tokens: int,
    biased: bool,
    wide: bool,
    assert_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hookline_kernels.packed, "PANEL", 64)
    monkeypatch.setattr(hookline_kernels.linear, "NATIVE_TOKENS_PACKED", 200)
    weight = draw(160, 96, bits=bits)
    x, bias = randn(tokens, 96, dtype=kind), randn(160, dtype=kind, seed=1) if biased else None
    want = x.double() @ weight.values().double().t() + (0 if bias is None else bias.double())
    for implementation in ("packed_native", "packed_panels", "reference"):
        found = linear(x, pack(weight), bias, wide=wide, implementation=implementation)
        assert found.dtype == (torch.float32 if wide else kind)
        scale = weight.values().abs().max().item()  # codes of 8 bits make large values
        assert_close(found / scale, want / scale, looser=4.0)


@NATIVE
@BITS
@TYPES
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_gated(bits: int, kind: torch.dtype, tokens: int, biased: bool, assert_close: Any) -> None:
    weight = draw(192, 64, bits=bits)
    scale = weight.values().abs().max().item() * 4
    x, bias = randn(tokens, 64, dtype=kind) / scale, randn(192, dtype=kind, seed=1) if biased else None
    sums = x.double() @ weight.values().double().t() + (0 if bias is None else bias.double())
    want = torch.nn.functional.silu(sums[:, :96]) * sums[:, 96:]
    assert_close(linear_gated(x, pack(weight), bias, implementation="packed_silu"), want, looser=4.0)
    assert explain(GATED_IMPLEMENTATIONS, (x, pack(weight), "silu")).name == "packed_silu"
    assert explain(GATED_IMPLEMENTATIONS, (x, pack(weight), "gelu")).name == "two_steps"
    assert explain(GATED_IMPLEMENTATIONS, (x, pack(draw(96, 64, bits=bits)), "silu")).name == "two_steps"


@NATIVE
@TYPES
def test_no_token(kind: torch.dtype) -> None:
    assert linear(torch.zeros(0, 64, dtype=kind), pack(draw(32, 64, bits=4))).shape == (0, 32)


@NATIVE
@BITS
def test_products_are_those_of_the_values_bit_for_bit(bits: int) -> None:
    """Multiplying a value out in a register or before makes no difference, and the sums go in the same order."""
    weight, x = draw(64, 96, bits=bits), randn(5, 96, dtype=torch.float32)
    dense = pack_linear_weight(weight.values())
    assert torch.equal(
        linear(x, pack(weight), implementation="packed_native"), linear(x, dense, implementation="native")
    )


@NATIVE
@BITS
def test_a_token_does_not_see_its_neighbours(bits: int) -> None:
    weight, x = pack(draw(96, 64, bits=bits)), randn(70, 64, dtype=torch.float32)
    whole = linear(x, weight, implementation="packed_native")
    for row in (0, 63, 64, 69):
        assert torch.equal(linear(x[row : row + 1], weight, implementation="packed_native")[0], whole[row])


@NATIVE
@TYPES
def test_small_scales(kind: torch.dtype) -> None:
    """Those below fp16's normal numbers, and none at all."""
    weight = draw(32, 32, bits=4)
    assert weight.offsets is not None
    weight.scales[:16] = 2.0**-24 * torch.arange(16).view(16, 1)
    weight.offsets[8:24] = -(2.0**-20)
    found = linear(torch.eye(32, dtype=kind), pack(weight), wide=True, implementation="packed_native")
    assert torch.equal(found, weight.values().t())


@BITS
@TYPES
@pytest.mark.parametrize("without_native", [False, True])
def test_embedding(bits: int, kind: torch.dtype, without_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without_native:
        monkeypatch.setattr(native, "load", NO_COMPILER)
    weight = draw(96, 64, bits=bits)
    for ids in ([], [0], [95, 31, 32, 33, 31]):
        found = embedding(torch.tensor(ids, dtype=torch.int32), pack(weight), kind)
        assert torch.equal(found, weight.values()[ids].to(kind))
    for wrong in (96, -1, -97, 2**40):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, wrong]), pack(weight), kind)


@NATIVE
def test_what_stays_quantised() -> None:
    cpu = torch.device("cpu")
    weight = draw(64, 32, bits=4)
    assert pack_linear_weight(weight).dtype == torch.uint8
    assert pack_linear_weight(weight, cpu, torch.bfloat16).dtype == torch.uint8
    assert pack_linear_weight(weight, cpu, torch.float16).dtype == torch.float16
    odd = pack_linear_weight(weight[:40])
    assert torch.equal(odd, weight.values()[:40])
    sizes: list[Callable[[], int]] = [
        lambda: weight_bytes((64, 32), 4, cpu, torch.float32),
        lambda: weight_bytes((64, 32), 8, cpu, torch.float32),
        lambda: weight_bytes((40, 32), 4, cpu, torch.float32),
        lambda: weight_bytes((64, 32), 4, cpu, torch.float16),
        lambda: weight_bytes((64, 32), None, cpu, torch.bfloat16),
    ]
    assert [size() for size in sizes] == [64 * 20, 64 * 34, 40 * 32 * 4, 64 * 32 * 2, 64 * 32 * 2]


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is loaded as values, and one that was packed elsewhere is still multiplied."""
    packed = pack(draw(32, 64, bits=4))
    monkeypatch.setattr(native, "load", NO_COMPILER)
    assert pack_linear_weight(draw(32, 64, bits=4)).dtype == torch.float32
    choice = explain(IMPLEMENTATIONS, (torch.zeros(2, 64), packed))
    assert choice.name == "reference"
    assert "packed" in str(choice)
    assert torch.equal(linear(torch.eye(64), packed), unpack(packed).t())
    assert torch.equal(unpack_linear_weight(packed, torch.float32), unpack(packed))


@pytest.mark.parametrize("own_products", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_no_weight_stays_a_quantised_tensor(
    kind: torch.dtype, own_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a CPU that multiplies each 16-bit type by itself, with no compiler."""
    monkeypatch.setattr(native, "load", NO_COMPILER)
    capabilities = {"avx512_fp16": own_products, "amx_fp16": own_products, "amx_bf16": own_products}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    native.has_native_16bit_products.cache_clear()
    try:
        assert native.has_native_16bit_products(torch.bfloat16) == own_products
        assert not native.has_native_16bit_products(torch.float32)
        weight = draw(32, 64, bits=4)
        found = pack_linear_weight(weight, torch.device("cpu"), kind)
        assert type(found) is torch.Tensor
        assert torch.equal(found, weight.values().to(kind))
    finally:
        native.has_native_16bit_products.cache_clear()


@NATIVE
def test_unpacking_leaves_what_is_right_or_no_weight() -> None:
    packed = pack(draw(32, 64, bits=4))
    assert unpack_linear_weight(packed, torch.float32) is packed
    other = torch.zeros(3, 4, 5, dtype=torch.uint8)
    assert unpack_linear_weight(other, torch.float16) is other
    assert torch.equal(unpack_linear_weight(packed, torch.float16), unpack(packed).half())


@NATIVE
@BITS
@pytest.mark.parametrize("biased", [False, True])
def test_panels_of_bf16_where_the_cpu_has_products_of_it(
    bits: int, biased: bool, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hookline_kernels.packed, "PANEL", 64)
    monkeypatch.setattr(hookline_kernels.packed, "has_native_16bit_products", lambda dtype: True)
    weight, x = draw(160, 96, bits=bits), randn(9, 96, dtype=torch.bfloat16)
    bias = randn(160, dtype=torch.bfloat16, seed=1) if biased else None
    want = linear(x, weight.values().bfloat16(), bias, implementation="reference")
    found = linear(x, pack(weight), bias, implementation="packed_panels")
    scale = weight.values().abs().max().item()
    assert_close(found / scale, want.double() / scale, looser=2.0)
    exact = linear(x, pack(weight), bias, wide=True, implementation="packed_panels")
    assert_close(exact / scale, linear(x, pack(weight), bias, wide=True, implementation="reference") / scale)


def test_a_quantised_tensor_itself_is_refused() -> None:
    weight = draw(32, 64, bits=4)
    with pytest.raises(TypeError, match="linear: the weight is a QuantizedTensor"):
        linear(torch.zeros(2, 64), weight)
    with pytest.raises(TypeError, match="embedding: the table is a QuantizedTensor"):
        embedding(torch.tensor([0]), weight, torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    packed = pack(draw(32, 64, bits=4))
    with pytest.raises(ValueError, match=r"packed of \[32, 64\]"):
        linear(torch.zeros(2, 32), packed)
    with pytest.raises(ValueError, match=r"bias \[31\]"):
        linear(torch.zeros(2, 64), packed, torch.zeros(31))
    with pytest.raises(ValueError, match="a packed weight is"):
        linear(torch.zeros(2, 64), packed[:, :, :600])
    with pytest.raises(ValueError, match="a packed weight is"):
        embedding(torch.tensor([0]), packed.view(-1), torch.float32)
    with pytest.raises(ValueError, match="cannot be used here"):
        linear(torch.zeros(2, 64), packed, implementation="direct")
