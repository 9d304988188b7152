"""A server with a clock of its own: every step takes a given time, and gives every request a token or more."""

from __future__ import annotations

from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import CompletionOutput, RequestOutput, SpeculativeStep, Timing, Usage


class FakeServer:
    """Behaves as `measure.Server`.

    Args:
        prefill: seconds of a step in which a request gets its first token.
        decode: seconds of any other step.
        cut: requests with this number end one token early, as with an error.
        drafts: that a decode step verifies of each request; None for a server that does not speculate.
        accepted: how many of them the steps accept, in turn.
    """

    def __init__(
        self,
        prefill: float,
        decode: float,
        cut: int | None = None,
        drafts: int | None = None,
        accepted: tuple[int, ...] = (0,),
    ) -> None:
        self.prefill, self.decode, self.cut = prefill, decode, cut
        self.drafts, self.accepted = drafts, accepted
        self.now = 0.0
        self.slept: list[float] = []
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self._running: dict[str, list[int]] = {}
        self._stream: dict[str, bool] = {}
        self._records: dict[str, list[SpeculativeStep]] = {}
        self._aborted: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def add_request(self, prompt: list[int], params: SamplingParams, /, *, stream: bool = False) -> str:
        name = f"request-{len(self.seen)}"
        wanted = (params.max_tokens or 0) - (len(self.seen) == self.cut)
        self.seen.append((prompt, params))
        self._running[name], self._stream[name] = [0, wanted, len(prompt)], stream
        self._records[name] = []
        return name

    def abort(self, request_id: str, /) -> bool:
        state = self._running.pop(request_id, None)
        if state is not None:
            self._aborted.append(self._output(request_id, state, "abort"))
        return state is not None

    def step(self) -> list[RequestOutput]:
        outputs, self._aborted = self._aborted, []
        if self._running:
            self.now += self.prefill if any(not done for done, _, _ in self._running.values()) else self.decode
        for name, state in list(self._running.items()):
            state[0] += self._take(self._records[name]) if state[0] else 1
            finished = state[0] >= state[1]
            if finished:
                del self._running[name]
            if finished or self._stream[name]:
                outputs.append(self._output(name, state, "length" if finished else None))
        return outputs

    def _take(self, records: list[SpeculativeStep]) -> int:
        """Tokens of one decode step."""
        if self.drafts is None:
            return 1
        accepted = self.accepted[len(records) % len(self.accepted)]
        records.append(SpeculativeStep(self.drafts, accepted, 0, ()))
        return 1 + accepted

    def _output(self, name: str, state: list[int], reason: str | None) -> RequestOutput:
        return _output(name, state[0], state[2], reason, tuple(self._records[name]) or None)


def _output(
    name: str, tokens: int, prompt: int, reason: str | None, speculative: tuple[SpeculativeStep, ...] | None
) -> RequestOutput:
    completion = CompletionOutput(0, "", tuple(range(tokens)), reason, speculative=speculative)
    return RequestOutput(
        request_id=name,
        prompt=None,
        prompt_token_ids=tuple(range(prompt)),
        outputs=(completion,),
        finished=reason is not None,
        usage=Usage(prompt_tokens=prompt, completion_tokens=tokens),
        timing=Timing(),
    )
