"""Importing one plugin: faults at import, unsound hooks and records, and the typed answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.config import EngineConfig
from hookline.errors import ModelConfigError, PluginError, UsageError
from hookline.parallel import Parallel
from hookline.plugins import PluginRegistry
from hookline.weight_adapter import WeightAdapter
from tests.plugin_fixtures import arch_source, install_plugin, load_failure, plugin_site, row

site = pytest.fixture(plugin_site, name="site")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\nraise RuntimeError('no\\n  luck')", "RuntimeError: no luck ({file}, line 2)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 ({file}, line 2)"),
        ("def broken(:\n    pass", "SyntaxError: invalid syntax ({file}, line 1)"),
        (
            "import no_such_module_at_all",
            "ModuleNotFoundError: No module named 'no_such_module_at_all' ({file}, line 1)",
        ),
        ("class Base(BaseException): pass\nraise ExceptionGroup('two', [ValueError('v')])", "ExceptionGroup: two"),
    ],
    ids=["raises", "exits", "syntax", "missing import", "group"],
)
def test_fault_at_import_is_the_plugins_own(site: Path, source: str, expected: str) -> None:
    install_plugin(site, "hookline-demo", source, ["DemoForCausalLM"])
    install_plugin(site, "hookline-rival", arch_source("RivalForCausalLM"), ["RivalForCausalLM"])
    assert row(PluginRegistry(), "demo").state == "ok"  # metadata alone cannot know
    error = load_failure("DemoForCausalLM")
    assert isinstance(error, PluginError)
    assert error.exit_code == 5
    message = expected.format(file=site / "hookline_demo" / "arch.py")
    assert f"hookline-demo 1.0 cannot be imported: {message}" in error.message
    assert "-p no:demo" in error.hint
    checked = {plugin.id: plugin for plugin in PluginRegistry().check()}
    assert checked["demo"].state == "broken"
    assert message in checked["demo"].reason
    assert checked["rival"].state == "ok"
    assert PluginRegistry().load("RivalForCausalLM").record.name == "RivalForCausalLM"


def test_what_a_plugin_prints_at_import_is_no_result(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin(site, "hookline-demo", "print('hello')\n" + arch_source("DemoForCausalLM"), ["DemoForCausalLM"])
    PluginRegistry().load("DemoForCausalLM")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "hello\n")


def test_missing_module_is_named(site: Path) -> None:
    install_plugin(site, "hookline-demo", "", "[hookline.architectures]\nD = hookline_demo.nowhere\n")
    assert "No module named 'hookline_demo.nowhere'" in load_failure("D").message


def test_interrupt_at_import_passes(site: Path) -> None:
    install_plugin(site, "hookline-demo", "raise KeyboardInterrupt", ["D"])
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry().load("D")


FACADE = """
from dataclasses import dataclass
from hookline.errors import ModelConfigError

@hookimpl
def hookline_read_config(hf_config):
    from hookline.model import ModelConfig
    if hf_config.get("bad"):
        raise ModelConfigError("bad is set")
    if "answer" in hf_config:
        return hf_config["answer"]
    sizes = {name: hf_config[name] for name in ("num_layers", "hidden_size", "vocab_size")}
    return ModelConfig(architecture="D", max_position_embeddings=8, **sizes)
"""


def test_answers_are_typed_checked_and_blamed_on_the_plugin(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D", more=FACADE), ["D"])
    loaded = PluginRegistry().load("D")
    config = loaded.read_config({"num_layers": 1, "hidden_size": 2, "vocab_size": 3})
    assert config.vocab_size == 3
    assert type(loaded.weight_adapter(config, "safetensors")).__name__ == "WeightAdapter"
    with pytest.raises(ModelConfigError, match="bad is set"):
        loaded.read_config({"bad": True})
    with pytest.raises(
        PluginError, match=r"hookline_read_config of hookline-demo 1.0 failed: KeyError: 'num_layers' \("
    ) as e:
        loaded.read_config({})
    assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(PluginError, match=r"hookline-demo 1\.0 does not answer hookline_read_config"):
        loaded.read_config({"answer": None})
    with pytest.raises(PluginError, match="answered with a dict, expected a ModelConfig"):
        loaded.read_config({"answer": {}})
    with pytest.raises(PluginError, match="does not answer hookline_build_model") as e:
        loaded.build_model(config, EngineConfig(model="x"), Parallel())
    assert "function hookline_build_model" in e.value.hint


def test_each_load_has_a_manager_of_its_own(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    registry = PluginRegistry()
    assert registry.load("D")._manager is not registry.load("D")._manager


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (
            arch_source("D", more="@hookimpl\ndef hookline_build_modle(config): ..."),
            "did you mean hookline_build_model by hookline_build_modle?",
            "hookline.hookspecs",
        ),
        (
            arch_source("D", more="@hookimpl\ndef hookline_build_model(config, device): ..."),
            "Argument(s) {'device'}",
            "a hook may take fewer, never others",
        ),
        (
            arch_source("D", more="def hookline_read_config(hf_config): ..."),
            "not marked as such: hookline_read_config",
            "hookimpl",
        ),
        (arch_source("D", "Extra"), "only in its records: Extra; only in its entry points: none", "install the plugin"),
        (arch_source("Other"), "only in its records: Other; only in its entry points: D", "entry points"),
        (arch_source("D/demo"), "only in its records: gguf.demo", "gguf.NAME"),
        (arch_source("D", "D"), "hookline_architectures of hookline-demo 1.0 answered", "a name of its own"),
        (arch_source("D").replace("Architecture(", "dict("), "answered ({'name'", "tuple of hookline.hookspecs"),
        (arch_source("D").replace("return (", "return list, ("), "answered (<class", "tuple of hookline.hookspecs"),
        (arch_source("D").replace("return (", "return [0] or ("), "answered with a list, expected a tuple", "author"),
        ("from hookline.hookspecs import hookimpl", "does not answer hookline_architectures", "function"),
        (arch_source("D").replace("return (", "return 1 / 0, ("), "ZeroDivisionError: division by zero", "author"),
    ],
    ids=[
        "misspelt",
        "argument",
        "unmarked",
        "more",
        "other",
        "gguf",
        "twice",
        "no record",
        "class",
        "list",
        "none",
        "raises",
    ],
)
def test_unsound_hooks(site: Path, source: str, message: str, hint: str) -> None:
    install_plugin(site, "hookline-demo", source, ["D"])
    error = load_failure("D")
    assert error.exit_code == 5
    assert "hookline-demo 1.0" in error.message
    assert message in error.message
    assert hint in error.hint
    assert next(plugin for plugin in PluginRegistry().check() if plugin.id == "demo").state == "broken"


def test_optional_hook_of_a_later_engine_is_let_pass(site: Path) -> None:
    more = "@hookimpl(optionalhook=True)\ndef hookline_of_tomorrow(): ..."
    install_plugin(site, "hookline-demo", arch_source("D", more=more), ["D"])
    assert PluginRegistry().load("D").record.name == "D"


def test_fault_of_a_core_default_is_not_blamed_on_the_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(site, "hookline-demo", arch_source("D", more=FACADE), ["D"])
    loaded = PluginRegistry().load("D")
    config = loaded.read_config({"num_layers": 1, "hidden_size": 2, "vocab_size": 3})

    class Faulty(WeightAdapter):
        def __init__(self) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr("hookline.weight_adapter.WeightAdapter", Faulty)
    with pytest.raises(ZeroDivisionError):
        loaded.weight_adapter(config, "safetensors")


FORMATS = """
class Format:
    markers = ()
    end = ""
    def parser(self, argument): ...
    def constraint(self, tools, name, parallel): ...
    def starts_inside(self, prompt_token_ids, find_token): ...

@hookimpl
def hookline_tool_parser(name):
    return {"own": Format(), "odd": 5, "hermes": None}.get(name)

@hookimpl
def hookline_reasoning_parser(name):
    return {"own": Format()}[name]
"""


def test_formats_are_the_plugins_or_the_cores(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D", more=FORMATS), ["D"])
    loaded = PluginRegistry().load("D")
    assert type(loaded.tool_format("own")).__name__ == type(loaded.reasoning_format("own")).__name__ == "Format"
    assert type(loaded.tool_format("hermes")).__name__ == "HermesFormat"
    assert loaded.tool_format("") is None
    assert loaded.reasoning_format("") is None
    with pytest.raises(PluginError, match=r"hookline_tool_parser of hookline-demo 1\.0 answered with a int"):
        loaded.tool_format("odd")
    with pytest.raises(PluginError, match=r"hookline_reasoning_parser of hookline-demo 1\.0 failed: KeyError"):
        loaded.reasoning_format("think")
    with pytest.raises(UsageError, match=r"hookline-demo 1\.0 has no tool parser called 'other'") as e:
        loaded.tool_format("other")
    assert e.value.hint == "Known for D: hermes."


def test_a_record_names_a_format_that_its_plugin_must_have(site: Path) -> None:
    source = arch_source("D").replace("name='D'", "name='D', tool_parser='lost', reasoning_parser='think'")
    install_plugin(site, "hookline-demo", source, ["D"])
    loaded = PluginRegistry().load("D")
    assert type(loaded.reasoning_format("think")).__name__ == "ThinkFormat"
    with pytest.raises(PluginError, match="does not answer hookline_tool_parser for D"):
        loaded.tool_format("lost")
    with pytest.raises(UsageError) as e:
        loaded.tool_format("other")
    assert e.value.hint == "Known for D: hermes, lost."
