"""Bytes of a decode step's kernels: the products of a model, and the rules by which a kernel's tensors count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline.benchmark.setup import Bench
from hookline.benchmark.traffic import _launches, _Recorder, decode_traffic
from hookline.checkpoint.random import RandomReader
from hookline.config import EngineConfig
from hookline.loading import load_model
from tests.benchmark.conftest import tiny_config

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret


def test_products_of_a_step(bench: Bench) -> None:
    """Llama of 2 layers with M = 64, F = 112, 4 heads of 16 on 2, V = 320; so many rows that torch computes them."""
    rows = 20
    found = decode_traffic(bench.engine.loaded.opened.model, 18, rows, 5, 64, 16)
    shapes = [(128, 64), (64, 64), (224, 64), (64, 112)] * 2 + [(320, 64)]
    assert found.products == sum(4 * (n * k + rows * (n + k)) for n, k in shapes)
    assert found.kernels == {}  # a CPU launches none


def test_how_a_kernels_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches by what is used of them, block tables not at all, one tensor once, a compilation not at all."""
    cache, tables, x = torch.zeros(4, 16, 2, 8), torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3, 16)
    recorder = _Recorder({cache.data_ptr(): (1000, 30)}, tables.data_ptr())
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: launched.append(args))
    original = JITFunction.run
    attention, write = (SimpleNamespace(fn=SimpleNamespace(__name__=name)) for name in ("attention", "write"))
    with _launches(recorder):
        JITFunction.run(attention, x, cache, tables, 1.0, grid=(1,), warmup=False)
        JITFunction.run(write, x, x[:2], grid=(1,), warmup=False, cache=cache)
        JITFunction.run(write, x, grid=(1,), warmup=True)
    assert JITFunction.run is original
    assert len(launched) == 3
    assert dict(recorder.kernels) == {"attention": 3 * 16 * 4 + 1000, "write": 2 * 16 * 4 + 30}


def test_of_experts_only_those_that_are_chosen_count() -> None:
    experts, x = torch.zeros(4, 8, 16), torch.zeros(4, 3, 16)
    recorder = _Recorder({experts.data_ptr(): (512, 512)}, 0)
    with recorder:
        torch.bmm(x, experts.transpose(1, 2))
        torch.mm(x[0], experts[0].t())  # one of them, which is less than that
    assert recorder.products == 4 * (4 * 3 * 16 + 4 * 3 * 8) + 512 + 4 * (3 * 16 + 8 * 16 + 3 * 8)
    recorder.launched("grouped", (x, experts))
    assert recorder.kernels["grouped"] == 4 * 4 * 3 * 16 + 512
    recorder.launched("by tma", [TensorDescriptor.from_tensor(each, [1, 1, 16]) for each in (x, experts, x)])
    assert recorder.kernels["by tma"] == recorder.kernels["grouped"]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_kernels_of_a_step_on_the_gpu() -> None:
    config = EngineConfig("m", device="cuda", dtype="bfloat16", load_format="random")
    model = load_model(config, RandomReader(tiny_config(head_dim=64))).opened.model
    found = decode_traffic(model, 3, 4, 400, 512, 16)
    contexts = 3 * 400 * sum(spec.bytes_per_token() for spec in model.cache_specs())
    attention = sum(size for name, size in found.kernels.items() if "attention_decode" in name)
    assert contexts < attention < 2 * contexts
    norms, row = 2 * 2 + 1, 2 * 4 * 64  # of 2 layers, and the last; bytes of 4 rows
    weights = norms * 2 * 64
    assert norms * 2 * row + weights <= found.kernels["rms_norm_kernel"] <= norms * 4 * row + weights
    assert found.products + found.kernels.get("linear_small_kernel", 0) > 2 * 320 * 64  # the head, whoever computes it
