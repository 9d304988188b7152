"""Reference shapes come from the plugins' records; the core knows none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hookline.benchmark.shapes import find_shape, read_config_file, reference_shapes
from hookline.config import PluginOptions
from hookline.errors import CheckpointError, ModelNotFoundError, UsageError
from hookline.plugins import PluginRegistry
from tests.plugin_fixtures import install_plugin, plugin_site

site = pytest.fixture(plugin_site, name="site")

OTHER = """
from hookline.hookspecs import Architecture, hookimpl

@hookimpl
def hookline_architectures():
    return (Architecture(name="ToyForCausalLM", reference_shapes={SHAPES}),)
"""


def test_shapes_are_those_of_the_records() -> None:
    record = PluginRegistry().load("LlamaForCausalLM").record
    found = reference_shapes(PluginOptions())
    assert set(record.reference_shapes) <= set(found)
    assert list(found) == sorted(found)
    assert find_shape("llama-8b", PluginOptions())["hidden_size"] == 4096


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        find_shape("llama-8", PluginOptions())
    assert "'llama-8'" in caught.value.message
    assert "llama-70b, llama-8b" in caught.value.hint
    assert "Did you mean llama-8b" in caught.value.hint


def test_without_plugins_there_are_no_shapes() -> None:
    with pytest.raises(UsageError, match="no plugin") as caught:
        find_shape("llama-8b", PluginOptions(enabled=False))
    assert "none" in caught.value.hint


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "any name.json"
    path.write_text(json.dumps({"architectures": ["X"]}))
    assert read_config_file(path) == {"architectures": ["X"]}
    path.write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        read_config_file(path)
    with pytest.raises(ModelNotFoundError, match="does not exist") as caught:
        read_config_file(tmp_path / "none.json")
    assert "--config" in caught.value.hint
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_config_file(tmp_path)


def test_a_third_party_brings_its_own_shapes(site: Path) -> None:
    install_plugin(site, "hookline-toy", OTHER.replace("SHAPES", "'toy-1b': {'hidden_size': 8}"), ["ToyForCausalLM"])
    assert find_shape("toy-1b", PluginOptions()) == {"hidden_size": 8}
    assert "toy-1b" not in reference_shapes(PluginOptions(disabled=frozenset({"toy"})))


def test_a_broken_plugin_does_not_hide_the_others(site: Path) -> None:
    install_plugin(site, "hookline-toy", "import nothing_of_this_name", ["ToyForCausalLM"])
    assert "llama-8b" in reference_shapes(PluginOptions())


def test_one_name_for_two_shapes_is_an_error(site: Path) -> None:
    install_plugin(site, "hookline-toy", OTHER.replace("SHAPES", "'llama-8b': {'hidden_size': 8}"), ["ToyForCausalLM"])
    with pytest.raises(UsageError, match="hookline-toy"):
        reference_shapes(PluginOptions())
