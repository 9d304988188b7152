"""Which plugin serves an architecture: finds the installed plugins, settles their claims, loads the one that is asked.

Finding and settling read package metadata only. `load` alone imports a plugin, and no other than the one it needs.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.utils import canonicalize_name

from hookline.config import PluginOptions, read_environment
from hookline.errors import NoPluginError, PluginError, UsageError
from hookline.hookspecs import ENTRY_POINT_GROUP
from hookline.plugin_loading import LoadedArchitecture, load_architecture
from hookline.plugin_metadata import GGUF_PREFIX, Claim, Plugin, PluginState, engine_version, installed_plugins

__all__ = [
    "GGUF_PREFIX",
    "Claim",
    "LoadedArchitecture",
    "Plugin",
    "PluginRegistry",
    "PluginState",
    "engine_version",
]

INSTALL_HINT = (
    "Plugins are packages, usually called hookline-<family>: pip install hookline-<family>. "
    f"The right one has an entry point {ENTRY_POINT_GROUP}: "
)

# Architectures share long endings such as ForCausalLM, so they look alike even where they have nothing in common.
_NEAR_ARCHITECTURE = 0.85


class PluginRegistry:
    """The installed plugins and what each may serve under `options`.

    Attributes:
        plugins: every installed plugin, by id.
        claims: every claim, by architecture; at most one of an architecture is `ok`.

    Raises:
        UsageError: if the options name a plugin or an architecture that is not installed.
    """

    def __init__(self, options: PluginOptions | None = None) -> None:
        options = options or PluginOptions()
        installed = installed_plugins()
        disabled = _disabled(installed, options)
        preferred = _preferred(installed, options)
        allowed = [
            plugin.marked(PluginState.DISABLED, disabled[plugin.distribution])
            if plugin.distribution in disabled
            else plugin
            for plugin in installed
        ]
        usable = defaultdict[str, list[Claim]](list)
        for claim in (claim for plugin in allowed for claim in plugin.claims if claim.state is PluginState.OK):
            usable[claim.architecture].append(claim)
        self.plugins: tuple[Plugin, ...] = tuple(_settled(plugin, usable, preferred) for plugin in allowed)
        claims = [claim for plugin in self.plugins for claim in plugin.claims]
        self.claims: tuple[Claim, ...] = tuple(
            sorted(claims, key=lambda claim: (claim.architecture.casefold(), claim.architecture, claim.distribution))
        )

    def find(self, architecture: str) -> Claim:
        """The claim that serves `architecture` (for GGUF files: `gguf.` and GGUF's own name).

        Raises:
            NoPluginError: if no installed plugin claims it.
            PluginError: if those that do are disabled, incompatible, broken or in conflict.
        """
        claims = [claim for claim in self.claims if claim.architecture == architecture]
        if not claims:
            raise self._unknown(architecture)
        for claim in claims:
            if claim.state is PluginState.OK:
                return claim
        raise _unusable(claims)

    def load(self, architecture: str) -> LoadedArchitecture:
        """Imports the plugin that serves `architecture`; raises as `find`, and PluginError if the plugin is broken."""
        return self._load(self.find(architecture))

    def check(self) -> tuple[Plugin, ...]:
        """`plugins` after an import of each that metadata finds no fault with: what fails is `broken`."""
        return tuple(self._checked(plugin) for plugin in self.plugins)

    def _checked(self, plugin: Plugin) -> Plugin:
        if plugin.state not in (PluginState.OK, PluginState.CONFLICT):
            return plugin
        try:
            for claim in {claim.module: claim for claim in plugin.claims}.values():
                self._load(claim)
        except PluginError as error:
            return plugin.marked(PluginState.BROKEN, error.message)
        return plugin

    def _load(self, claim: Claim) -> LoadedArchitecture:
        place = (claim.distribution, claim.module)
        claimed = (other.architecture for other in self.claims if (other.distribution, other.module) == place)
        return load_architecture(claim, frozenset(claimed))

    def _unknown(self, architecture: str) -> NoPluginError:
        # The name comes from a checkpoint: shown escaped and cut, and never turned into a package to install.
        is_gguf = architecture.startswith(GGUF_PREFIX)
        known = sorted({claim.architecture for claim in self.claims if claim.is_gguf == is_gguf})
        installed = f"The installed plugins serve {', '.join(known)}." if known else "No plugin for any is installed."
        return NoPluginError(
            f"No installed plugin serves the architecture {architecture!r:.120}. {installed}",
            hint=f"{_near(architecture, known, _NEAR_ARCHITECTURE)}{INSTALL_HINT}{architecture!r:.120}.",
        )


def _unusable(claims: list[Claim]) -> PluginError:
    """Why none of the claims to one architecture can be used, and the way out of each."""
    name = claims[0].architecture
    rivals = [claim for claim in claims if claim.state is PluginState.CONFLICT]
    if rivals:
        flags = " or ".join(f"--plugin {name}={claim.distribution}" for claim in rivals)
        return PluginError(
            f"{len(rivals)} plugins claim {name}: {', '.join(claim.title for claim in rivals)}",
            hint=f"Choose one: {flags}; or uninstall all but one.",
        )
    remedies = {
        PluginState.DISABLED: "allow {0} again (-p no:, --no-plugins, --plugin, HOOKLINE_DISABLE_PLUGINS)",
        PluginState.INCOMPATIBLE: "install versions that fit each other (pip install --upgrade hookline {0})",
        PluginState.BROKEN: "reinstall {0} (pip install --force-reinstall {0})",
    }
    faults = "; ".join(f"{claim.title} is {claim.state}: {claim.reason}" for claim in claims)
    ways = " or ".join(remedies[claim.state].format(claim.distribution) for claim in claims)
    return PluginError(f"{name} has no plugin that can be used. {faults}", hint=f"To use it, {ways}.")


def _settled(plugin: Plugin, usable: Mapping[str, list[Claim]], preferred: Mapping[str, str]) -> Plugin:
    """`plugin` with the conflicts of its claims found, or resolved as the user prefers."""
    if plugin.state is not PluginState.OK:
        return plugin
    claims = tuple(_settled_claim(claim, usable[claim.architecture], preferred) for claim in plugin.claims)
    reason = "; ".join(f"{claim.architecture}: {claim.reason}" for claim in claims if claim.reason)
    states = {claim.state for claim in claims}
    state = PluginState.OK
    if PluginState.CONFLICT in states:
        state = PluginState.CONFLICT
    elif states == {PluginState.DISABLED}:
        state = PluginState.DISABLED
    return dataclasses.replace(plugin, state=state, reason=reason, claims=claims)


def _settled_claim(claim: Claim, usable: list[Claim], preferred: Mapping[str, str]) -> Claim:
    name = claim.architecture
    chosen = preferred.get(name, claim.distribution)
    if chosen != claim.distribution:
        return dataclasses.replace(claim, state=PluginState.DISABLED, reason=f"not chosen: --plugin {name}={chosen}")
    rivals = [other.title for other in usable if other.distribution != claim.distribution]
    if not rivals or name in preferred:
        return claim
    reason = f"also claimed by {', '.join(rivals)}; choose with --plugin {name}={claim.distribution}"
    return dataclasses.replace(claim, state=PluginState.CONFLICT, reason=reason)


def _disabled(installed: tuple[Plugin, ...], options: PluginOptions) -> dict[str, str]:
    """Distributions that are left out, and why."""
    if not options.enabled:
        return {plugin.distribution: "--no-plugins leaves every plugin out" for plugin in installed}
    disabled = {}
    for source, names in (
        ("HOOKLINE_DISABLE_PLUGINS={}", read_environment().disabled_plugins),
        ("-p no:{}", options.disabled),
    ):
        for name in sorted(names):
            reason = source.format(name)
            disabled[_resolve(name, installed, reason).distribution] = f"{reason} leaves it out"
    return disabled


def _preferred(installed: tuple[Plugin, ...], options: PluginOptions) -> dict[str, str]:
    """Architecture to the distribution that the user wants for it."""
    preferred = {}
    for architecture, name in sorted(options.prefer.items()):
        flag = f"--plugin {architecture}={name}"
        claimants = [plugin for plugin in installed if any(c.architecture == architecture for c in plugin.claims)]
        if not claimants:
            known = sorted({claim.architecture for plugin in installed for claim in plugin.claims})
            raise UsageError(
                f"{flag}: no installed plugin claims {architecture!r}",
                hint=f"{_near(architecture, known, _NEAR_ARCHITECTURE)}Claimed are: {', '.join(known) or 'none'}.",
            )
        plugin = _resolve(name, installed, flag)
        if plugin not in claimants:
            raise UsageError(
                f"{flag}: {plugin.distribution} does not claim {architecture}",
                hint=f"These do: {', '.join(claimant.distribution for claimant in claimants)}.",
            )
        preferred[architecture] = plugin.distribution
    return preferred


def _resolve(name: str, installed: tuple[Plugin, ...], source: str) -> Plugin:
    """The plugin with the distribution name or the id `name`."""
    normal = canonicalize_name(name)
    by_name = {plugin.id: plugin for plugin in installed} | {plugin.distribution: plugin for plugin in installed}
    if normal in by_name:
        return by_name[normal]
    ids = ", ".join(plugin.id for plugin in installed) or "none"
    found = f"{normal} is installed, but has no entry point {ENTRY_POINT_GROUP}" if _is_installed(normal) else ""
    raise UsageError(
        f"{source}: {found or f'no plugin {name!r} is installed'}",
        hint=f"{_near(normal, by_name)}Installed plugins: {ids}.",
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True


def _near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`Did you mean ...? ` where there is something near, else nothing."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"Did you mean {' or '.join(matches)}? " if matches else ""
