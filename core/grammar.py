"""What an answer must look like: the constraint of structured output, before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the text of an answer.

    Attributes:
        kind: `json_object` is any JSON object; `choice` one text of a list; `ebnf` a grammar in xgrammar's GBNF-like
            notation with the rule `root`; `structural_tag` xgrammar's JSON description of text with tagged parts.
        source: the schema, list or description as JSON text, the pattern, or the grammar; "" for `json_object`.
    """

    kind: GrammarKind
    source: str = ""
