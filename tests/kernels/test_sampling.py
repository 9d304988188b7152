"""sample: the reference and the Triton kernels against the core's sampler, and against each other on ugly rows.

In Triton's interpreter a row with top-k or top-p takes half a second, so those tests have few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hookline.execution.sampler import Sampler
from hookline.execution.sampling_state import SamplingState, derive_seed
from hookline.sampling_params import SamplingParams
from hookline_kernels.decode_inputs import SamplingOptions
from hookline_kernels.sampling import sample, uniform_reference
from hookline_kernels.sampling_rules import uniform
from hookline_kernels.sampling_triton import sample_triton

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "cold": {"temperature": 1e-4},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "top_k_wide": {"temperature": 2.0, "top_k": 900},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p_tiny": {"temperature": 0.9, "top_p": 1e-6},
    "top_p_flat": {"temperature": 20.0, "top_p": 0.97},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all": {"temperature": 1.5, "top_k": 200, "top_p": 0.8, "min_p": 0.02},
}
CUTS = ["top_k", "top_p", "top_p_flat", "all"]
ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])


def make_logits(rows: int, vocab: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_states(vocab: int, options: Sequence[dict[str, Any]], outputs: int = 0) -> list[SamplingState]:
    return [
        SamplingState(SamplingParams(**each), [1], (), vocab, derive_seed(7, row), (), [0] * (outputs + row % 3))
        for row, each in enumerate(options)
    ]


def packed(states: Sequence[SamplingState], device: torch.device | str = "cpu") -> SamplingOptions:
    columns: dict[str, tuple[list[Any], torch.dtype]] = {
        "temperature": ([s.temperature for s in states], torch.float32),
        "top_p": ([s.params.top_p for s in states], torch.float64),
        "min_p": ([s.params.min_p for s in states], torch.float32),
        "top_k": ([s.top_k for s in states], torch.int32),
        "num_outputs": ([s.num_outputs for s in states], torch.int32),
        "keys": ([s.signed_key() for s in states], torch.int64),
    }
    return SamplingOptions(
        **{name: torch.tensor(values, dtype=dtype, device=device) for name, (values, dtype) in columns.items()}
    )


def split_up(
    logits: torch.Tensor, options: SamplingOptions, *, capacity: int = 8192, chunk: int | None = None
) -> list[int]:
    """Tokens of the Triton kernels with other sizes of list and chunk."""
    rows = logits.shape[0]
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(rows, dtype=torch.int32, device=logits.device)
    sample_triton(logits, options, logits, token_ids, bad, None, False, capacity=capacity, chunk=chunk)
    assert not bad.any()
    found: list[int] = token_ids.tolist()
    return found


def placed(implementation: str, triton_device: torch.device) -> torch.device:
    return triton_device if implementation == "triton" else torch.device("cpu")


@BOTH
@pytest.mark.parametrize("level", [False, True], ids=["distinct", "level"])
def test_tokens_are_the_cores(implementation: str, level: bool, triton_device: torch.device) -> None:
    """Two chunks, the last of them not full; `level` logits have many equal values."""
    device, vocab = placed(implementation, triton_device), 1100
    options = [OPTIONS[name] for name in CUTS] if level else list(OPTIONS.values())
    logits = make_logits(len(options), vocab, seed=int(level))
    logits = logits.bfloat16().float() if level else logits
    states = make_states(vocab, options)
    found = sample(logits.to(device), packed(states, device), implementation=implementation)
    assert found.token_ids.tolist() == Sampler(vocab).sample(logits, states).token_ids
    assert not found.bad.any()


@pytest.mark.parametrize("seed", range(5))
def test_the_reference_is_the_core(seed: int) -> None:
    """On many rows, and exactly: the same arithmetic."""
    vocab, rows = 1501, 300
    choices = list(OPTIONS.values())
    logits = make_logits(rows, vocab, seed, scale=1.0 + seed)
    logits[::2] = logits[::2].bfloat16().float()
    states = make_states(vocab, [choices[(seed + row) % len(choices)] for row in range(rows)])
    found = sample(logits, packed(states), implementation="reference")
    assert found.token_ids.tolist() == Sampler(vocab).sample(logits, states).token_ids


@pytest.mark.parametrize(("capacity", "chunk"), [(16, 1024), (1, 256)], ids=["short lists", "no lists"])
def test_a_token_does_not_depend_on_how_a_row_is_split(capacity: int, chunk: int, triton_device: torch.device) -> None:
    """Lists too short for the cut's neighbourhood, so that the whole row stands for the list; one chunk, and three."""
    vocab, names = 520, ["temperature", "top_k", "top_p", *(["all"] if chunk == 1024 else [])]
    logits = make_logits(len(names), vocab, seed=3).bfloat16().float()
    states = make_states(vocab, [OPTIONS[name] for name in names])
    found = split_up(logits.to(triton_device), packed(states, triton_device), capacity=capacity, chunk=chunk)
    assert found == Sampler(vocab).sample(logits, states).token_ids


@BOTH
def test_equal_rows_and_ties(implementation: str, triton_device: torch.device) -> None:
    """The lowest ids first in top-p, all that are level in top-k, -0 level with 0."""
    device, vocab = placed(implementation, triton_device), 600
    logits = torch.zeros(6, vocab)
    logits[:, ::2] = -0.0
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 1e-9},
    ]
    states = make_states(vocab, options)
    found = sample(logits.to(device), packed(states, device), implementation=implementation).token_ids.tolist()
    assert found == Sampler(vocab).sample(logits, states).token_ids
    assert (found[0], found[5]) == (0, 0)
    assert found[1] < 6
    assert found[3] < 300


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # the interpreter's, of arithmetic in rows without a choice
@BOTH
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}], ids=str)
def test_ugly_rows(implementation: str, options: dict[str, Any], triton_device: torch.device) -> None:
    """-inf beside a number, huge logits, a far outlier, two values only; then rows without a choice among good ones."""
    device, vocab = placed(implementation, triton_device), 300
    logits = torch.full((8, vocab), -torch.inf)
    logits[0, 17] = 3.0
    logits[1, [3, 250]] = 1e38
    logits[2] = torch.linspace(0, 5, vocab)
    logits[2, 7] = -1e30
    logits[3] = (torch.arange(vocab) % 2).float()
    logits[4:] = make_logits(4, vocab)
    logits[5, 77] = torch.nan
    logits[6] = -torch.inf
    logits[7, 5] = torch.inf
    states = make_states(vocab, [options] * 8)
    found = sample(logits.to(device), packed(states, device), logprobs=True, implementation=implementation)
    expected = Sampler(vocab).sample(logits, states)
    assert found.token_ids.tolist() == expected.token_ids
    assert found.bad.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert found.token_ids[0] == 17
    assert found.logprobs is not None
    assert found.logprobs.isnan().tolist() == [False] * 5 + [True] * 3


@BOTH
@pytest.mark.parametrize("vocab", [1, 2, 1024, 1025])
def test_edges_of_the_vocabulary(implementation: str, vocab: int, triton_device: torch.device) -> None:
    """One token, a full chunk, one more; top_k of V and more is none."""
    device = placed(implementation, triton_device)
    logits = make_logits(4, vocab, seed=vocab)
    states = make_states(vocab, [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.5}, {"temperature": 2.0}])
    options = packed(states, device)
    options.top_k[3] = vocab + 5
    found = sample(logits.to(device), options, implementation=implementation)
    assert found.token_ids.tolist() == Sampler(vocab).sample(logits, states).token_ids


@BOTH
def test_no_rows(implementation: str, triton_device: torch.device) -> None:
    device = placed(implementation, triton_device)
    logits, options = torch.empty(0, 50, device=device), packed([], device)
    assert sample(logits, options, implementation=implementation).token_ids.shape == (0,)


@BOTH
def test_rows_do_not_depend_on_their_neighbours(implementation: str, triton_device: torch.device) -> None:
    device, vocab = placed(implementation, triton_device), 300
    names = ["top_p", "greedy", "top_k", "min_p"]
    logits = make_logits(4, vocab, seed=9).to(device)
    states = make_states(vocab, [OPTIONS[name] for name in names])
    together = sample(logits, packed(states, device), implementation=implementation).token_ids.tolist()
    spoilt = logits.clone()
    spoilt[1] = torch.nan
    for rows in ([2], [3, 1, 0]):
        options = packed([states[row] for row in rows], device)
        found = sample(spoilt[rows], options, implementation=implementation).token_ids.tolist()
        assert found == [together[row] if row != 1 else -1 for row in rows]


CHOICES: list[dict[str, Any]] = [{}, {"top_k": 8}, {"top_p": 0.9}]


@pytest.mark.parametrize(
    ("implementation", "options"),
    [("reference", options) for options in CHOICES]
    + [("triton", options) for options in CHOICES[: 3 if ON_GPU else 1]],
    ids=str,
)
def test_frequencies_are_the_probabilities(
    implementation: str, options: dict[str, Any], triton_device: torch.device
) -> None:
    """In the interpreter few draws, which are at least those of the reference; else their distribution.

    There the cuts are those of `test_tokens_are_the_cores`.
    """
    device, vocab = placed(implementation, triton_device), 300
    draws = 10_000 if implementation == "reference" or device.type == "cuda" else 2
    logits = make_logits(1, vocab, seed=11, scale=1.5)
    states = make_states(vocab, [{"temperature": 1.0, **options}] * draws)
    packs = packed(states, device)
    tokens = sample(logits.to(device).expand(draws, -1), packs, implementation=implementation).token_ids.tolist()
    if draws < 1000:
        wanted = sample(logits.expand(draws, -1), packs, implementation="reference").token_ids.tolist()
        assert tokens == wanted
        return
    probabilities = logits[0].double().softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = torch.ones(vocab, dtype=torch.bool)
    if "top_k" in options:
        kept[order[8:]] = False
    if "top_p" in options:
        sums = probabilities[order].cumsum(-1)
        kept[order[sums - probabilities[order] >= 0.9]] = False
    expected = (probabilities * kept / probabilities[kept].sum()).numpy() * draws
    found = np.bincount(tokens, minlength=vocab)
    assert found[expected == 0].sum() == 0
    big = expected >= 5
    chi_square = ((found - expected)[big] ** 2 / expected[big]).sum()
    freedom = big.sum() - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


@triton.jit
def uniform_kernel(keys_ptr: tl.tensor, numbers_ptr: tl.tensor, out_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, uniform(tl.load(keys_ptr + place), tl.load(numbers_ptr + place)))


def test_draws_are_the_cores(triton_device: torch.device) -> None:
    """All 53 bits, for keys of both signs."""
    states = make_states(10, [{"temperature": 1.0}] * 64, outputs=1000)
    options = packed(states, triton_device)
    expected = [state.uniform() for state in states]
    assert uniform_reference(options.keys, options.num_outputs).tolist() == expected
    out = torch.empty(64, dtype=torch.float64, device=triton_device)
    uniform_kernel[(1,)](options.keys, options.num_outputs, out, COUNT=64)
    assert out.tolist() == expected
    assert (options.keys < 0).any()
    assert (options.keys > 0).any()


@BOTH
def test_logprobs_are_of_the_unedited_logits(implementation: str, triton_device: torch.device) -> None:
    device, vocab = placed(implementation, triton_device), 1500
    unedited = make_logits(3, vocab, seed=2)
    edited = unedited.clone()
    edited[:, 40] = 60.0
    states = make_states(vocab, [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
    found = sample(
        edited.to(device),
        packed(states, device),
        logprobs=True,
        unedited=unedited.to(device),
        implementation=implementation,
    )
    assert found.token_ids.tolist() == [40, 40, 40]
    assert found.logprobs is not None
    expected = unedited.double().log_softmax(-1)[:, 40]
    assert torch.allclose(found.logprobs.double().cpu(), expected, atol=4e-6)
    own = sample(edited.to(device), packed(states, device), logprobs=True, implementation=implementation)
    assert own.logprobs is not None
    assert own.logprobs.abs().max() < 1e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_types_and_strides(implementation: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    """Logits as a part of wider rows; float32 top_p; 64-bit top_k."""
    device, vocab = placed(implementation, triton_device), 900
    wide = make_logits(3, vocab + 60, seed=4).to(dtype)
    logits = wide[:, 30 : 30 + vocab]
    states = make_states(vocab, [{}, {"temperature": 1.0, "top_k": 40}, {"temperature": 0.8, "top_p": 0.75}])
    options = packed(states, device)
    columns = {name: getattr(options, name) for name in ("temperature", "min_p", "keys")}
    options = SamplingOptions(
        **columns, top_p=options.top_p.float(), top_k=options.top_k.long(), num_outputs=options.num_outputs.long()
    )
    before = logits.clone()
    on_device = wide.to(device)[:, 30 : 30 + vocab]
    found = sample(on_device, options, implementation=implementation)
    assert found.token_ids.tolist() == Sampler(vocab).sample(logits, states).token_ids
    assert torch.equal(on_device.cpu(), before)


@BOTH
def test_a_promise_of_greed_changes_nothing(implementation: str, triton_device: torch.device) -> None:
    device = placed(implementation, triton_device)
    logits = make_logits(5, 1300, seed=6).bfloat16().float()
    logits[2, 4] = torch.nan
    options = packed(make_states(1300, [{}] * 5), device)
    long = sample(logits.to(device), options, logprobs=True, implementation=implementation)
    short = sample(logits.to(device), options, logprobs=True, greedy=True, implementation=implementation)
    for one, other in ((long.token_ids, short.token_ids), (long.bad, short.bad), (long.logprobs, short.logprobs)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))
    assert long.token_ids.tolist() == [-1 if row == 2 else int(logits[row].argmax()) for row in range(5)]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.zeros(2, 9, dtype=torch.int64)}, ValueError, "float type"),
    ({"logits": torch.zeros(2, 0)}, ValueError, "logits"),
    ({"logits": torch.zeros(9, 2).t()}, ValueError, "contiguous"),
    ({"logits": torch.zeros(3, 9)}, ValueError, r"contiguous \[3\]"),
    ({"unedited": torch.zeros(2, 8)}, ValueError, "unedited"),
    ({"top_p": torch.ones(2, dtype=torch.float16)}, TypeError, "top_p must be"),
    ({"keys": torch.zeros(2, dtype=torch.int32)}, TypeError, "keys must be"),
    ({"top_k": torch.zeros(4, dtype=torch.int32)[::2]}, ValueError, "top_k"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options = packed(make_states(9, [{"temperature": 1.0}] * 2))
    columns = {name: change.get(name, getattr(options, name)) for name in SamplingOptions.__slots__}
    arguments = {
        "logits": torch.zeros(2, 9),
        **{name: change[name] for name in ("logits", "unedited") if name in change},
    }
    logits = arguments.pop("logits")
    sample(torch.zeros(2, 9), options)
    with pytest.raises(error, match=message):
        sample(logits, SamplingOptions(**columns), **arguments)
