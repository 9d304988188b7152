"""Parsers from plugins: the guide's example works, and those of our own plugins need no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.plugins import PluginRegistry
from tests.parsers.reading import random_cuts, read_calls
from tests.plugin_fixtures import arch_source, install_plugin, plugin_site
from tests.source_tree import ROOT

site = pytest.fixture(plugin_site, name="site")


def test_the_guides_parser_works(site: Path) -> None:
    guide = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S) if "BracketFormat" in block]
    install_plugin(site, "hookline-demo", arch_source("D", more=code), ["D"])
    style = PluginRegistry().load("D").tool_format("brackets")
    assert style is not None
    for pieces in random_cuts('So: [[f {"x": [1]}]] and [[g]]. [', seed=3):
        assert read_calls(style.parser([]), pieces) == ("So:  and . [", [("f", '{"x": [1]}'), ("g", "{}")])
    assert read_calls(style.parser([]), ["a [[f {"]) == ("a [[f {", [])
    spec = style.constraint([{"function": {"name": "f"}}], None, True)
    assert spec is not None
    assert "[[f " in spec.source


def test_loading_parsers_needs_no_torch() -> None:
    program = """if True:
        import sys
        from hookline.plugins import PluginRegistry
        registry = PluginRegistry()
        for claim in registry.claims:
            loaded = registry.load(claim.architecture)
            loaded.tool_format(loaded.record.tool_parser or "hermes")
            loaded.reasoning_format(loaded.record.reasoning_parser or "think")
        print(len(registry.claims), sorted({"torch", "transformers", "xgrammar"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, _, heavy = done.stdout.partition(" ")
    assert int(count) >= 8
    assert heavy.strip() == "[]"
