"""write_entries and turn_queries against the definition in fp64, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton

from hookline_kernels.latent_inputs import IndexKeys, turn_queries, write_entries
from hookline_kernels.rotary import rotary_cos_sin

Check = Callable[..., None]

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
EPS = 1e-5
BLOCKS, BLOCK_SIZE = 7, 4
# T, Q, L, R, D, attention's pairs interleaved, the indexer's; a D of 0 is a layer without an indexer.
ENTRIES = [
    (0, 16, 8, 4, 8, True, False),
    (1, 32, 16, 8, 16, True, True),
    (3, 40, 24, 2, 2, False, True),
    (9, 24, 20, 12, 20, True, False),
    (9, 24, 20, 12, 20, False, False),
    (5, 33, 16, 8, 0, True, False),
]
# T, tokens of `out`, H, R, I, D, and the two ways to pair; an I of 0 is a layer without an indexer.
QUERIES = [
    (0, 0, 2, 4, 2, 8, True, False),
    (1, 1, 1, 2, 1, 2, True, True),
    (3, 3, 5, 12, 3, 20, True, False),
    (4, 0, 9, 8, 2, 8, False, True),
    (5, 2, 3, 8, 0, 8, False, False),
    (130, 129, 33, 4, 2, 6, True, True),  # many heads in all, which the Triton kernel takes in larger parts
]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, ..., D] in fp64, its first pairs turned."""
    half = cos.shape[1]
    x, a, b = x.double(), slice(0, half), slice(half, 2 * half)
    if interleaved:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    cos, sin = (y.double().view(len(x), *[1] * (x.dim() - 2), half) for y in (cos, sin))
    out = x.clone()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def rms_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def angles(tokens: int, size: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 1000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    return rotary_cos_sin(torch.arange(tokens, device=device) * 3 + 1, inv_freq)


def entry_inputs(case: Any, dtype: torch.dtype, device: Any, cache_dtype: torch.dtype) -> dict[str, Any]:
    """A product within a wider one, caches of NaN, and slots of which each third is padding."""
    tokens, q, latent, rope, size, interleaved, index_interleaved = case
    generator = torch.Generator().manual_seed(tokens + q)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
    slots[1::3] = -1 - slots[1::3]
    nan = torch.full((BLOCKS, BLOCK_SIZE, latent + rope), float("nan"), dtype=cache_dtype, device=device)
    keys = nan.new_full((BLOCKS, BLOCK_SIZE, size), float("nan"))
    cos, sin = angles(tokens, rope, device)
    return {
        # Far from zero on average, so that a wrong mean shows.
        "latents": (random(tokens, q + latent + rope + size + 5) * 2 + 1.0).to(dtype)[:, : q + latent + rope + size],
        "q_norm": (1.0 + 0.1 * random(q)).to(dtype),
        "kv_norm": (1.0 + 0.1 * random(latent)).to(dtype),
        "eps": EPS,
        "cos": cos,
        "sin": sin,
        "cache": nan,
        "slots": slots.to(device),
        "interleaved": interleaved,
        "index": IndexKeys(1.0 + 0.1 * random(size), random(size), keys, index_interleaved) if size else None,
    }


def check_entries(
    case: Any, implementation: str | None, dtype: Any, device: Any, close: Check, cache_dtype: Any = None
) -> None:
    given = entry_inputs(case, dtype, device, cache_dtype or dtype)
    q_norm, kv_norm, index = given["q_norm"], given["kv_norm"], given["index"]
    sizes = (len(q_norm), len(kv_norm), case[3], case[4])
    q, kv, key, index_key = given["latents"].clone().split(sizes, dim=1)
    rotary = given["cos"], given["sin"]
    slots = given["slots"]
    base = given["latents"]._base
    behind = base[:, -5:].clone()

    close(write_entries(**given, implementation=implementation), rms_normed(q, q_norm))
    assert torch.equal(base[:, -5:], behind)
    wanted = [torch.cat((rms_normed(kv, kv_norm), turned(key, *rotary, given["interleaved"])), 1)]
    caches = [given["cache"]]
    if index is not None:
        normed = F.layer_norm(index_key.double(), index.weight.shape, index.weight.double(), index.bias.double(), EPS)
        wanted.append(turned(normed, *rotary, index.interleaved))
        caches.append(index.cache)
    for cache, entries in zip(caches, wanted, strict=True):
        flat, kept = cache.flatten(0, 1), slots >= 0
        close(flat[slots[kept]], entries[kept], looser=2.0)
        written = torch.zeros(len(flat), dtype=torch.bool, device=device)
        written[slots[kept]] = True
        assert flat[~written].isnan().all(), "another slot was written"


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("case", ENTRIES, ids=str)
def test_entries_by_torch(case: Any, implementation: str | None, dtype: torch.dtype, assert_close: Check) -> None:
    check_entries(case, implementation, dtype, "cpu", assert_close)


@pytest.mark.parametrize("case", ENTRIES, ids=str)
def test_entries_by_triton(
    case: Any, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Check
) -> None:
    check_entries(case, "triton", triton_dtype, triton_device, assert_close)


@pytest.mark.parametrize("implementation", ["torch", "triton", "reference"])
def test_caches_of_another_type(implementation: str, triton_device: torch.device, assert_close: Check) -> None:
    device = triton_device if implementation == "triton" else torch.device("cpu")
    check_entries(ENTRIES[3], implementation, torch.float32, device, assert_close, torch.float16)


def check_queries(case: Any, implementation: str | None, dtype: torch.dtype, device: Any, close: Check) -> None:
    tokens, own, heads, rope, index_heads, size, interleaved, index_interleaved = case
    generator = torch.Generator().manual_seed(tokens + heads)
    nope, latent = 6, 10
    width = heads * (nope + rope)
    product = torch.randn(tokens, width + index_heads * size, generator=generator).to(device, dtype)
    given = product.clone()
    q, old_q = (x[:, :width].view(tokens, heads, nope + rope) for x in (product, given))
    index_q, old_index_q = (x[:, width:].view(tokens, index_heads, size) for x in (product, given))
    query = torch.full((own, heads, latent + rope), float("nan"), dtype=dtype, device=device)
    rotary = angles(tokens, rope, device)
    turn_queries(
        q[..., nope:],
        query[..., latent:],
        index_q if index_heads else None,
        *rotary,
        interleaved,
        index_interleaved,
        implementation=implementation,
    )
    wanted = turned(old_q[..., nope:], *rotary, interleaved)
    close(query[..., latent:], wanted[:own])
    assert query[..., :latent].isnan().all()
    close(q[own:, :, nope:], wanted[own:])
    assert torch.equal(q[..., :nope], old_q[..., :nope])
    close(index_q, turned(old_index_q, *rotary, index_interleaved))
    assert torch.equal(index_q[..., rope:], old_index_q[..., rope:])


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("case", QUERIES, ids=str)
def test_queries_by_torch(case: Any, implementation: str | None, dtype: torch.dtype, assert_close: Check) -> None:
    check_queries(case, implementation, dtype, "cpu", assert_close)


@pytest.mark.parametrize("case", QUERIES[:-1], ids=str)
def test_queries_by_triton(
    case: Any, triton_dtype: torch.dtype, triton_device: torch.device, assert_close: Check
) -> None:
    check_queries(case, "triton", triton_dtype, triton_device, assert_close)


def test_many_queries_by_triton(triton_device: torch.device, assert_close: Check) -> None:
    """In one type: in the interpreter it takes the longest."""
    check_queries(QUERIES[-1], "triton", torch.float32, triton_device, assert_close)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_both_are_captured_in_a_graph(triton_dtype: torch.dtype, triton_device: torch.device) -> None:
    given = entry_inputs((6, 64, 32, 16, 32, True, False), triton_dtype, triton_device, triton_dtype)
    q = torch.randn(6, 4, 16, device=triton_device).to(triton_dtype)
    out, index_q, angle = torch.empty_like(q), q.clone(), (given["cos"], given["sin"])

    def both() -> torch.Tensor:
        turn_queries(q, out, index_q, *angle, True, False)
        return write_entries(**given)

    eager, cache = both(), given["cache"].clone()
    turned_q, index_q = out.clone(), q.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for tensor in (given["cache"], out, captured):
        tensor.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)
    assert torch.equal(out, turned_q)
    assert torch.equal(given["cache"].nan_to_num(7.0), cache.nan_to_num(7.0))


def test_a_slot_past_the_cache_is_named() -> None:
    given = entry_inputs(ENTRIES[1], torch.float32, "cpu", torch.float32)
    given["slots"][0] = BLOCKS * BLOCK_SIZE
    with pytest.raises(ValueError, match="slot 28 does not exist"):
        write_entries(**given)


KEYS = IndexKeys(torch.ones(16), torch.ones(16), torch.zeros(BLOCKS, BLOCK_SIZE, 16), True)
BAD_ENTRIES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"latents": torch.zeros(1, 32)}, ValueError, "latents of 72 columns"),
    ({"latents": torch.zeros(1, 144)[:, ::2]}, ValueError, "contiguous"),
    ({"latents": torch.zeros(1, 1, 72)}, ValueError, r"latents \[T"),
    ({"cache": torch.zeros(7, 4, 16)}, ValueError, r"L \+ R = 16 \+ 8"),
    ({"cos": torch.zeros(1, 4).half()}, TypeError, "float32"),
    ({"cos": torch.zeros(2, 4)}, ValueError, "T = 1"),
    ({"slots": torch.zeros(1, dtype=torch.int32)}, TypeError, "int64"),
    ({"eps": 0.0}, ValueError, "eps"),
    ({"index": KEYS._replace(weight=torch.ones(16).half())}, TypeError, "index weight"),
    ({"index": KEYS._replace(cache=torch.zeros(7, 4, 8))}, ValueError, "index weight and bias"),
    ({"index": IndexKeys(torch.ones(4), torch.ones(4), torch.zeros(7, 4, 4), True)}, ValueError, "smaller than R"),
    ({"index": KEYS._replace(cache=torch.zeros(4, 7, 16).transpose(0, 1))}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ENTRIES)
def test_bad_entries_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = entry_inputs(ENTRIES[1], torch.float32, "cpu", torch.float32)
    with pytest.raises(error, match=message):
        write_entries(**{**given, **change})


BAD_QUERIES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 3, 6)}, ValueError, "R = 4"),
    ({"out": torch.zeros(2, 2, 4)}, ValueError, r"out \[A"),
    ({"out": torch.zeros(3, 3, 4)}, ValueError, "at most the 2 tokens"),
    ({"out": torch.zeros(2, 3, 4).half()}, TypeError, "out must be"),
    ({"index_q": torch.zeros(2, 3, 2)}, ValueError, "index_q"),
    ({"q": torch.zeros(2, 4, 3).transpose(1, 2)}, ValueError, "lie together"),
    ({"sin": torch.zeros(2, 4).t().reshape(4, 2).t()[:, ::2]}, ValueError, "contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_QUERIES)
def test_bad_queries_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(2, 3, 4),
        "out": torch.zeros(2, 3, 4),
        "index_q": torch.zeros(2, 1, 6),
        "cos": torch.zeros(2, 2),
        "sin": torch.zeros(2, 2),
        "interleaved": True,
        "index_interleaved": False,
    }
    turn_queries(**given)
    with pytest.raises(error, match=message):
        turn_queries(**{**given, **change})
