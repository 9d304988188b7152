"""Which runner serves a model, and what has to be done before its first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from hookline.batch_processor import BatchProcessor
from hookline.config import ResolvedConfig
from hookline.execution.device_runner import DeviceRunner
from hookline.execution.runner import Runner
from hookline.execution.worst_case import measure_steps as measure
from hookline.execution.worst_case import prefill_kinds
from hookline.model import CacheTensors, TransformerModel

# Threads that compile kernels.
_COMPILERS = 8

# What a graph keeps beside the tensors of its step: workspaces, its nodes.
_GRAPH_OVERHEAD = 256 * 2**20


def measure_steps(model: TransformerModel, config: ResolvedConfig) -> tuple[int, int] | None:
    """Bytes of a prefill step at its largest, and of captured decode steps; None where they are not measured."""
    if model.device.type != "cuda":
        return None
    prefill, decode = measure(model, config.max_batch_tokens, config.max_running, config.block_size)
    return prefill, decode + _GRAPH_OVERHEAD if config.cuda_graphs else 0


def start_runner(
    model: TransformerModel,
    processor: BatchProcessor,
    cache: Mapping[str, Sequence[CacheTensors]],
    config: ResolvedConfig,
    max_model_len: int,
    notice: Callable[[int, int], None] | None = None,
) -> Runner:
    """The overlapped runner, with its graphs captured, where the options or the device ask for it; else the plain one.

    A plugin whose batch processor makes its own tensors gets the plain one.
    """
    is_cuda = model.device.type == "cuda"
    own_tensors = type(processor).prepare is not BatchProcessor.prepare
    if own_tensors or not (is_cuda if config.overlap is None else config.overlap):
        return Runner(model, processor, cache)
    runner = DeviceRunner(model, processor, cache, max_running=config.max_running, max_model_len=max_model_len)
    if is_cuda and config.cuda_graphs:
        _compile([*runner.decode.kinds(), *prefill_kinds(model, config.block_size)], model.device)
        runner.capture(notice)
    return runner


def _compile(kinds: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Runs steps that bring their kernels' compilation, many at a time, for it is most of a cold start."""

    def run(kind: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            kind()

    run(kinds[0])  # what all of them share
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(run, kinds[1:]))
