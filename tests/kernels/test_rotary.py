"""apply_rotary and rotary_cos_sin: the CPU implementation and the Triton kernel against a rotation matrix in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline_kernels.rotary import apply_rotary, rotary_cos_sin

# Tokens, H, K, D, R.
SHAPES = [
    (0, 9, 3, 64, 64),
    (1, 9, 3, 64, 64),
    (7, 9, 3, 64, 32),
    (5, 1, 1, 80, 80),
    (3, 17, 2, 96, 24),
    (2, 4, 4, 256, 2),
]


def rotated(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair turned by its angle as a complex number."""
    y = x.double().cpu().clone()
    half = inv_freq.shape[0]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turn = torch.polar(torch.ones(len(positions)).double(), positions.double() * inv_freq[i].double())[:, None]
        pair = torch.complex(y[..., first], y[..., second]) * turn
        y[..., first], y[..., second] = pair.real, pair.imag
    return y


def check(
    implementation: str, shape: tuple[int, ...], adjacent: bool, interleaved: bool, dtype: Any, device: Any, close: Any
) -> None:
    tokens, heads, kv_heads, size, turned = shape
    generator = torch.Generator().manual_seed(tokens)
    fused = torch.randn(tokens, heads + 2 * kv_heads + 1, size, generator=generator).to(device, dtype)
    first_k = heads if adjacent else heads + kv_heads + 1
    q, k = fused[:, :heads], fused[:, first_k : first_k + kv_heads]
    positions = torch.arange(tokens) * 3
    inv_freq = 10000.0 ** (-torch.arange(0, turned, 2) / turned)
    expected = fused.double().cpu()
    for part in (slice(0, heads), slice(first_k, first_k + kv_heads)):
        expected[:, part] = rotated(expected[:, part], positions, inv_freq, interleaved)
    cos, sin = rotary_cos_sin(positions.to(device), inv_freq.to(device))
    new_q, new_k = apply_rotary(q, k, cos, sin, interleaved, implementation=implementation)
    assert new_q is q and new_k is k
    close(fused, expected)


@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "apart"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch(
    shape: Any, implementation: str, interleaved: bool, adjacent: bool, dtype: torch.dtype, assert_close: Any
) -> None:
    check(implementation, shape, adjacent, interleaved, dtype, "cpu", assert_close)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton(
    shape: Any, interleaved: bool, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Any
) -> None:
    check("triton", shape, shape[1] % 2 == 1, interleaved, triton_dtype, triton_device, assert_close)


def test_separate_tensors_that_happen_to_match() -> None:
    cos, sin = rotary_cos_sin(torch.tensor([1, 2]), torch.tensor([1.0, 0.5]))
    q, k = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    expected = [x.clone() for x in (q, k)]
    apply_rotary(*expected, cos, sin, implementation="reference")
    apply_rotary(q, k, cos, sin)
    assert torch.allclose(q, expected[0]) and torch.allclose(k, expected[1])


def test_cos_sin_are_fp32_and_scaled() -> None:
    positions, inv_freq = torch.tensor([0, 1, 100000]), torch.tensor([1.0, 0.01])
    cos, sin = rotary_cos_sin(positions, inv_freq, 0.5)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (3, 2)
    angles = positions[:, None].double() * inv_freq.double()
    assert torch.allclose(cos.double(), angles.cos() / 2, atol=1e-3) and cos[0].tolist() == [0.5, 0.5]
    assert torch.allclose(sin.double(), angles.sin() / 2, atol=1e-3)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(3, 4, 8)}, ValueError, "apply_rotary: q"),
    ({"q": torch.zeros(2, 4, 8, dtype=torch.float16)}, ValueError, "of one type"),
    ({"cos": torch.zeros(2, 4, dtype=torch.float16)}, TypeError, "float32"),
    ({"cos": torch.zeros(2, 5), "sin": torch.zeros(2, 5)}, ValueError, "R at most D"),
    ({"cos": torch.zeros(4, 2).t()}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "k": torch.zeros(2, 2, 8),
        "cos": torch.zeros(2, 4),
        "sin": torch.zeros(2, 4),
    }
    apply_rotary(**arguments)
    with pytest.raises(error, match=message):
        apply_rotary(**{**arguments, **change})
    with pytest.raises(ValueError, match="positions"):
        rotary_cos_sin(torch.zeros(2, 1), torch.zeros(4))
