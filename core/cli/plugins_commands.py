"""`engine list-models` and `engine plugins`: what is installed. Neither imports torch, nor a plugin unless asked to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

import click

from hookline.cli.render import tell
from hookline.config import PluginOptions
from hookline.errors import PluginError
from hookline.hookspecs import Architecture
from hookline.plugins import INSTALL_HINT, Claim, Plugin, PluginRegistry, PluginState, engine_version

_LONG = ("ENCODINGS", "FORMATS", "EXAMPLE REPOSITORIES")


@click.command("list-models")
@click.option("--long", "long", is_flag=True, help="Import the plugins and add what their records say.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def list_models(options: PluginOptions | None, long: bool, as_json: bool) -> None:
    """List the architectures that the installed plugins serve.

    Reads package metadata only; with --long, imports each plugin's description too.
    """
    registry = PluginRegistry(options)
    claims = [claim for claim in registry.claims if not claim.is_gguf]
    rows = [_described(registry, claim) if long else (claim, None) for claim in claims]
    unread = [plugin for plugin in registry.plugins if not plugin.claims]
    if as_json:
        _print_json("list-models", "architectures", [_claim_json(claim, record, long) for claim, record in rows])
        return
    table = [
        (claim.architecture, claim.plugin, claim.version, *_long_cells(record, long), _status(claim))
        for claim, record in rows
    ]
    table += [("-", plugin.id, plugin.version, *_long_cells(None, long), _status(plugin)) for plugin in unread]
    _print_table(("ARCHITECTURE", "PLUGIN", "VERSION", *(_LONG if long else ()), "STATUS"), table)
    _hint_if_empty(registry)


@click.command("plugins")
@click.option("--check", is_flag=True, help="Import every plugin too; exit 5 if one is at fault.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plugins(ctx: click.Context, check: bool, as_json: bool) -> None:
    """List the installed plugins, the state of each and its reason.

    Reads package metadata only. With --check, plugins that are not disabled are imported, and the exit code is 5 if
    one of them is broken, incompatible or in conflict.
    """
    registry = PluginRegistry(ctx.obj)
    found = registry.check() if check else registry.plugins
    if as_json:
        _print_json("plugins", "plugins", [plugin.to_dict() for plugin in found])
    else:
        header = ("ID", "DISTRIBUTION", "VERSION", "ORIGIN", "STATE")
        _print_table(header, [(p.id, p.distribution, p.version, p.origin, _status(p)) for p in found])
        _hint_if_empty(registry)
    if check and any(plugin.state not in (PluginState.OK, PluginState.DISABLED) for plugin in found):
        ctx.exit(PluginError.exit_code)


def _described(registry: PluginRegistry, claim: Claim) -> tuple[Claim, Architecture | None]:
    """`claim` with the plugin's record of it; without one and `broken` where the plugin cannot be loaded."""
    if claim.state is not PluginState.OK:
        return claim, None
    try:
        return claim, registry.load(claim.architecture).record
    except PluginError as error:
        return dataclasses.replace(claim, state=PluginState.BROKEN, reason=error.message), None


def _long_cells(record: Architecture | None, long: bool) -> tuple[str, ...]:
    if not long:
        return ()
    if record is None:
        return ("-",) * len(_LONG)
    return tuple(
        ", ".join(items) or "-" for items in (record.encodings, record.weight_formats, record.example_repositories)
    )


def _status(row: Claim | Plugin) -> str:
    return f"{row.state}: {row.reason}" if row.reason else str(row.state)


def _claim_json(claim: Claim, record: Architecture | None, long: bool) -> dict[str, object]:
    row: dict[str, object] = {
        "architecture": claim.architecture,
        "plugin": claim.plugin,
        "distribution": claim.distribution,
        "version": claim.version,
        "status": claim.state,
        "reason": claim.reason,
    }
    if long:
        row["encodings"] = record.encodings if record else None
        row["formats"] = record.weight_formats if record else None
        row["example_repositories"] = record.example_repositories if record else None
    return row


def _print_json(command: str, key: str, rows: list[dict[str, object]]) -> None:
    schema = f"hookline.{command}/1"
    click.echo(json.dumps({"schema": schema, "engine_version": engine_version(), key: rows}, indent=2))


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _hint_if_empty(registry: PluginRegistry) -> None:
    if not registry.plugins:
        tell(f"No plugin is installed. {INSTALL_HINT}the architecture of your model's config.json.")
