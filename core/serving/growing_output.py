"""Whole reports of a request, put together from deltas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import CompletionOutput, OutputDelta, RequestOutput, Timing, Usage


class GrowingOutput:
    """What one request gave so far, as `Engine.stream` reports it."""

    def __init__(self, request_id: str, prompt: str | None, ids: tuple[int, ...], params: SamplingParams) -> None:
        logprobs = None if params.logprobs is None else ()
        self._outputs = [CompletionOutput(index, "", (), logprobs=logprobs) for index in range(params.n)]
        self._report = RequestOutput(request_id, prompt, ids, (), False, Usage(len(ids), 0), Timing())

    def take(self, deltas: Sequence[OutputDelta]) -> RequestOutput:
        """The report with these deltas in it."""
        report = self._report
        for delta in deltas:
            before = self._outputs[delta.index]
            logprobs = None if before.logprobs is None else (*before.logprobs, *(delta.logprobs or ()))
            self._outputs[delta.index] = dataclasses.replace(
                before,
                text=before.text + delta.text,
                token_ids=(*before.token_ids, *delta.token_ids),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                logprobs=logprobs,
                cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
            )
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
        made = sum(len(output.token_ids) for output in self._outputs)
        usage = dataclasses.replace(report.usage, completion_tokens=made)
        self._report = dataclasses.replace(report, outputs=tuple(self._outputs), usage=usage)
        return self._report
