"""Options of speculation, each under two names, and the frozen record that they become. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from hookline.config import SPECULATIVE_METHODS, SpeculativeConfig
from hookline.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = {entry.name: entry.default for entry in dataclasses.fields(SpeculativeConfig)}
# Options that turn speculation on; the others only say more about it.
_SWITCHES = ("speculative_method", "num_speculative_tokens")


def _option(name: str, text: str, default: str = "", **settings: Any) -> Callable[[F], F]:
    option = name.replace("_", "-")
    said = f"{text}  [default: {default}]" if default else text
    return click.option(f"--{option}", f"--speculative-config.{option}", name, default=None, help=said, **settings)


_OPTIONS = (
    _option(
        "speculative_method",
        "Propose tokens and verify several in one step: mtp is the model's own draft, ngram copies what followed the "
        "same words before.",
        "mtp with --num-speculative-tokens, else none",
        type=click.Choice(SPECULATIVE_METHODS),
    ),
    _option(
        "num_speculative_tokens",
        "Tokens proposed a request and step.",
        f"{_DEFAULTS['num_speculative_tokens']} with --speculative-method, else none",
        type=int,
        metavar="COUNT",
    ),
    _option(
        "use_relaxed_acceptance_for_thinking",
        "While a sampled request thinks, accept any proposal among the likeliest tokens; the text is another then.",
        is_flag=True,
        flag_value=True,
    ),
    _option(
        "relaxed_topk",
        "How many of the likeliest those are.",
        str(_DEFAULTS["relaxed_topk"]),
        type=int,
        metavar="COUNT",
    ),
    _option(
        "relaxed_delta",
        "How much less probable than the likeliest they may be, 0 to 1.",
        str(_DEFAULTS["relaxed_delta"]),
        type=float,
    ),
    _option(
        "synthetic_acceptance_rate",
        "For benchmarks, with senseless text: accept this share of the proposals, 0 to 1, whatever they are.",
        "verify them",
        type=float,
    ),
)


def speculative_options(command: F) -> F:
    """Adds the options that `speculative_config` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def speculative_config(values: Mapping[str, Any]) -> SpeculativeConfig | None:
    """What the options of speculation among `values` say; None where they do not turn it on.

    Raises:
        UsageError: naming the option whose value is not allowed, or one that says more of what is off.
    """
    names = {"speculative_method": "method"}
    given = {name: values[name] for name in (*names, *_DEFAULTS) if values.get(name) is not None}
    if given and not any(name in given for name in _SWITCHES):
        raise UsageError(
            f"--{next(iter(given)).replace('_', '-')} is given, and nothing is proposed",
            hint="Add --num-speculative-tokens, or --speculative-method ngram.",
        )
    softened = next((name for name in given if name.startswith("relaxed_")), None)
    if softened is not None and not given.get("use_relaxed_acceptance_for_thinking"):
        raise UsageError(
            f"--{softened.replace('_', '-')} is given, and no acceptance is relaxed",
            hint="Add --use-relaxed-acceptance-for-thinking.",
        )
    return SpeculativeConfig(**{names.get(name, name): value for name, value in given.items()}) if given else None
