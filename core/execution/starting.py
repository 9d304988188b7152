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
from hookline.execution.decode_step import DecodeStep, DeviceStep, choose_tokens
from hookline.execution.device_batch import DeviceBatch
from hookline.execution.device_edits import edit_kinds
from hookline.execution.device_runner import STEPS, DeviceRunner
from hookline.execution.draft_batch import DraftDeviceBatch
from hookline.execution.kv_cache import allocate_cache
from hookline.execution.runner import Runner
from hookline.execution.speculative import synthetic_chance
from hookline.execution.speculative_runner import SpeculativeRunner
from hookline.execution.token_masks import mask_kind
from hookline.execution.unified_runner import UnifiedRunner
from hookline.execution.unified_step import UnifiedStep
from hookline.execution.worst_case import measure_steps as measure
from hookline.execution.worst_case import prefill_kinds
from hookline.model import CacheTensors, TransformerModel

# Threads that compile kernels.
_COMPILERS = 12

# What checkpoints that think put around their thoughts.
_THINK_TOKENS = ("<think>", "</think>")

# What a graph keeps beside the tensors of its step: workspaces, its nodes.
_GRAPH_OVERHEAD = 256 * 2**20


def settle_speculation(config: ResolvedConfig, find_token: Callable[[str], int | None]) -> ResolvedConfig:
    """`config` with what speculation needs of the tokenizer.

    Raises:
        UsageError: if the model has no tokens around its thoughts.
    """
    speculative = config.speculative
    if speculative is None or not speculative.use_relaxed_acceptance_for_thinking or speculative.think_token_ids:
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
    sizes = config.max_batch_tokens, config.max_running, config.block_size
    prefill, decode = measure(model, *sizes, drafts, proposes=_own_draft(model, config))
    captured = config.cuda_graphs and (not drafts or _is_unified(model, config))
    return prefill, decode + _GRAPH_OVERHEAD if captured else 0


def start_runner(
    model: TransformerModel,
    processor: BatchProcessor,
    cache: Mapping[str, Sequence[CacheTensors]],
    config: ResolvedConfig,
    max_model_len: int,
    notice: Callable[[int, int], None] | None = None,
) -> Runner:
    """An overlapped runner, with its graphs captured, where the options or the device ask for it; else a plain one.

    A plugin whose batch processor makes its own tensors gets a plain one, and so does speculation whose drafts the host
    proposes or accepts.
    """
    is_cuda, speculative = model.device.type == "cuda", config.speculative
    own_tensors = type(processor).prepare is not BatchProcessor.prepare
    overlaps = not own_tensors and (is_cuda if config.overlap is None else config.overlap)
    if speculative is not None and not (overlaps and _is_unified(model, config)):
        return SpeculativeRunner(model, processor, cache, speculative)
    if not overlaps:
        return Runner(model, processor, cache)
    step = _make_step(model, cache, config, max_model_len, processor.rope_lengths)
    if isinstance(step, UnifiedStep) and speculative is not None:
        runner: DeviceRunner = UnifiedRunner(model, processor, cache, step, speculative)
    else:
        runner = DeviceRunner(model, processor, cache, step)
    if is_cuda and config.cuda_graphs:
        runner.capture(notice)
    return runner


def _own_draft(model: TransformerModel, config: ResolvedConfig) -> bool:
    """Whether the model's own draft proposes."""
    return config.speculative is not None and config.speculative.method == "mtp" and model.proposer is not None


def _is_unified(model: TransformerModel, config: ResolvedConfig) -> bool:
    """Whether a speculative step can run on the device alone."""
    chosen = config.speculative
    by_host = chosen is None or chosen.use_relaxed_acceptance_for_thinking or chosen.draft_proposal == "sampled"
    return _own_draft(model, config) and not by_host


def _make_step(
    model: TransformerModel,
    cache: Mapping[str, Sequence[CacheTensors]],
    config: ResolvedConfig,
    max_model_len: int,
    rope_lengths: bool,
) -> DeviceStep:
    """The step of running requests alone, with its slots."""
    size, rows, device, speculative = config.block_size, config.max_running, model.device, config.speculative
    if speculative is None or model.proposer is None or not _is_unified(model, config):
        batch = DeviceBatch(rows, -(-max_model_len // size), rows, size, STEPS, device)
        return DecodeStep(model, cache, batch, max_model_len, rope_lengths)
    drafts, rate = speculative.num_speculative_tokens, speculative.synthetic_acceptance_rate
    return UnifiedStep(
        model,
        cache,
        DraftDeviceBatch(rows, max_model_len + 2 * drafts, drafts, size, STEPS, device),
        max_model_len + drafts,
        rope_lengths,
        proposer=model.proposer,
        chance=None if rate is None else synthetic_chance(rate, drafts),
    )


def _compile(model: TransformerModel, config: ResolvedConfig) -> None:
    """Runs small steps that bring their kernels' compilation, many at a time, for it is most of a cold start.

    Two steps that want the same kernel at the same time would both compile it. So the first are steps that share
    little: a decode of one request, a choice of tokens, a prefill.
    """
    device, size = model.device, config.block_size
    cache = allocate_cache(model.cache_specs(), 1, size, device)
    step = _make_step(model, cache, config, config.max_model_len or model.longest_context(), rope_lengths=True)
    first, *decodes = step.kinds()
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    prefill, *prefills = prefill_kinds(model, size, drafts if _own_draft(model, config) else 0)

    def run(kind: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            kind()

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(run, (first, partial(_choose, model, step.batch), prefill)))
        edits = [*edit_kinds(model.shapes.vocab_size, device), mask_kind(model.shapes.vocab_size, device)]
        list(pool.map(run, [*decodes, *prefills, *edits]))


@torch.inference_mode()
def _choose(model: TransformerModel, batch: DeviceBatch) -> None:
    options = batch.inputs.first(1).options
    logits = torch.zeros((len(options.keys), model.shapes.vocab_size), device=model.device)
    choose_tokens(logits, options)
