"""What docs/serving.md lists is what there is: routes, limits with their defaults, bounds of fields, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from starlette.routing import BaseRoute, Route

from hookline import sampling_params
from hookline.serving.guards import OPEN_PATHS
from hookline.serving.limits import Limits
from hookline.serving.metrics import Metrics
from hookline.serving.requests.bodies import Body
from hookline.serving.requests.schema import ChatBody, CompletionsBody
from tests.serving.fakes import Rig, make_facts
from tests.source_tree import ROOT

# Of the bodies: what is OpenAI's own, so that the list of what is beyond it leaves it out.
OPENAI = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed"),
    *("stop", "echo", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "stream"),
    *("stream_options", "response_format", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "user"),
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "verbosity",
}
# vLLM's older names of `structured_outputs`, which the document speaks of together, and what is only taken.
OTHER_NAMES = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "priority"}


def section(title: str) -> str:
    """The text under a heading."""
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/serving.md has no heading {title!r}"
    return found[1]


def tables(title: str) -> Iterator[list[str]]:
    """The cells of every row of a section's tables."""
    for line in section(title).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[| -]+", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def leaves(routes: Any) -> Iterator[BaseRoute]:
    """All routes, those of routers within included."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from leaves(inner.routes) if inner is not None else (route,)


def routes_of_the_app() -> set[str]:
    """Every route as the document writes it."""
    app: Any = Rig().app
    while not hasattr(app, "routes"):
        app = app._app
    return {
        f"{method} {route.path.replace('{model_id:path}', '{id}')}"
        for route in leaves(app.routes)
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


def listed_limits() -> Mapping[str, float]:
    rows = [(names(row[0]), row[1].split(", ")) for row in tables("Limits") if len(row) == 3 and names(row[0])]
    return {name: float(value) for known, values in rows for name, value in zip(known, values, strict=True)}


def test_every_route_is_listed_and_no_other() -> None:
    listed = [name for row in tables("Routes") for name in names(row[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == routes_of_the_app()
    assert {path.decode() for path in OPEN_PATHS} <= {name.partition(" ")[2] for name in listed}


def test_every_limit_has_its_default() -> None:
    assert listed_limits() == asdict(Limits())


def test_bounds_of_the_sampler_are_those_that_hold() -> None:
    rows = {row[0]: re.findall(r"\d+", row[1]) for row in tables("Limits") if len(row) == 2 and names(row[0])}
    most = {name: str(getattr(sampling_params, name)) for name in dir(sampling_params) if name.startswith("MAX_")}
    assert rows == {
        "`stop`, `bad_words`": [most["MAX_STOP_STRINGS"], most["MAX_BAD_WORDS"], most["MAX_STOP_CHARS"]],
        "`stop_token_ids`": [most["MAX_STOP_TOKENS"]],
        "`logit_bias`": [most["MAX_LOGIT_BIAS"]],
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": [most["MAX_LOGPROBS"]],
    }


@pytest.mark.parametrize("body", [ChatBody, CompletionsBody])
def test_every_field_beyond_openais_is_listed(body: type[Body]) -> None:
    listed = {name.partition(".")[0] for name in names(section("Fields beyond OpenAI's"))}
    assert set(body.model_fields) - OPENAI - OTHER_NAMES <= listed


def test_every_metric_is_listed_and_no_other() -> None:
    metrics = Metrics("p")
    metrics.set_facts(make_facts())
    text = metrics.render().decode()
    shown = {name.removeprefix("p:"): kind for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)}
    listed = dict[str, str]()
    for kind, cell in tables("Metrics"):
        for name in names(cell):
            name = name.partition("{")[0]
            ends = kind == "counters" and not name.endswith("_total")
            listed[f"{name}_total" if ends else name] = kind.removesuffix("s")
    assert listed == shown
