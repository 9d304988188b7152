"""Where the Triton kernels run in these tests, what their results are held to, and cases for the attention tests.

Under Triton's interpreter, which has to be switched on before anything imports the kernels, they run on CPU tensors.
With a CUDA device and TRITON_INTERPRET=0 they are compiled and run there, and those tests carry the mark `gpu`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from hookline_kernels.rms_norm import rms_norm_kernel

# Worst and RMS error allowed, as parts of the largest expected value.
TOLERANCES = {
    torch.float32: (2e-6, 4e-7),
    torch.float16: (2e-3, 3e-4),
    torch.bfloat16: (1.6e-2, 2.4e-3),
}

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
TRITON_TYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_GPU:
        for item in items:
            if "triton_device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Without what the interpreter does again and again.

    Calls of device functions do not patch all of Triton's language again, which takes most of their time: a launch has
    patched `triton.language`; what is left is its `core`, which stays patched. And what belongs to a type or to a shape
    is worked out once, not for each value.
    """
    slow_call, slow_block, slow_type = (
        InterpretedFunction.__call__,
        tl.block_type.__init__,
        cache(interpreter._get_np_dtype),
    )

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tl.core.is_builtin(tl.core.arange):
            return slow_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    @cache
    def of_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_shape(tuple(type.shape) if type.is_block() else ())

    blocks: dict[tuple[Any, str], tuple[Any, int, str]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape), element_ty.name
        if key not in blocks:
            slow_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, blocks[key]

    def np_dtype(tt_dtype: Any) -> Any:
        return np.dtype(np.uint64) if tt_dtype.scalar.is_ptr() else slow_type(tt_dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        patch.setattr(tl.tensor, "__init__", tensor)
        patch.setattr(tl.block_type, "__init__", block)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield


@pytest.fixture
def triton_device() -> torch.device:
    """The device of the tensors that are given to Triton kernels."""
    if ON_GPU:
        return torch.device("cuda")
    assert not isinstance(rms_norm_kernel, triton.JITFunction), (
        "the kernels were imported before TRITON_INTERPRET=1 was set; tests/conftest.py has to set it"
    )
    return torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Number formats of the CPU implementations."""
    return request.param


@pytest.fixture(params=TRITON_TYPES, ids=str)
def triton_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Number formats of the Triton kernels; the interpreter computes bf16 products as raw bits, so it gets none."""
    return request.param


@pytest.fixture
def assert_close() -> Callable[..., None]:
    def check(actual: torch.Tensor, expected: torch.Tensor, looser: float = 1.0) -> None:
        assert actual.shape == expected.shape
        if actual.numel() == 0:
            return
        difference = (actual.double().cpu() - expected.double().cpu()).abs()
        size = max(float(expected.double().abs().max()), 1e-30)
        worst, rms = float(difference.max()) / size, float(difference.square().mean().sqrt()) / size
        worst_allowed, rms_allowed = (looser * value for value in TOLERANCES[actual.dtype])
        assert worst <= worst_allowed, f"worst error {worst:.2e} of {worst_allowed:.2e}"  # false for NaN too
        assert rms <= rms_allowed, f"RMS error {rms:.2e} of {rms_allowed:.2e}"

    return check


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A paged cache with the contexts of some requests, each request's last `rows` tokens being the queries."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    rows: list[int]
    contexts: list[int]
    owned: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def query_starts(self) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(self.rows)], dtype=torch.int32, device=self.q.device)

    @property
    def context_lens(self) -> torch.Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    def with_garbage(self, value: float) -> AttentionCase:
        """The same case with `value` in each cache entry that belongs to no context."""
        caches = [self.k_cache.clone(), self.v_cache.clone()]
        for changed in caches:
            changed.flatten(0, 1)[~self.owned] = value
        return replace(self, k_cache=caches[0], v_cache=caches[1])

    def oracle(self, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        """Attention in fp64, a row and a head at a time, from the definition."""
        q, keys, values = (x.double().cpu().numpy() for x in (self.q, self.k_cache, self.v_cache))
        block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
        out, token = np.zeros(q.shape), 0
        for table, rows, context in zip(self.block_tables.tolist(), self.rows, self.contexts, strict=True):
            places = [table[j // block_size] for j in range(context)], [j % block_size for j in range(context)]
            own_keys, own_values = keys[places], values[places]
            for position in range(context - rows, context):
                seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
                for head in range(q.shape[1] if position >= 0 else 0):
                    scores = own_keys[seen, head // group] @ q[token, head] * self.scale
                    if soft_cap is not None:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ own_values[seen, head // group] / weights.sum()
                token += 1
        return torch.from_numpy(out)


@pytest.fixture
def attention_case() -> Callable[..., AttentionCase]:
    """Makes a case: scattered blocks, NaN in what belongs to no context, block 0 unused, q a view of a wider tensor."""

    def make(
        contexts: list[int],
        rows: list[int],
        *,
        heads: int = 9,
        kv_heads: int = 3,
        size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> AttentionCase:
        generator = torch.Generator().manual_seed(len(contexts) + size)
        needed = [-(-context // block_size) for context in contexts]
        blocks = 3 + sum(needed)
        order = (1 + torch.randperm(blocks - 1, generator=generator)).tolist()
        tables = torch.zeros(len(contexts), max([*needed, 1]) + 2, dtype=torch.int32)
        owned = torch.zeros(blocks * block_size, dtype=torch.bool)
        for request, context in enumerate(contexts):
            own = torch.tensor([order.pop() for _ in range(needed[request])], dtype=torch.int32)
            tables[request, : len(own)] = own
            positions = torch.arange(context)
            owned[own[positions // block_size].long() * block_size + positions % block_size] = True
        caches = torch.randn(2, blocks, block_size, kv_heads, size, generator=generator)
        fused = torch.randn(sum(rows), heads * size + 24, generator=generator)
        q = fused.to(device, dtype)[:, : heads * size].unflatten(1, (heads, size))
        k_cache, v_cache = caches.to(device, dtype)
        case = AttentionCase(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_tables=tables.to(device),
            rows=rows,
            contexts=contexts,
            owned=owned.to(device),
        )
        return case.with_garbage(float("nan"))

    return make
