"""What is read from package metadata: versions, origins, damage, copies on the path."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hookline.plugins import PluginRegistry
from tests.plugin_fixtures import arch_source, install_plugin, load_failure, plugin_site, row

site = pytest.fixture(plugin_site, name="site")


def test_origin_comes_from_pips_note(site: Path) -> None:
    info = install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    for note, origin in (
        ('{"url": "file:///x", "dir_info": {"editable": true}}', "editable"),
        ('{"url": "https://example.org/x.whl"}', "url"),
    ):
        (info / "direct_url.json").write_text(note)
        assert row(PluginRegistry(), "demo").origin == origin


def test_needing_a_newer_engine_is_incompatible_and_never_imported(site: Path) -> None:
    source = "raise RuntimeError('not to be imported')"
    install_plugin(site, "hookline-demo", source, ["DemoForCausalLM"], requires=["torch", "hookline>=99,<100"])
    registry = PluginRegistry()
    plugin = row(registry, "demo")
    assert plugin.state == "incompatible"
    assert "needs hookline<100,>=99, and hookline 0" in plugin.reason
    assert plugin in registry.check()
    error = load_failure("DemoForCausalLM")
    assert error.exit_code == 5
    assert plugin.reason in error.message
    assert "pip install --upgrade hookline hookline-demo" in error.hint


@pytest.mark.parametrize(
    ("engine", "requirement", "state"),
    [
        ("0.2.0.dev3", "hookline>=0.1", "ok"),
        ("0.2.0rc1", "hookline>=0.1,<0.3", "ok"),
        ("0.2.0", "hookline<0.2", "incompatible"),
        ("0.2.0", 'hookline>=9; extra == "test"', "ok"),
        ("0.2.0", 'hookline>=9; python_version < "3"', "ok"),
        ("0.2.0", "Hook.Line>=9", "ok"),
        ("0.2.0", "HookLine>=9", "incompatible"),
        (None, "hookline>=9", "ok"),
    ],
)
def test_requirement_against_version(
    site: Path, monkeypatch: pytest.MonkeyPatch, engine: str | None, requirement: str, state: str
) -> None:
    monkeypatch.setattr("hookline.plugin_metadata.engine_version", lambda: engine)
    install_plugin(site, "hookline-demo", arch_source("D"), ["D"], requires=[requirement])
    assert row(PluginRegistry(), "demo").state == state


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("entry_points.txt", b"[hookline.architectures]\nno equals sign\n", "no equals sign"),
        ("entry_points.txt", b"[hookline.architectures]\nD = not a module!\n", "expected an architecture's name and"),
        ("entry_points.txt", b"[hookline.architectures]\nD = a\nD = b\n", "already exists"),
        ("entry_points.txt", b"[hookline.architectures]\ngguf. = a.b\n", "entry point 'gguf.'"),
        ("entry_points.txt", b"[hookline.architectures\n", "[hookline.architectures"),
        ("entry_points.txt", b"[hookline.architectures]\nD = \xff\xfe\n", "utf-8"),
        ("METADATA", b"Name: hookline-demo\nVersion: 1.0\nRequires-Dist: hookline >>> 1\n", "hookline >>> 1"),
        ("direct_url.json", b"{", "Expecting property name"),
    ],
)
def test_damaged_metadata_stays_the_plugins_own(site: Path, file: str, content: bytes, reason: str) -> None:
    info = install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    install_plugin(site, "hookline-rival", arch_source("E"), ["E"])
    (info / file).write_bytes(content)
    registry = PluginRegistry()
    plugin = row(registry, "demo")
    assert plugin.state == "broken"
    assert plugin.reason.startswith("metadata is damaged: ")
    assert reason in plugin.reason
    assert registry.load("E").record.name == "E"
    assert load_failure("D").exit_code in (4, 5)


@pytest.mark.parametrize("content", [None, b"Version: 1.0\n", b"Name: \xff\n"])
def test_distribution_without_a_name(site: Path, content: bytes | None) -> None:
    info = install_plugin(site, "hookline-demo", arch_source("D"), ["D"])
    (info / "METADATA").unlink()
    if content is not None:
        (info / "METADATA").write_bytes(content)
    plugin = row(PluginRegistry(), "unnamed")
    assert plugin.state == "broken"
    assert str(site) in plugin.reason


def test_copy_further_down_the_path_does_not_count(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(site / "old", "hookline-demo", arch_source("D"), ["D", "Old"], version="0.9")
    info = install_plugin(site / "new", "hookline-demo", arch_source("D"), ["D"])
    monkeypatch.syspath_prepend(str(site / "old"))
    monkeypatch.syspath_prepend(str(site / "new"))
    assert [(p.version, p.state) for p in PluginRegistry().plugins if p.id == "demo"] == [("1.0", "ok")]
    (info / "entry_points.txt").write_text("[console_scripts]\n")
    importlib.invalidate_caches()
    assert not [plugin for plugin in PluginRegistry().plugins if plugin.id == "demo"]
