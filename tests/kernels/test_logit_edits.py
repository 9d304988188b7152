"""edit_logits: the reference against the core's edits, to the bit, and the Triton kernel against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hookline.execution import sampling_state
from hookline.execution.sampling_state import SamplingState
from hookline.sampling_params import SamplingParams
from hookline_kernels.logit_edits import IN_PROMPT, edit_logits

NAN, INF = float("nan"), float("inf")


def make_tables(slots: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (slots, vocab), generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 2, (slots, vocab), generator=generator, dtype=torch.int32)
    bias = torch.randn(slots, vocab, generator=generator)
    bias[torch.rand(slots, vocab, generator=generator) < 0.3] = -INF
    penalties = torch.rand(slots, 3, generator=generator) * 2 + 0.1
    penalties[-1] = torch.tensor([1.0, 0.0, 0.0])
    return {"penalties": penalties, "counts": counts + IN_PROMPT * prompt, "bias": bias}


def edited(
    logits: torch.Tensor, places: list[list[int]], tables: dict[str, Any], device: Any = "cpu", how: str = "reference"
) -> torch.Tensor:
    out = torch.full((len(places[0]), logits.shape[1]), NAN, device=device)
    moved = {name: None if table is None else table.to(device) for name, table in tables.items()}
    given = torch.tensor(places, dtype=torch.int64, device=device)
    edit_logits(logits.to(device), given, **moved, out=out, implementation=how)
    return out.cpu()


def test_the_reference_is_the_core() -> None:
    """Every option that a table holds, in rows and slots that are not in order."""
    vocab, slots = 61, [4, 0, 2]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, vocab, generator=generator) * 4
    logits[:, 9], logits[:, 10] = NAN, INF  # which the bans of the first request hide
    kinds: list[tuple[dict[str, Any], list[int]]] = [
        ({"repetition_penalty": 1.3, "frequency_penalty": -0.7, "presence_penalty": 0.3}, [9, 10]),
        ({"repetition_penalty": 0.6, "logit_bias": {3: 7.5, 4: -3.1, 5: 0.1, 9: 2.0}, "presence_penalty": 1.1}, []),
        ({"frequency_penalty": 1.9, "allowed_token_ids": tuple(range(0, vocab, 2)), "logit_bias": {2: 1.0}}, [4]),
    ]
    tables = {
        "penalties": torch.full((5, 3), NAN),
        "counts": torch.full((5, vocab), 7, dtype=torch.int32),
        "bias": torch.full((5, vocab), NAN),
    }
    states = []
    for slot, (options, bad) in zip(slots, kinds, strict=True):
        prompt, outputs = [int(i) for i in torch.randint(vocab, (2, 30), generator=generator)[0]], [5, 5, 5, 8, 2, slot]
        params = SamplingParams(**options)
        states.append(SamplingState(params, prompt, (), vocab, 0, [(i,) for i in bad], outputs))
        tables["penalties"][slot] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        )
        row = np.bincount(outputs, minlength=vocab)
        if params.repetition_penalty != 1:
            row[prompt] += IN_PROMPT
        tables["counts"][slot] = torch.from_numpy(row)
        bias = torch.zeros(vocab) if params.allowed_token_ids is None else torch.full((vocab,), -INF)
        if params.allowed_token_ids is not None:
            bias[list(params.allowed_token_ids)] = 0
        bias[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        bias[bad] = -INF
        tables["bias"][slot] = bias
    rows = [3, 1, 4]
    want = logits[rows].clone()
    sampling_state.edit_logits(want, list(enumerate(states)))
    before = logits.clone()
    found = edited(logits, [rows, slots], tables)
    assert torch.equal(found.nan_to_num(nan=-77.0), want.nan_to_num(nan=-77.0))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert not want[0].isnan().any()
    assert want[1].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 4100])
@pytest.mark.parametrize("without", [(), ("counts",), ("bias",), ("counts", "bias")], ids=str)
def test_the_kernel_is_the_reference(vocab: int, without: tuple[str, ...], triton_device: torch.device) -> None:
    """To the bit, NaN, infinities and zeros of both signs among the logits; a slot and a row may come twice."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * 5
    for place, value in enumerate((NAN, INF, -INF, 0.0, -0.0)):
        logits[:, place::17] = torch.where(torch.arange(4)[:, None] < 3, value, logits[:, place::17])
    tables: dict[str, Any] = make_tables(3, vocab) | dict.fromkeys(without)
    places = [[3, 0, 3, 2], [2, 0, 0, 1]]
    found = edited(logits, places, tables, triton_device, "triton")
    want = edited(logits, places, tables)
    assert torch.equal(found.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])
    assert torch.equal(found.isnan(), want.isnan())


def test_other_types_and_wider_rows(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    logits = torch.randn(3, 300).to(triton_dtype)[:, :130]
    tables = make_tables(2, 130)
    found = edited(logits, [[2, 1], [0, 1]], tables, triton_device, "triton")
    assert torch.equal(found, edited(logits, [[2, 1], [0, 1]], tables))
    assert torch.equal(found, edited(logits.float(), [[2, 1], [0, 1]], tables))


@pytest.mark.parametrize("how", ["reference", "triton"])
def test_no_rows(how: str, triton_device: torch.device) -> None:
    device = triton_device if how == "triton" else torch.device("cpu")
    assert edited(torch.zeros(2, 9), [[], []], make_tables(2, 9), device, how).shape == (0, 9)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"places": torch.zeros(2, 1, dtype=torch.int32)}, TypeError, "places must be torch.int64"),
        ({"places": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"places must be contiguous \[2, 1\]"),
        ({"penalties": torch.zeros(2, 2)}, ValueError, r"penalties must be contiguous \[2, 3\]"),
        ({"counts": torch.zeros(2, 9)}, TypeError, "counts must be torch.int32"),
        ({"bias": torch.zeros(3, 9)}, ValueError, r"bias must be contiguous \[2, 9\]"),
        ({"out": torch.zeros(1, 8)}, ValueError, r"out must be contiguous \[1, 9\]"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int32)}, ValueError, "float type expected"),
        ({"logits": torch.zeros(9, 4).t()}, ValueError, "float type expected|contiguous"),
        ({"implementation": "other"}, ValueError, "unknown implementation"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "logits": torch.zeros(4, 9),
        "places": torch.zeros(2, 1, dtype=torch.int64),
        **make_tables(2, 9),
        "out": torch.zeros(1, 9),
    }
    with pytest.raises(error, match=message):
        edit_logits(**(given | changed))
