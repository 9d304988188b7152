"""paged_rows: where rows stand, and how the kernels find their tiles."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hookline_kernels.paged_rows import PagedRows, locate_tile, most_tiles, row_positions
from tests.kernels.latent_cases import LatentCase, make_case

BATCHES = [([9], [1], 0), ([9, 0, 7, 4], [3, 2, 0, 4], 3), ([0, 0], [1, 1], 0), ([5] * 70, [2] * 70, 1), ([], [], 4)]


def rows_of(case: LatentCase) -> PagedRows:
    return PagedRows(case.block_tables, case.query_starts, case.context_lens, **case.bounds)


@pytest.mark.parametrize(("contexts", "counts", "padding"), BATCHES[:-1], ids=str)
def test_rows_stand_at_the_end_of_their_context(contexts: list[int], counts: list[int], padding: int) -> None:
    case = make_case(contexts, counts, padding=padding, width=16)
    requests, positions = row_positions(rows_of(case), len(case.rows))
    assert positions.tolist() == [position for _, position in case.rows]
    real = positions >= 0
    expected = torch.tensor([request for request, _ in case.rows])
    assert torch.equal(requests[real], expected[real])


@triton.jit
def _locate_kernel(
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    request, first, end, context = locate_tile(starts_ptr, contexts_ptr, requests, tokens, tile, ROWS, BLOCK_B)
    tl.store(out_ptr + 4 * tile, request)
    tl.store(out_ptr + 4 * tile + 1, first)
    tl.store(out_ptr + 4 * tile + 2, end)
    tl.store(out_ptr + 4 * tile + 3, context)


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize(("contexts", "counts", "padding"), BATCHES, ids=str)
def test_tiles_cover_each_row_once(
    triton_device: torch.device, contexts: list[int], counts: list[int], padding: int, each: int
) -> None:
    case = make_case(contexts, counts, padding=padding, width=16, device=triton_device)
    tokens, requests = len(case.rows), len(contexts)
    tiles = most_tiles(tokens, requests, each)
    out = torch.full((tiles, 4), -1, dtype=torch.int32, device=triton_device)
    lists = (case.query_starts, case.context_lens, out)
    _locate_kernel[(tiles,)](*lists, requests, tokens, ROWS=each, BLOCK_B=max(64, 2 ** requests.bit_length()))
    covered = []
    for request, first, end, context in out.tolist():
        if request <= requests:
            here = range(first, min(first + each, end))
            assert here
            assert request == requests or (contexts[request] == context and end == sum(counts[: request + 1]))
            assert request < requests or (context, end) == (0, tokens)
            covered += here
    assert sorted(covered) == list(range(tokens))
