"""What is installed, read from package metadata alone: no plugin is imported, so no plugin can do harm here."""

from __future__ import annotations

import configparser
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hookline.hookspecs import ENTRY_POINT_GROUP, PROJECT

GGUF_PREFIX = "gguf."
_ID_PREFIX = f"{PROJECT}-"
_UNNAMED = "unnamed"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class PluginState(StrEnum):
    """What became of a plugin or of one of its claims."""

    OK = "ok"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Claim:
    """One architecture that one plugin says it serves: an entry point, and what became of it.

    Attributes:
        architecture: the entry point's name: as in `config.json`, or `gguf.` and GGUF's own name.
        module: the entry point's value, the plugin's `arch` module.
        plugin, distribution, version: the plugin's id, and what pip calls it.
        state: anything but `ok` means that the claim cannot be used.
        reason: why, where the state is not `ok`.
    """

    architecture: str
    module: str
    plugin: str
    distribution: str
    version: str
    state: PluginState = PluginState.OK
    reason: str = ""

    @property
    def title(self) -> str:
        """How messages name the plugin, such as `hookline-demo 1.0`."""
        return f"{self.distribution} {self.version}"

    @property
    def is_gguf(self) -> bool:
        """Whether the claim only routes GGUF files."""
        return self.architecture.startswith(GGUF_PREFIX)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed plugin.

    Attributes:
        id: the distribution's name without `hookline-`; the whole name where two would share an id.
        distribution, version: what pip calls it.
        origin: where it was installed from: `editable`, `local`, `url`, or `index` where pip noted nothing.
        state, reason: what became of it, and why where that is not `ok`.
        claims: its entry points, by name.
    """

    id: str
    distribution: str
    version: str
    origin: str
    state: PluginState = PluginState.OK
    reason: str = ""
    claims: tuple[Claim, ...] = ()

    def marked(self, state: PluginState, reason: str) -> Plugin:
        """The plugin with all of its claims in `state`."""
        claims = tuple(dataclasses.replace(claim, state=state, reason=reason) for claim in self.claims)
        return dataclasses.replace(self, state=state, reason=reason, claims=claims)

    def to_dict(self) -> dict[str, object]:
        """As JSON takes it."""
        return {
            "id": self.id,
            "distribution": self.distribution,
            "version": self.version,
            "origin": self.origin,
            "state": self.state,
            "reason": self.reason,
            "architectures": [claim.architecture for claim in self.claims if not claim.is_gguf],
            "gguf": [claim.architecture for claim in self.claims if claim.is_gguf],
        }


def engine_version() -> str | None:
    """Our own version, or None where the engine runs from files that were never installed."""
    try:
        return metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        return None


def installed_plugins() -> tuple[Plugin, ...]:
    """Every installed plugin, ordered by id and name; its state is `ok`, `incompatible` or `broken`."""
    distributions: list[tuple[str, metadata.Distribution]] = []
    seen: set[str] = set()
    for candidate in metadata.distributions():
        if not _is_plugin(candidate):
            continue
        name = _name(candidate)
        distribution = _first_on_path(name, candidate)
        if name not in seen and _is_plugin(distribution):
            distributions.append((name, distribution))
        if name != _UNNAMED:
            seen.add(name)
    ids = Counter(name.removeprefix(_ID_PREFIX) for name, _ in distributions)
    plugins = []
    for name, distribution in distributions:
        short = name.removeprefix(_ID_PREFIX)
        plugins.append(_read(distribution, name, short if ids[short] == 1 else name))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.id, plugin.distribution)))


def _is_plugin(distribution: metadata.Distribution) -> bool:
    try:
        return ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or "")
    except (OSError, UnicodeDecodeError):
        return _name(distribution).startswith(_ID_PREFIX)


def _name(distribution: metadata.Distribution) -> str:
    # What a damaged METADATA raises depends on the damage and on Python's version.
    try:
        return canonicalize_name(distribution.metadata["Name"])
    except Exception:
        return _UNNAMED


def _first_on_path(name: str, candidate: metadata.Distribution) -> metadata.Distribution:
    """The distribution that Python would import: an older copy further down `sys.path` does not count."""
    try:
        return candidate if name == _UNNAMED else metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return candidate


def _read(distribution: metadata.Distribution, name: str, plugin_id: str) -> Plugin:
    # One distribution's damage, whatever it is, must stay its own.
    plugin = Plugin(plugin_id, name, "unknown", "unknown")
    try:
        if name == _UNNAMED:
            raise ValueError(f"a plugin under {distribution.locate_file('')} has no readable METADATA; reinstall it")
        plugin = dataclasses.replace(plugin, version=distribution.version or "unknown", origin=_origin(distribution))
        entries = _entries(distribution, name)
        claims = [Claim(entry, entries[entry], plugin_id, name, plugin.version) for entry in sorted(entries)]
        plugin = dataclasses.replace(plugin, claims=tuple(claims))
        _check_entries(entries)
        reason = _incompatibility(distribution)
    except Exception as error:
        return plugin.marked(PluginState.BROKEN, " ".join(f"metadata is damaged: {error}".split()))
    return plugin.marked(PluginState.INCOMPATIBLE, reason) if reason else plugin


class _EntryPointFile(configparser.ConfigParser):
    """`entry_points.txt`: an INI file whose keys keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _entries(distribution: metadata.Distribution, name: str) -> Mapping[str, str]:
    # Not `distribution.entry_points`: one malformed line makes that fail without saying which.
    parser = _EntryPointFile(delimiters=("=",), interpolation=None)
    parser.read_string(distribution.read_text("entry_points.txt") or "", source=f"entry_points.txt of {name}")
    if ENTRY_POINT_GROUP not in parser:
        raise ValueError(f"entry_points.txt has no section [{ENTRY_POINT_GROUP}]")
    return dict(parser[ENTRY_POINT_GROUP])


def _check_entries(entries: Mapping[str, str]) -> None:
    for architecture, module in entries.items():
        if architecture == GGUF_PREFIX or not _MODULE.fullmatch(module):
            raise ValueError(
                f"entry point {architecture!r} = {module!r}; expected an architecture's name and a module such as "
                "hookline_demo.arch"
            )


def _incompatibility(distribution: metadata.Distribution) -> str:
    """Why this engine is not the one that the plugin needs; "" if it is."""
    version = engine_version()
    for line in distribution.requires or ():
        requirement = Requirement(line)
        ours = canonicalize_name(requirement.name) == PROJECT
        if not ours or version is None or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            return f"needs {PROJECT}{requirement.specifier}, and {PROJECT} {version} is installed"
    return ""


def _origin(distribution: metadata.Distribution) -> str:
    text = distribution.read_text("direct_url.json")
    if not text:
        return "index"
    direct = json.loads(text)
    if direct.get("dir_info", {}).get("editable"):
        return "editable"
    return "local" if direct["url"].startswith("file:") else "url"
