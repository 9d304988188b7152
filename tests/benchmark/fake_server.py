"""A server with a clock of its own: every step takes a given time, and every request gets a token a step."""

from __future__ import annotations

from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import CompletionOutput, RequestOutput, Timing, Usage


class FakeServer:
    """Behaves as `measure.Server`.

    Args:
        prefill: seconds of a step in which a request gets its first token.
        decode: seconds of any other step.
        cut: requests with this number end one token early, as with an error.
    """

    def __init__(self, prefill: float, decode: float, cut: int | None = None) -> None:
        self.prefill, self.decode, self.cut = prefill, decode, cut
        self.now = 0.0
        self.slept: list[float] = []
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self._running: dict[str, list[int]] = {}
        self._stream: dict[str, bool] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

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
        return name

    def step(self) -> list[RequestOutput]:
        self.now += self.prefill if any(not done for done, _, _ in self._running.values()) else self.decode
        outputs = []
        for name, state in list(self._running.items()):
            state[0] += 1
            finished = state[0] >= state[1]
            if finished:
                del self._running[name]
            if finished or self._stream[name]:
                outputs.append(_output(name, state[0], state[2], finished))
        return outputs


def _output(name: str, tokens: int, prompt: int, finished: bool) -> RequestOutput:
    completion = CompletionOutput(0, "", tuple(range(tokens)), "length" if finished else None)
    return RequestOutput(
        request_id=name,
        prompt=None,
        prompt_token_ids=tuple(range(prompt)),
        outputs=(completion,),
        finished=finished,
        usage=Usage(prompt_tokens=prompt, completion_tokens=tokens),
        timing=Timing(),
    )
