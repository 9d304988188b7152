"""What all routes share: the options, the engine, what it serves once it is ready, and the calls at work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.plugins import Plugin
from hookline.serving.api_errors import ApiError
from hookline.serving.intake import Intake
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.limits import RETRY_SECONDS
from hookline.serving.metrics import Metrics
from hookline.serving.process.async_engine import AsyncEngine
from hookline.serving.process.messages import Facts
from hookline.serving.replies.calls import Calls, engine_gone, shutting_down
from hookline.serving.replies.choice import AnswerContext
from hookline.serving.replies.token_texts import TokenTexts
from hookline.serving.replies.watched_parsers import WatchedReasoning, WatchedTools
from hookline.serving.requests.grammars import GrammarCompiler
from hookline.serving.requests.validate import Validator
from hookline.serving.server_config import ServerConfig
from hookline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is known when the engine is ready.

    Attributes:
        created: when it was ready, in seconds since 1970.
    """

    facts: Facts
    tokenizer: Tokenizer | None
    validator: Validator
    grammars: GrammarCompiler
    context: AnswerContext
    created: int

    @classmethod
    def build(
        cls,
        config: ServerConfig,
        facts: Facts,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> Self:
        """What serves the model of `facts`."""
        tools = None if tool_format is None else WatchedTools(tool_format, facts.plugin)
        reasoning = None if reasoning_format is None else WatchedReasoning(reasoning_format, facts.plugin)
        return cls(
            facts=facts,
            tokenizer=tokenizer,
            validator=Validator(facts, tokenizer, config, tools, reasoning),
            grammars=grammars,
            context=AnswerContext(TokenTexts(tokenizer), frozenset(facts.eos_token_ids), tools, reasoning),
            created=int(time.time()),
        )


class Front:
    """What all routes share.

    Args:
        plugins: what is installed, for `/plugins`.

    Attributes:
        served: None until the engine is ready.
        intake: of the bodies of all routes.
        calls: that are at work.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: AsyncEngine,
        lifecycle: Lifecycle,
        metrics: Metrics,
        plugins: tuple[Plugin, ...] = (),
    ) -> None:
        self.config = config
        self.engine = engine
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.plugins = plugins
        self.served: ServedModel | None = None
        self.intake = Intake(config.limits)
        self.calls = Calls(config.limits)

    def open_model(self) -> ServedModel:
        """What is served, for a call that is to run now.

        Raises:
            ApiError: 503 while the model loads, while the server shuts down, and when the engine has died.
        """
        if self.lifecycle.draining:
            raise shutting_down()
        if self.lifecycle.state == "dead" or (self.served is not None and not self.engine.is_alive):
            raise engine_gone()
        return self.known_model()

    def known_model(self) -> ServedModel:
        """What is served, for a call that needs no engine.

        Raises:
            ApiError: 503 while the model loads.
        """
        if self.served is None:
            raise ApiError(503, "The model is loading.", code="loading", retry_after=RETRY_SECONDS)
        return self.served
