"""mask_tokens: the reference against bits read one by one, and the Triton kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline_kernels.token_mask import mask_tokens

NAN, INF = float("nan"), float("inf")


def make_bits(count: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator, dtype=torch.int64).int()
    bits[0], bits[1] = -1, 0
    return bits


def masked(logits: torch.Tensor, rows: list[int], bits: torch.Tensor, how: str, device: Any = "cpu") -> torch.Tensor:
    given = logits.to(device, copy=True)
    mask_tokens(given, torch.tensor(rows, dtype=torch.int32, device=device), bits.to(device), implementation=how)
    return given.cpu()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_what_the_bits_allow_is_left(vocab: int) -> None:
    """In rows that are not in order; what is forbidden is -inf, whatever it was; other rows are as they were."""
    bits = make_bits(3, vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    logits[1, :] = NAN
    found = masked(logits, [4, 1, 0], bits, "reference")
    for mask, row in enumerate((4, 1, 0)):
        for token in range(vocab):
            allowed = int(bits[mask, token // 32]) >> token % 32 & 1
            assert found[row, token] == (logits[row, token] if allowed else -INF)
    assert torch.equal(found[2:4], logits[2:4])


@pytest.mark.parametrize("vocab", [1, 33, 2047, 2048, 2049, 4100])
def test_the_kernel_is_the_reference(vocab: int, triton_device: torch.device) -> None:
    bits, logits = make_bits(3, vocab), torch.randn(5, vocab)
    want = masked(logits, [4, 1, 0], bits, "reference")
    assert torch.equal(masked(logits, [4, 1, 0], bits, "triton", triton_device), want)


@pytest.mark.parametrize("how", ["reference", "triton"])
def test_a_mask_of_no_row_is_nobodys(how: str, triton_device: torch.device) -> None:
    bits, logits = make_bits(4, 2049), torch.randn(5, 2049)
    device = triton_device if how == "triton" else torch.device("cpu")
    want = masked(logits, [4, 2], bits[:2], "reference")
    assert torch.equal(masked(logits, [4, 2, -1, -1], bits, how, device), want)
    assert torch.equal(masked(logits, [-1, 4, -1, 2], bits[[2, 0, 3, 1]], how, device), want)


def test_other_types_and_wider_rows(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    wide = torch.randn(3, 300).to(triton_dtype)
    want, found = wide.clone(), wide.to(triton_device, copy=True)
    bits, rows = make_bits(2, 130), torch.tensor([2, 0], dtype=torch.int32)
    mask_tokens(want[:, :130], rows, bits, implementation="reference")
    mask_tokens(found[:, :130], rows.to(triton_device), bits.to(triton_device), implementation="triton")
    assert torch.equal(found.cpu(), want)
    assert torch.equal(want[:, 130:], wide[:, 130:])


@pytest.mark.parametrize("how", ["reference", "triton"])
def test_no_rows(how: str, triton_device: torch.device) -> None:
    device = triton_device if how == "triton" else torch.device("cpu")
    assert torch.equal(masked(torch.ones(2, 9), [], make_bits(2, 9)[:0], how, device), torch.ones(2, 9))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rows": torch.zeros(1, dtype=torch.int64)}, TypeError, "rows must be int32"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, ValueError, r"rows must be contiguous \[1\]"),
        ({"bits": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, r"bits must be contiguous \[1, 1\]"),
        ({"bits": torch.zeros(1, 1)}, TypeError, "bits must be int32"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int32)}, ValueError, "float type expected"),
        ({"logits": torch.zeros(9, 4).t()}, ValueError, "float type expected"),
        ({"implementation": "other"}, ValueError, "unknown implementation"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "logits": torch.zeros(4, 9),
        "rows": torch.zeros(1, dtype=torch.int32),
        "bits": torch.zeros(1, 1, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        mask_tokens(**(given | changed))
