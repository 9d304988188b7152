"""Which runner serves a model, and what has to be done before its first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from hookline.batch_processor import BatchProcessor
from hookline.config import ResolvedConfig
from hookline.errors import UsageError
from hookline.execution.decode_step import DecodeStep, choose_tokens
from hookline.execution.device_batch import DeviceBatch
from hookline.execution.device_edits import edit_kinds
from hookline.execution.device_runner import DeviceRunner
from hookline.execution.kv_cache import allocate_cache
from hookline.execution.runner import Runner
from hookline.execution.speculative_runner import SpeculativeRunner
from hookline.execution.worst_case import measure_steps as measure
from hookline.execution.worst_case import prefill_kinds
from hookline.model import CacheTensors, TransformerModel

# Threads that compile kernels.
_COMPILERS = 12

# What checkpoints that think put around their thoughts.
_THINK_TOKENS = ("<think>", "</think>")

# What a graph keeps beside the tensors of its step: workspaces, its nodes.
_GRAPH_OVERHEAD = 256 * 2**20


def settle_speculation(
    config: ResolvedConfig, model: TransformerModel, find_token: Callable[[str], int | None]
) -> ResolvedConfig:
    """`config` with what speculation needs of the tokenizer.

    Raises:
        UsageError: if the model has no draft of its own and should propose with it, or no tokens around its thoughts.
    """
    speculative = config.speculative
    if speculative is None:
        return config
    if speculative.method == "mtp" and model.proposer is None:
        raise UsageError(
            f"{model.shapes.architecture} was loaded without a draft of its own, which the method mtp proposes with",
            hint="Use --speculative-method ngram, which serves every model.",
        )
    if not speculative.use_relaxed_acceptance_for_thinking or speculative.think_token_ids is not None:
        return config
    begin, end = (find_token(text) for text in _THINK_TOKENS)
    if begin is None or end is None:
        raise UsageError(
            f"relaxed acceptance is for thoughts, and the tokenizer has no {' and no '.join(_THINK_TOKENS)}",
            hint="Give think_token_ids, or leave relaxed acceptance out.",
        )
    return replace(config, speculative=replace(speculative, think_token_ids=(begin, end)))


def measure_steps(model: TransformerModel, config: ResolvedConfig) -> tuple[int, int] | None:
    """Bytes of a prefill step at its largest, and of captured decode steps; None where they are not measured."""
    if model.device.type != "cuda":
        return None
    _compile(model, config)
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    rows = min(config.max_running * (1 + drafts), max(config.max_batch_tokens, config.max_running))
    prefill, decode = measure(model, config.max_batch_tokens, rows, config.block_size)
    return prefill, decode + _GRAPH_OVERHEAD if config.cuda_graphs and not drafts else 0


def start_runner(
    model: TransformerModel,
    processor: BatchProcessor,
    cache: Mapping[str, Sequence[CacheTensors]],
    config: ResolvedConfig,
    max_model_len: int,
    notice: Callable[[int, int], None] | None = None,
) -> Runner:
    """The overlapped runner, with its graphs captured, where the options or the device ask for it; else the plain one.

    A plugin whose batch processor makes its own tensors gets the plain one, and speculation one of its own.
    """
    if config.speculative is not None:
        return SpeculativeRunner(model, processor, cache, config.speculative)
    is_cuda = model.device.type == "cuda"
    own_tensors = type(processor).prepare is not BatchProcessor.prepare
    if own_tensors or not (is_cuda if config.overlap is None else config.overlap):
        return Runner(model, processor, cache)
    runner = DeviceRunner(model, processor, cache, max_running=config.max_running, max_model_len=max_model_len)
    if is_cuda and config.cuda_graphs:
        runner.capture(notice)
    return runner


def _compile(model: TransformerModel, config: ResolvedConfig) -> None:
    """Runs small steps that bring their kernels' compilation, many at a time, for it is most of a cold start.

    Two steps that want the same kernel at the same time would both compile it. So the first are steps that share
    little: a decode of one row, a choice of tokens, a prefill.
    """
    device, size, rows = model.device, config.block_size, config.max_running
    longest = config.max_model_len or model.longest_context()
    batch = DeviceBatch(rows, -(-longest // size), rows, size, 1, device)
    decode = DecodeStep(model, allocate_cache(model.cache_specs(), 1, size, device), batch, longest, rope_lengths=True)
    first, *decodes = decode.kinds()
    prefill, *prefills = prefill_kinds(model, size)

    def run(kind: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            kind()

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(run, (first, partial(_choose, model, batch), prefill)))
        list(pool.map(run, [*decodes, *prefills, *edit_kinds(model.shapes.vocab_size, device)]))


@torch.inference_mode()
def _choose(model: TransformerModel, batch: DeviceBatch) -> None:
    logits = torch.zeros((1, model.shapes.vocab_size), device=model.device)
    choose_tokens(logits, batch.inputs.first(1).options)
