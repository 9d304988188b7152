"""What all routes share: the options, the engine, what it serves once it is ready, and the calls at work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from hookline.parsers.contract import ReasoningFormat, ToolFormat
from hookline.plugins import Plugin
from hookline.serving.api_errors import ApiError
from hookline.serving.async_engine import AsyncEngine
from hookline.serving.calls import Calls, engine_gone, shutting_down
from hookline.serving.choice import AnswerContext
from hookline.serving.grammars import GrammarCompiler
from hookline.serving.lifecycle import Lifecycle
from hookline.serving.messages import Facts
from hookline.serving.metrics import Metrics
from hookline.serving.server_config import ServerConfig
from hookline.serving.token_texts import TokenTexts
from hookline.serving.validate import Validator
from hookline.tokenizer import Tokenizer

_RETRY_SECONDS = 5


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
        return cls(
            facts=facts,
            tokenizer=tokenizer,
            validator=Validator(facts, tokenizer, config, tool_format, reasoning_format),
            grammars=grammars,
            context=AnswerContext(TokenTexts(tokenizer), frozenset(facts.eos_token_ids), tool_format, reasoning_format),
            created=int(time.time()),
        )


class Front:
    """What all routes share.

    Args:
        plugins: what is installed, for `/plugins`.

    Attributes:
        served: None until the engine is ready.
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
            raise ApiError(503, "The model is loading.", code="loading", retry_after=_RETRY_SECONDS)
        return self.served
