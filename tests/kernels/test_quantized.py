"""Tensors that keep their codes: what they stand for, and which operations leave the codes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hookline_kernels.quantized import GROUP, QuantizedTensor


def draw(*shape: int, bits: int, seed: int = 0) -> QuantizedTensor:
    """Random codes, scales and offsets."""
    generator = torch.Generator().manual_seed(seed)
    groups = (*shape[:-1], shape[-1] // GROUP)
    scales, offsets = (torch.randn(groups, generator=generator).half() for _ in range(2))
    if bits == 8:
        return QuantizedTensor(torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8), scales)
    return QuantizedTensor(torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8), scales, offsets)


BITS = pytest.mark.parametrize("bits", [4, 8])


@BITS
def test_values_are_scale_times_code_plus_offset(bits: int) -> None:
    weight = draw(5, 64, bits=bits)
    values = weight.values()
    assert (weight.bits, weight.shape, weight.dtype) == (bits, (5, 64), torch.float32)
    for row, column in ((0, 0), (4, 63), (2, 31), (2, 32)):
        group = (row, column // GROUP)
        offset = 0.0 if weight.offsets is None else weight.offsets[group].item()
        assert values[row, column].item() == weight.scales[group].item() * weight.codes[row, column].item() + offset


KEPT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.view(2, 3, 2, 64).transpose(1, 2).reshape(12, 64),
    lambda x: x.reshape(-1, 4, 64),
    lambda x: x[3:9],
    lambda x: x[::2].contiguous(),
    lambda x: torch.cat([x, x[1:3]]),
    lambda x: torch.cat([x.view(3, 4, 64), x.view(3, 4, 64)], dim=1),
    lambda x: x.detach().clone(),
    lambda x: x.view(3, 4, 64).permute(1, 0, 2),
    lambda x: x.view(3, 4, 64).movedim(1, 0),
    lambda x: x[5],
    lambda x: x.view(3, 4, 64)[:, -2],
    lambda x: x[None].unsqueeze(-2),
    lambda x: x.split(5)[2],
    lambda x: x.split([2, 10])[1],
    lambda x: x.chunk(3)[1],
    lambda x: x.unbind()[4],
    lambda x: torch.stack([x, torch.stack([x[row] for row in range(len(x) - 1, -1, -1)])]),
    lambda x: torch.stack([x[:6], x[6:]], dim=1),
    lambda x: x.narrow(0, 3, 4),
]


@BITS
@pytest.mark.parametrize("function", KEPT)
def test_operations_on_rows_keep_the_codes(bits: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = draw(12, 64, bits=bits)
    found, expected = function(weight), function(weight.values())
    assert isinstance(found, QuantizedTensor)
    assert found.shape == expected.shape
    assert torch.equal(found.values(), expected)


MULTIPLIED_OUT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.t(),
    lambda x: x.transpose(0, -1),
    lambda x: x.view(-1),
    lambda x: x.view(24, 32),
    lambda x: x[:, 5:40],
    lambda x: torch.cat([x, x], dim=-1),
    lambda x: torch.cat([x, torch.zeros(1, 64)]),
    lambda x: torch.cat([x, draw(2, 64, bits=4), draw(2, 64, bits=8)]),
    lambda x: x * 2 + 1,
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.nn.functional.linear(torch.ones(3, 64), x),
    lambda x: torch.stack([x, x], dim=-1),
    lambda x: torch.stack([x, torch.zeros(12, 64)]),
    lambda x: x[[4, 1]],
    lambda x: x[:, 3],
    lambda x: x.unsqueeze(-1),
    lambda x: x.permute(1, 0),
    lambda x: x.split(32, dim=1)[1],
    lambda x: x.unbind(1)[1],
    lambda x: x.view(torch.int32),
    lambda x: torch.cat([x, x], out=torch.zeros(24, 64)),
    lambda x: x.to(torch.float32),
    lambda x: x.to("cpu"),
    lambda x: x.to(torch.zeros(1)),
    lambda x: x.float(),
    lambda x: x.type(torch.float32),
    lambda x: x.cpu(),
    lambda x: torch.ops.aten._to_copy(x),
]


@BITS
@pytest.mark.parametrize("function", MULTIPLIED_OUT)
def test_every_other_operation_sees_the_values(bits: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = draw(12, 64, bits=bits)
    found = function(weight)
    assert type(found) is torch.Tensor
    assert torch.equal(found, function(weight.values()))


@BITS
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mul_(2),
        lambda x: x.copy_(torch.zeros(12, 64)),
        lambda x: x.index_fill_(0, torch.tensor([1]), 0.0),
        lambda x: x[0].fill_(1),
        lambda x: x[2:4].zero_(),
        lambda x: x.view(3, 4, 64)[1].copy_(torch.zeros(4, 64)),
        lambda x: x.__setitem__(0, 5.0),
        lambda x: x.__setitem__((slice(None), 3), 5.0),
        lambda x: torch.cat([x[:6], x[6:]], out=x),
        lambda x: torch.add(x, 1, out=x),
    ],
)
def test_writing_is_refused(bits: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = draw(12, 64, bits=bits)
    with pytest.raises(TypeError, match="writes to a quantised tensor"):
        function(weight)
    target = torch.zeros(2, 12, 64)
    target[0].copy_(weight)
    target[1] = weight
    assert torch.equal(target[0], weight.values())
    assert torch.equal(target[1], weight.values())


@BITS
def test_what_loses_the_codes_is_a_copy(bits: int) -> None:
    weight = draw(12, 64, bits=bits)
    before = weight.values()
    weight.t().zero_()
    weight[:, 3].fill_(1)
    assert torch.equal(weight.values(), before)


def test_no_kernel_gets_an_address() -> None:
    with pytest.raises(TypeError, match="no values in memory"):
        draw(4, 64, bits=8).data_ptr()


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.float16)
    QuantizedTensor(codes, scales, scales)
    for parts in (
        (codes, scales),
        (codes.view(torch.int8), scales, scales),
        (codes, scales[:3], scales),
        (codes, scales, scales[:, :1]),
        (codes[:, :40], scales, scales),
        (codes, scales.float(), scales),
        (codes, scales, scales.bfloat16()),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            QuantizedTensor(*parts)
