"""`/health/deep`: one real token through the engine, which no other probe asks for."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from hookline.errors import HooklineError
from hookline.sampling_params import SamplingParams
from hookline.serving.api_errors import ApiError
from hookline.serving.limits import RETRY_SECONDS
from hookline.serving.process.answer import Answer
from hookline.serving.process.async_engine import AsyncEngine
from hookline.serving.requests.validated import ValidatedRequest

# Seconds in which the token has to come, and between the end of a probe and the next.
_MOST_SECONDS = 5.0
_PAUSE_SECONDS = 5.0
# Every model has the token 0. Nothing of it is found in the cache, which takes whole blocks.
_REQUEST = ValidatedRequest((0,), SamplingParams(max_tokens=1, ignore_eos=True))
_FAULT = "The engine failed at a token."
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one probe. `ended` is the loop's time; `fault` is "" where the token came."""

    seconds: float
    ended: float
    fault: str


class DeepProbe:
    """Asks the engine for a token: once at a time and not often, however many ask. Who asks meanwhile shares what comes
    of it, and who asks soon after gets the last outcome.

    The request waits its turn as all do, beyond the queue's limit and uncounted in the figures of requests.
    """

    def __init__(
        self, engine: AsyncEngine, *, most_seconds: float = _MOST_SECONDS, pause_seconds: float = _PAUSE_SECONDS
    ) -> None:
        self._engine = engine
        self._most_seconds = most_seconds
        self._pause_seconds = pause_seconds
        self._probe: asyncio.Task[_Outcome] | None = None

    async def ask(self) -> dict[str, Any]:
        """How long the token took, and how long ago that was, in seconds.

        Raises:
            ApiError: 503, if no token came.
        """
        loop, probe = asyncio.get_running_loop(), self._probe
        if probe is None or (probe.done() and loop.time() - probe.result().ended >= self._pause_seconds):
            self._probe = probe = loop.create_task(self._run())
        outcome = await asyncio.shield(probe)
        if outcome.fault:
            raise ApiError(503, outcome.fault, code="no_token", retry_after=RETRY_SECONDS)
        age = loop.time() - outcome.ended
        return {"status": "ok", "seconds": round(outcome.seconds, 4), "age_seconds": round(age, 3)}

    async def _run(self) -> _Outcome:
        loop = asyncio.get_running_loop()
        begun, fault = loop.time(), ""
        try:
            async with asyncio.timeout(self._most_seconds):
                fault = await self._take_token()
        except TimeoutError:
            fault = f"No token came within {self._most_seconds:g} s."
        except HooklineError as error:
            _log.error("the deep probe failed: %s", error)
            fault = _FAULT
        except Exception:  # a fault of ours, behind which the next probe asks anew
            _log.exception("the deep probe failed")
            fault = _FAULT
        ended = loop.time()
        return _Outcome(ended - begun, ended, fault)

    async def _take_token(self) -> str:
        """ "" if a token came, else what went wrong."""
        answer: Answer = self._engine.submit(_REQUEST)
        tokens, failed = 0, False
        try:
            while not answer.finished:
                for delta in await answer.deltas():
                    tokens += len(delta.token_ids)
                    if delta.error:
                        _log.error("the deep probe failed: %s", delta.error)
                        failed = True
        finally:
            answer.abort()
        return "" if tokens and not failed else _FAULT
