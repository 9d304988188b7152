"""What forces an answer to be calls of tools: the frame of such a grammar, which each format fills with its tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.grammar import GrammarSpec

_NO_PARAMETERS = {"type": "object", "properties": {}}


def allowed_functions(
    tools: Sequence[Mapping[str, Any]], name: str | None
) -> list[tuple[str, Mapping[str, Any] | bool]]:
    """Name and parameters' schema of each tool that may be called: of all, or of the one named.

    Args:
        tools: OpenAI's `tools`. A function without `parameters` takes none.
    """
    functions = [tool["function"] for tool in tools]
    allowed = [function for function in functions if name is None or function["name"] == name]
    schemas = [function.get("parameters") for function in allowed]
    return [
        (function["name"], _NO_PARAMETERS if schema is None else schema)
        for function, schema in zip(allowed, schemas, strict=True)
    ]


def calls_grammar(tags: Sequence[Mapping[str, Any]], separator: str, several: bool) -> GrammarSpec | None:
    """One of `tags`, or, with `several`, one or more of them, and nothing else; None without any tag.

    Args:
        tags: xgrammar's tags of a structural tag: `begin`, `content`, `end`.
        separator: stands between two calls.
    """
    if not tags:
        return None
    layout = {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", **tag} for tag in tags],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": layout}))
