"""Linear layer for few tokens on a GPU, and its gated form for the first product of an MLP.

    linear_small:        y = x weight^T + bias                                        weight [N, K], y [T, N]
    linear_gated_small:  y = f(x gate^T + bias_gate) * (x up^T + bias_up)             weight [2F, K], gate rows above up
                                                                                      rows, y [T, F]

Shapes: x [T, K] with any row stride, weight row-major as torch stores it. Sums are in fp32 and rounded once.

For few tokens the time is that of reading the weight once. A program takes BLOCK_N rows of the weight and a part of K:
K is split so that also small weights keep every multiprocessor reading. The parts leave their sums in scratch memory;
the program that arrives last at a tile adds them in the order of the parts, whoever it is, so that equal calls give
equal bits. It sets the tile's counter back to zero, so one array of counters a device serves every call, as long as all
calls are on ONE stream (or ordered otherwise). Nothing is read by the host: calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hookline_kernels.activation import GELU, GELU_TANH, SILU
from hookline_kernels.launch import COUNTERS, arrival_counters, check_choices, dependent_launch

# How a tile is computed: by x times weight^T, by weight times x^T (the weight then fills the 64 rows that Hopper's
# matrix instructions want), or for one token by sums without matrix instructions.
ROWS, COLUMNS, VECTOR = range(3)
FORMS = {"rows": ROWS, "columns": COLUMNS, "vector": VECTOR}

# Tokens for which the choice of implementations asks the table; the functions here take more.
MAX_TOKENS = 64

# The activations that the gated kernel has, by their codes in activation.py.
GATED_CODES: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: F.silu,
    GELU: F.gelu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallConfig:
    """How one shape is computed.

    Raises:
        ValueError: a value that the kernel cannot take.
    """

    form: str = "rows"
    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    # Programmatic dependent launch: the weight's first tiles are fetched while the kernel before still runs.
    pdl: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "form": tuple(FORMS),
            "block_n": (1, 2, 4, 8, 16, 32, 64, 128, 256),
            "block_k": (16, 32, 64, 128, 256, 512, 1024, 2048),
            "splits": tuple(range(1, 17)),
            "warps": (1, 2, 4, 8, 16),
            "stages": tuple(range(1, 9)),
            "pdl": (False, True),
        }
        check_choices(self, allowed)
        if self.form != "vector" and self.block_n < 16:
            raise ValueError(f"SmallConfig: block_n below 16 is for the form 'vector', got {self.block_n}")

    def block_m(self, tokens: int) -> int:
        """Rows of x in a tile."""
        return 1 if self.form == "vector" else 16 if tokens <= 16 else 32 if tokens <= 32 else 64

    def shared_bytes(self, tokens: int, width: int, gated: bool) -> int:
        """Shared memory of a program, about, for elements of `width` bytes."""
        rows = self.block_n * (2 if gated else 1) + self.block_m(tokens)
        return self.stages * rows * self.block_k * width


def linear_small_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool, code: int | None
) -> torch.Tensor:
    """The formula in fp32; gated where there is a code."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if code is not None:
        gate, up = y.chunk(2, dim=-1)
        y = GATED_CODES[code](gate) * up
    return y if wide else y.to(x.dtype)


@triton.jit
def load_tile(
    places: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    inner: tl.tensor,
    EVEN_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
    POLICY: tl.constexpr,
) -> tl.tensor:
    """Rows of x or of the weight at the columns k; zero outside."""
    if EVEN_ROWS and EVEN_K:
        tile = tl.load(places, eviction_policy=POLICY)
    elif EVEN_K:
        tile = tl.load(places, mask=inside[:, None], other=0.0, eviction_policy=POLICY)
    else:
        tile = tl.load(places, mask=inside[:, None] & (k < inner)[None, :], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def add_product(x: tl.tensor, weight: tl.tensor, total: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """total plus the product of two tiles, in the form's own arrangement."""
    if FORM == 0:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    elif FORM == 1:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total += x.to(tl.float32) * weight.to(tl.float32)
    return total


@triton.jit
def as_rows(total: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """The sums [BLOCK_M, BLOCK_N]."""
    if FORM == 1:
        total = tl.trans(total)
    elif FORM == 2:
        total = tl.sum(total, axis=1)[None, :]
    return total


@triton.jit
def _prefetch(weight: tl.tensor, first: tl.tensor, last: tl.tensor, AHEAD: tl.constexpr, BLOCK_K: tl.constexpr) -> None:
    """Asks for the first tiles of rows of the weight, a line of 128 bytes a request, to come to the second cache."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, BLOCK_K // LINE) * LINE
    for ahead in tl.static_range(AHEAD):
        step = tl.minimum(first + ahead, last - 1)
        places = (weight[:, None] + (step * BLOCK_K + lines)[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _finish(
    first: tl.tensor,
    second: tl.tensor,
    y_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    CODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Bias, activation and the store; the codes are those of activation.py, and -1 is the plain product."""
    if HAS_BIAS:
        first += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        if CODE >= 0:
            second += tl.load(bias_ptr + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if CODE == 0:
        y = first * tl.sigmoid(first) * second
    elif CODE == 1:
        y = 0.5 * first * (1.0 + tl.erf(first * 0.7071067811865476)) * second
    elif CODE == 2:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        y = first * tl.sigmoid(1.5957691216057308 * (first + 0.044715 * first * first * first)) * second
    else:
        y = first
    inside = (m < tokens)[:, None] & (n < columns)[None, :]
    place = y_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits"])
def linear_small_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    count_ptr: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    splits: tl.tensor,
    CODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program a part of K, BLOCK_N columns of y and BLOCK_M tokens; y is contiguous.

    `columns` are y's: half the weight's rows when gated. `splits` is 1 to SPLIT_LIMIT; with a limit of 1 neither
    scratch memory nor counters are touched.
    """
    split, tile = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(inner, BLOCK_K)
    begin, end = split * steps // splits, (split + 1) * steps // splits
    rows = weight_ptr + n.to(tl.int64) * weight_stride
    up_rows = rows + tl.cast(columns, tl.int64) * weight_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EVEN_N and EVEN_K:
            _prefetch(rows, begin, end, STAGES, BLOCK_K)
            if CODE >= 0:
                _prefetch(up_rows, begin, end, STAGES, BLOCK_K)
        tl.extra.cuda.gdc_wait()
    if FORM == 0:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    elif FORM == 1:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = gate
    x_places = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    gate_places, up_places = rows[:, None] + k[None, :], up_rows[:, None] + k[None, :]
    # The number of stages at the loop itself: loads are then staged for the form without matrix instructions too.
    for step in tl.range(begin, end, num_stages=STAGES):
        start = step * BLOCK_K
        x = load_tile(x_places + start, m < tokens, start + k, inner, False, EVEN_K, "evict_last")
        weight = load_tile(gate_places + start, n < columns, start + k, inner, EVEN_N, EVEN_K, "evict_first")
        gate = add_product(x, weight, gate, FORM)
        if CODE >= 0:
            weight = load_tile(up_places + start, n < columns, start + k, inner, EVEN_N, EVEN_K, "evict_first")
            up = add_product(x, weight, up, FORM)
    gate, up = as_rows(gate, FORM), as_rows(up, FORM)
    if SPLIT_LIMIT == 1:
        _finish(gate, up, y_ptr, bias_ptr, m, n, tokens, columns, CODE, HAS_BIAS)
    else:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        PARTS: tl.constexpr = 2 if CODE >= 0 else 1
        i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        # Scratch is laid out as the sums lie in registers.
        place = i * BLOCK_N + j if FORM != 1 else i + j * BLOCK_M
        place = partial_ptr + tile.to(tl.int64) * splits * (PARTS * SIZE) + place
        tl.store(place + split * (PARTS * SIZE), gate)
        if CODE >= 0:
            tl.store(place + split * (PARTS * SIZE) + SIZE, up)
        # All threads' stores come before one thread's release; its answer reaches all through a barrier of its own.
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.store(count_ptr + tile, 0)
            gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = gate
            for part in tl.static_range(SPLIT_LIMIT):
                there = (i < BLOCK_M) & (j < BLOCK_N) & (part < splits)
                gate += tl.load(place + part * (PARTS * SIZE), mask=there, other=0.0, cache_modifier=".cg")
                if CODE >= 0:
                    up += tl.load(place + part * (PARTS * SIZE) + SIZE, mask=there, other=0.0, cache_modifier=".cg")
            _finish(gate, up, y_ptr, bias_ptr, m, n, tokens, columns, CODE, HAS_BIAS)


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wide: bool,
    config: SmallConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """One launch. x [T, K], weight [N, K], bias [N] of one type; y [T, N] in it, or in fp32 when `wide`.

    Args:
        compile_only: the kernel is compiled (under `triton.AsyncCompileMode` in a thread) and not run; y is not filled.

    Raises:
        TypeError, ValueError: types, shapes, strides or a configuration that the kernel cannot take.
        RuntimeError: a device's first call with splits is captured in a CUDA graph.
    """
    return _launch(x, weight, bias, torch.float32 if wide else x.dtype, None, config, compile_only)


def linear_gated_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    code: int,
    config: SmallConfig,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """One launch. x [T, K], weight [2F, K], bias [2F] of one type; `code` one of `GATED_CODES`; y [T, F].

    Args, Raises: as for `linear_small`.
    """
    if code not in GATED_CODES:
        raise ValueError(f"linear_gated_small: known activation codes are {sorted(GATED_CODES)}, got {code}")
    return _launch(x, weight, bias, x.dtype, code, config, compile_only)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    code: int | None,
    config: SmallConfig,
    compile_only: bool,
) -> torch.Tensor:
    _check(x, weight, bias, code)
    (tokens, inner), columns = x.shape, weight.shape[0] if code is None else weight.shape[0] // 2
    block_m, block_n = config.block_m(tokens), config.block_n
    if config.form == "vector" and tokens > 1:
        raise ValueError(f"linear_small: the form 'vector' is for one token, got {tokens}")
    y = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    tiles = triton.cdiv(columns, block_n) * triton.cdiv(tokens, block_m)
    splits = max(1, min(config.splits, triton.cdiv(inner, config.block_k))) if tiles <= COUNTERS else 1
    scratch, counters = y, y  # never touched without splits
    if splits > 1:
        size = tiles * splits * block_m * block_n * (1 if code is None else 2)
        scratch, counters = torch.empty(size, dtype=torch.float32, device=x.device), arrival_counters(x.device)
    options = dependent_launch(x.device) if config.pdl else {"PDL": False}
    grid = (splits, triton.cdiv(columns, block_n), triton.cdiv(tokens, block_m))
    kernel: Any = linear_small_kernel
    launch = partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
    launch(
        x,
        weight,
        y if bias is None else bias,
        y,
        scratch,
        counters,
        tokens,
        columns,
        inner,
        x.stride(0),
        weight.stride(0),
        splits,
        CODE=-1 if code is None else code,
        HAS_BIAS=bias is not None,
        FORM=FORMS[config.form],
        SPLIT_LIMIT=1 if splits == 1 else max(4, triton.next_power_of_2(splits)),  # few variants to compile
        EVEN_N=columns % block_n == 0,
        EVEN_K=inner % config.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        **options,
    )
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, code: int | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_small: x [T, K] and weight [N, K] expected, got {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype) or not x.is_floating_point():
        raise TypeError(f"linear_small: x, weight and bias must be of one type, got {x.dtype} and {weight.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1 or (bias is not None and not bias.is_contiguous()):
        raise ValueError(
            f"linear_small: rows must lie together, got strides {x.stride()} of x and {weight.stride()} of the weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_small: bias {list(bias.shape)} does not fit weight {list(weight.shape)}")
    if code is not None and weight.shape[0] % 2:
        raise ValueError(f"linear_gated_small: weight must have gate and up rows, got {list(weight.shape)}")
