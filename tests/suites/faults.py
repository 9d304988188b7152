"""Fault switches: an error, or a delay, put into one stage of an engine. For suites alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from hookline import Engine, request_intake
from hookline.execution import device_runner, sampler
from hookline.execution.device_runner import DeviceRunner
from hookline.execution.sampling_state import SamplingState
from hookline.output_processor import OutputProcessor, _Completion
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import StopStringMatcher
from hookline.scheduling.request import Request
from hookline.tokenizer import IncrementalDetokenizer

# Stages that work for one request at a time: what fails there fails that request alone.
ALONE = ("add_request", "mask", "matcher", "detokenise", "stop check")
# Stages that work for a whole step: what fails there loses the step.
SHARED = ("prepare", "forward", "logits", "sample", "edits", "logprobs")
# Stages that keep the ledger of requests and blocks, or tell of it: who cannot trust it has to start again.
LEDGER = ("schedule", "update", "report")
STAGES = (*ALONE, *SHARED, *LEDGER)


class InjectedError(Exception):
    """A fault that a suite has put in."""


@dataclass(slots=True)
class Fault:
    """One fault.

    Attributes:
        stage: of `STAGES`.
        marker: first prompt token of the requests that it strikes; None strikes all.
        after: calls of the stage that pass before it strikes.
        times: calls that it strikes.
        delay: seconds to wait in place of an error.
        struck: ids of the requests of each call that it struck.
        batch: requests of the step that runs.
    """

    stage: str
    marker: int | None = None
    after: int = 0
    times: int = 1
    delay: float = 0.0
    struck: list[tuple[str, ...]] = field(default_factory=list)
    batch: tuple[Request, ...] = ()

    def strike(self, requests: Iterable[Request]) -> None:
        """Raises, or waits, if the stage that is called for these requests is the one, and it is time."""
        hit = tuple(requests)
        if len(self.struck) >= self.times or (not any(map(self._marks, hit)) and (self.marker is not None or not hit)):
            return
        if self.after:
            self.after -= 1
            return
        self.struck.append(tuple(request.request_id for request in hit))
        if not self.delay:
            raise InjectedError(f"in {self.stage}, for the {len(self.struck)}th time")
        time.sleep(self.delay)

    def _marks(self, request: Request) -> bool:
        return self.marker is None or request.prompt_token_ids[0] == self.marker


class Free:
    """A matcher that allows everything, so that a request without a grammar goes the way of one with."""

    is_finished = False

    def __init__(self, request: Request) -> None:
        self.request = request

    def fill(self, mask: torch.Tensor, drafts: Sequence[int]) -> None:
        """See `TokenMatcher`."""
        mask.fill_(-1)

    def accept(self, token_id: int) -> None:
        """See `TokenMatcher`."""

    def restart(self) -> None:
        """See `TokenMatcher`."""


def _limited_state(params: SamplingParams, prompt: Sequence[int], *arguments: Any, **options: Any) -> SamplingState:
    matcher = Free(Request("limited", list(prompt), params, 1))
    return SamplingState(params, prompt, *arguments, **options | {"matcher": matcher})


@contextmanager
def installed(engine: Engine, *faults: Fault) -> Iterator[None]:
    """Puts faults into an engine."""
    with ExitStack() as patches:
        if any(fault.stage in ("mask", "matcher") for fault in faults):
            patches.enter_context(patch.object(request_intake, "SamplingState", _limited_state))
        for fault in faults:
            _note_batches(patches, engine, fault)
            for target, name in _places(engine, fault.stage):
                _wrap(patches, target, name, _striker(engine, fault))
        yield


Striker = Callable[[Any, Sequence[Any]], None]


def _places(engine: Engine, stage: str) -> list[tuple[Any, str]]:
    """Object and attribute of the functions that make a stage."""
    runner: Any = engine._runner
    on_device = isinstance(runner, DeviceRunner)
    places: dict[str, list[tuple[Any, str]]] = {
        "add_request": [(request_intake, "SamplingState")],
        "mask": [(Free, "fill")],
        "matcher": [(Free, "accept")],
        "detokenise": [(IncrementalDetokenizer, "push")],
        "stop check": [(StopStringMatcher, "push")],
        "report": [(_Completion, "delta")],
        "prepare": [(runner.processor, "prepare"), *([(runner.batch, "rows")] if on_device else [])],
        "forward": [(runner.model, "forward")],
        "logits": [(runner.model, "compute_logits")],
        "sample": [(runner, "_choose_again")] if on_device else [(runner.sampler, "sample")],
        "edits": [(runner.edits, "edit")] if on_device else [(sampler, "edit_logits")],
        "logprobs": [(device_runner, "logprob_values")] if on_device else [(sampler, "token_logprobs")],
        "schedule": [(engine.scheduler, "_decide")],
        "update": [(engine.scheduler, "update")],
    }  # fmt: skip
    return places[stage]


def _striker(engine: Engine, fault: Fault) -> Striker:
    """Tells the fault which requests a call of its stage is for."""

    def strike(own: Any, arguments: Sequence[Any]) -> None:
        if fault.stage == "add_request":
            params, prompt = arguments[:2]
            fault.strike([Request("new", list(prompt), params, 1)])
        elif fault.stage in ("report", "mask", "matcher"):
            fault.strike([own.request])
        elif fault.stage == "schedule":
            fault.strike(owner.request for owner in engine.scheduler._owners.values())
        else:
            fault.strike(fault.batch)

    return strike


def _wrap(patches: ExitStack, target: Any, name: str, strike: Striker) -> None:
    original = getattr(target, name)
    is_class = isinstance(target, type)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        strike(arguments[0] if is_class else None, arguments)
        return original(*arguments, **options)

    patches.enter_context(patch.object(target, name, wrapped))


def _note_batches(patches: ExitStack, engine: Engine, fault: Fault) -> None:
    """Keeps `fault.batch` up to date: the step that is launched, or the request whose tokens are taken."""
    launch, take, update = engine._runner.launch, OutputProcessor.take_tokens, engine.scheduler.update

    def launched(batch: Any, states: Any) -> Any:
        fault.batch = tuple(part.request for part in batch.requests)
        return launch(batch, states)

    def taken(self: OutputProcessor, request: Request, *arguments: Any) -> bool:
        fault.batch = (request,)
        return take(self, request, *arguments)

    def updated(batch: Any, sampled: Any) -> Any:
        fault.batch = tuple(part.request for part in batch.requests)
        return update(batch, sampled)

    patches.enter_context(patch.object(engine._runner, "launch", launched))
    patches.enter_context(patch.object(OutputProcessor, "take_tokens", taken))
    patches.enter_context(patch.object(engine.scheduler, "update", updated))


@contextmanager
def odd_logits(engine: Engine, write: Callable[[torch.Tensor], None], *, after: int = 0) -> Iterator[list[int]]:
    """Lets `write` change the logits [R, V] of one call, after so many calls of more than one row.

    Yields:
        the widths of the calls that it changed.
    """
    model, hit, left = engine._runner.model, list[int](), [after]
    compute = model.compute_logits

    def changed(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        if logits.shape[0] > 1 and not hit:
            if left[0]:
                left[0] -= 1
                return logits
            logits = logits.clone()
            write(logits)
            hit.append(logits.shape[0])
        return logits

    with patch.object(model, "compute_logits", changed):
        yield hit


@contextmanager
def spoiled_padding(engine: Engine, value: float) -> Iterator[list[int]]:
    """Makes rows that nobody owns no numbers, from their embeddings on, in each step that runs on the device alone.

    They are rows of padding and, in a step with drafts, those behind the drafts that count.

    Yields:
        how many rows of each call's logits [R, V] were no numbers.
    """
    step: Any = engine._runner.decode  # type: ignore[attr-defined]
    module, nobody, hit = sys.modules[step.model.forward.__module__], list[torch.Tensor](), list[int]()
    run, embedding, compute = step.run, module.embedding, step.model.compute_logits

    def stepped(rows: torch.Tensor) -> Any:
        # Row 1 is a token's position, or how many drafts count; either is -1 in padding.
        nobody[:] = [(torch.arange(step.each) > rows[1][:, None]).flatten()]
        try:
            return run(rows)
        finally:
            nobody.clear()

    def embedded(*arguments: Any) -> torch.Tensor:
        found: torch.Tensor = embedding(*arguments)
        return found.masked_fill(nobody[0][:, None], value) if nobody else found

    def computed(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden)
        hit.append(int((~logits.isfinite()).any(dim=1).sum()))
        return logits

    with (
        patch.object(step, "run", stepped),
        patch.object(module, "embedding", embedded),
        patch.object(step.model, "compute_logits", computed),
    ):
        yield hit


def spoil_blocks(engine: Engine, blocks: Sequence[int], value: float) -> None:
    """Fills cache blocks, in all layers of all groups, with a value that is no number."""
    for group in engine._runner.cache.values():
        for layer in group:
            for tensor in layer.values():
                if tensor.dtype.is_floating_point:
                    tensor[list(blocks)] = value
