"""Whole reports of a request, put together from deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import CompletionOutput, OutputDelta, RequestOutput, Timing, TokenLogprob, Usage


class GrowingOutput:
    """What one request gave so far, as `Engine.stream` reports it.

    A report holds all that came before it: making one copies that once, and looks at nothing of it again. Who cannot
    afford the copies of long outputs takes `Answer.deltas`.
    """

    def __init__(self, request_id: str, prompt: str | None, ids: tuple[int, ...], params: SamplingParams) -> None:
        self._parts = [_Part(index, params.logprobs is not None) for index in range(params.n)]
        self._report = RequestOutput(request_id, prompt, ids, (), False, Usage(len(ids), 0), Timing())

    def take(self, deltas: Sequence[OutputDelta]) -> RequestOutput:
        """The report with these deltas in it."""
        report = self._report
        for delta in deltas:
            self._parts[delta.index].take(delta)
            prompts = delta.prompt_logprobs
            report = dataclasses.replace(
                report,
                finished=report.finished or delta.timing is not None,
                timing=delta.timing or report.timing,
                prompt_logprobs=report.prompt_logprobs if prompts is None else tuple(prompts),
                error=report.error or delta.error,
            )
            if not delta.index:  # what the others find in the cache may be their own sibling's
                usage = dataclasses.replace(report.usage, cached_tokens=delta.cached_tokens)
                report = dataclasses.replace(report, usage=usage)
        outputs = tuple(part.output for part in self._parts)
        made = sum(len(output.token_ids) for output in outputs)
        usage = dataclasses.replace(report.usage, completion_tokens=made)
        self._report = dataclasses.replace(report, outputs=outputs, usage=usage)
        return self._report


class _Part:
    """One continuation so far."""

    __slots__ = ("_cumulative", "_logprobs", "_text", "_token_ids", "output")

    def __init__(self, index: int, wants_logprobs: bool) -> None:
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if wants_logprobs else None
        self._cumulative = 0.0
        self.output = CompletionOutput(index, "", (), logprobs=() if wants_logprobs else None)

    def take(self, delta: OutputDelta) -> None:
        """Takes more of it; `output` is then made anew."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        if self._logprobs is not None:
            found = delta.logprobs or ()
            self._logprobs += found
            for entry in found:
                self._cumulative += entry.logprob
        self.output = CompletionOutput(
            self.output.index,
            self._text,
            tuple(self._token_ids),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
        )
