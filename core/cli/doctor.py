"""`engine doctor`: checks this machine and the installation, and says how to mend what fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import click

from hookline.cli.checks import Check, run_checks
from hookline.config import PluginOptions
from hookline.plugins import engine_version


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check Python, torch, triton, devices, memory, the cache folder, the plugins and the default model.

    Each line that fails says how to mend it, and the exit code is 1 if one does. A machine without a GPU is fine.

    \b
      engine doctor
      engine doctor --json > report.json
    """
    options: PluginOptions | None = ctx.obj
    checks = run_checks(options or PluginOptions())
    ok = all(check.ok for check in checks)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        report = {"schema": "hookline.doctor/1", "engine_version": engine_version(), "ok": ok, "checks": rows}
        click.echo(json.dumps(report, indent=2))
    else:
        _print_list(checks)
    ctx.exit(0 if ok else 1)


def _print_list(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            click.echo(f"{'':{width + 8}}{check.remedy}")
