"""The registry: which of the installed plugins serves an architecture, under every option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hookline.config import PluginOptions
from hookline.errors import NoPluginError, UsageError
from hookline.plugins import PluginRegistry, PluginState
from tests.plugin_fixtures import (
    arch_source,
    build_wheel,
    install_plugin,
    install_wheel,
    load_failure,
    plugin_site,
    row,
)

site = pytest.fixture(plugin_site, name="site")


def test_good_plugin_is_found_without_import_and_loaded(site: Path) -> None:
    install_plugin(
        site, "hookline-demo", arch_source("DemoForCausalLM/demo", "Demo2"), ["DemoForCausalLM", "Demo2", "gguf.demo"]
    )
    registry = PluginRegistry()
    plugin = row(registry, "demo")
    assert (plugin.state, plugin.reason, plugin.version, plugin.origin) == ("ok", "", "1.0", "index")
    assert [claim.architecture for claim in plugin.claims] == ["Demo2", "DemoForCausalLM", "gguf.demo"]
    assert registry.find("Demo2").title == "hookline-demo 1.0"
    assert "hookline_demo.arch" not in sys.modules
    assert registry.load("Demo2").record.name == "Demo2"
    assert registry.load("gguf.demo").record.name == "DemoForCausalLM"


def test_load_imports_only_the_plugin_that_is_asked(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("DemoForCausalLM"), ["DemoForCausalLM"])
    install_plugin(site, "hookline-rival", "raise RuntimeError('not to be imported')", ["RivalForCausalLM"])
    assert PluginRegistry().load("DemoForCausalLM").record.name == "DemoForCausalLM"
    assert "hookline_rival.arch" not in sys.modules


def test_a_wheel_that_pip_installs_is_found(site: Path) -> None:
    wheel = build_wheel(
        site / "wheels",
        "hookline-demo",
        "1.0",
        {"hookline_demo.py": arch_source("DemoForCausalLM")},
        {"DemoForCausalLM": "hookline_demo"},
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=60)
    registry = PluginRegistry()
    assert row(registry, "demo").origin == "local"
    assert registry.load("DemoForCausalLM").claim.module == "hookline_demo"


def install_rivals(site: Path) -> None:
    for name in ("hookline-demo", "hookline-rival"):
        install_plugin(site, name, arch_source("DemoForCausalLM"), ["DemoForCausalLM"])


def test_two_claims_of_one_architecture_are_an_error_that_names_both(site: Path) -> None:
    install_rivals(site)
    registry = PluginRegistry()
    for plugin_id, other in (("demo", "rival"), ("rival", "demo")):
        plugin = row(registry, plugin_id)
        assert plugin.state == "conflict"
        assert f"hookline-{other} 1.0" in plugin.reason
        assert f"--plugin DemoForCausalLM=hookline-{plugin_id}" in plugin.reason
    error = load_failure("DemoForCausalLM")
    assert error.exit_code == 5
    assert "hookline-demo 1.0, hookline-rival 1.0" in error.message
    assert "--plugin DemoForCausalLM=hookline-demo or --plugin DemoForCausalLM=hookline-rival" in error.hint
    assert not [name for name in sys.modules if name.startswith(("hookline_demo", "hookline_rival"))]


@pytest.mark.parametrize("name", ["hookline-rival", "rival", "Hookline_Rival"])
def test_conflict_is_resolved_by_preference(site: Path, name: str) -> None:
    install_rivals(site)
    registry = PluginRegistry(PluginOptions(prefer={"DemoForCausalLM": name}))
    assert registry.load("DemoForCausalLM").claim.distribution == "hookline-rival"
    assert row(registry, "rival").state == "ok"
    assert row(registry, "demo").state == "disabled"
    assert "--plugin DemoForCausalLM=hookline-rival" in row(registry, "demo").reason


@pytest.mark.parametrize("name", ["hookline-demo", "demo"])
def test_conflict_is_resolved_by_leaving_one_out(site: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install_rivals(site)
    registry = PluginRegistry(PluginOptions(disabled=frozenset([name])))
    assert registry.find("DemoForCausalLM").distribution == "hookline-rival"
    assert row(registry, "demo").reason == f"-p no:{name} leaves it out"
    monkeypatch.setenv("HOOKLINE_DISABLE_PLUGINS", f" {name} ,")
    registry = PluginRegistry()
    assert registry.find("DemoForCausalLM").distribution == "hookline-rival"
    assert row(registry, "demo").reason == f"HOOKLINE_DISABLE_PLUGINS={name} leaves it out"


def test_one_entry_point_name_of_two_distributions_is_a_conflict_of_that_name_alone(site: Path) -> None:
    for name, architecture in (("hookline-demo", "DemoForCausalLM"), ("hookline-rival", "RivalForCausalLM")):
        install_plugin(site, name, arch_source(f"{architecture}/demo"), [architecture, "gguf.demo"])
    registry = PluginRegistry()
    assert row(registry, "demo").state == row(registry, "rival").state == "conflict"
    assert registry.load("DemoForCausalLM").claim.distribution == "hookline-demo"
    assert "--plugin gguf.demo=hookline-rival" in load_failure("gguf.demo").hint
    chosen = PluginRegistry(PluginOptions(prefer={"gguf.demo": "rival"}))
    assert chosen.load("gguf.demo").record.name == "RivalForCausalLM"
    assert chosen.load("DemoForCausalLM").record.name == "DemoForCausalLM"
    assert [row(chosen, name).state for name in ("demo", "rival")] == ["ok", "ok"]


def test_preferring_a_plugin_that_is_left_out_does_not_silently_take_the_other(site: Path) -> None:
    install_rivals(site)
    options = PluginOptions(disabled=frozenset(["demo"]), prefer={"DemoForCausalLM": "demo"})
    error = load_failure("DemoForCausalLM", options)
    assert "-p no:demo" in error.message
    assert error.exit_code == 5


def test_an_incompatible_plugin_is_no_rival(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D"), ["D"], requires=["hookline>=99"])
    install_plugin(site, "hookline-rival", arch_source("D"), ["D"])
    assert PluginRegistry().find("D").distribution == "hookline-rival"


def test_no_plugins_leaves_all_out(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    options = PluginOptions(enabled=False)
    assert {plugin.state for plugin in PluginRegistry(options).plugins} == {PluginState.DISABLED}
    error = load_failure("D", options)
    assert error.exit_code == 5
    assert "--no-plugins" in error.message


def test_distributions_that_would_share_an_id_go_by_their_whole_names(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    install_plugin(site, "demo", arch_source("E"), ["E"])
    registry = PluginRegistry(PluginOptions(disabled=frozenset(["demo"])))
    assert row(registry, "demo").state == "disabled"
    assert row(registry, "hookline-demo").state == "ok"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (PluginOptions(disabled=frozenset(["dmo"])), "-p no:dmo: no plugin 'dmo' is installed", "Did you mean demo"),
        (PluginOptions(disabled=frozenset(["pluggy"])), "pluggy is installed, but has no entry point", "demo"),
        (PluginOptions(prefer={"DemoForCausal": "demo"}), "no installed plugin claims", "Did you mean DemoForCausalLM"),
        (PluginOptions(prefer={"DemoForCausalLM": "damo"}), "no plugin 'damo'", "Did you mean demo"),
        (PluginOptions(prefer={"DemoForCausalLM": "rival"}), "hookline-rival does not claim", "hookline-demo"),
    ],
)
def test_unknown_name_in_the_options(site: Path, options: PluginOptions, message: str, hint: str) -> None:
    install_plugin(site, "hookline-demo", arch_source("DemoForCausalLM"), ["DemoForCausalLM"])
    install_plugin(site, "hookline-rival", arch_source("RivalForCausalLM"), ["RivalForCausalLM"])
    with pytest.raises(UsageError) as caught:
        PluginRegistry(options)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_unknown_name_in_the_environment(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_DISABLE_PLUGINS", "nobody")
    with pytest.raises(UsageError, match="HOOKLINE_DISABLE_PLUGINS=nobody: no plugin 'nobody' is installed"):
        PluginRegistry()


def test_unknown_architecture(site: Path) -> None:
    install_plugin(site, "hookline-demo", arch_source("DemoForCausalLM/demo"), ["DemoForCausalLM", "gguf.demo"])
    error = load_failure("DemoForCausalML")
    assert isinstance(error, NoPluginError)
    assert error.exit_code == 4
    assert "'DemoForCausalML'" in error.message
    assert "DemoForCausalLM" in error.message
    assert "gguf.demo" not in error.message
    assert "Did you mean DemoForCausalLM?" in error.hint
    assert "pip install hookline-<family>" in error.hint
    assert "hookline.architectures: 'DemoForCausalML'" in error.hint
    assert "gguf.demo" in load_failure("gguf.dema").hint
    assert "\x1b" not in str(load_failure("\x1b[31m" + "x" * 10_000))
    assert len(str(load_failure("x" * 10_000))) < 1_000


def test_claims_are_in_a_fixed_order(site: Path) -> None:
    for name in ("hookline-rival", "hookline-demo"):
        install_wheel(build_wheel(site / "w", name, "1.0", {}, {"b": "x.y", "A": "x.y", "gguf.z": "x.y"}), site)
    ours = [(c.architecture, c.distribution) for c in PluginRegistry().claims if c.module == "x.y"]
    names = ["hookline-demo", "hookline-rival"]
    assert ours == [(architecture, name) for architecture in ("A", "b", "gguf.z") for name in names]
