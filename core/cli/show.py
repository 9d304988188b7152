"""`engine show`: what a checkpoint is, who serves it, whether it loads and whether it fits."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.options import engine_config, engine_options
from hookline.cli.speculation import speculative_options
from hookline.cli.starting import find_model
from hookline.config import parse_bytes
from hookline.errors import UsageError
from hookline.plugins import engine_version

if TYPE_CHECKING:
    from hookline.cli.inspection import CheckpointAudit, Inspection
    from hookline.model import ModelConfig

_NAMES_SHOWN = 8


@click.command("show")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every name of the audit.")
@click.option(
    "--devices",
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Plan for so many GPUs, each with --device-memory.  [default: this machine]",
)
@click.option(
    "--device-memory", metavar="SIZE", help="Memory of each of those, such as 141GB.  [default: what this machine has]"
)
@engine_options
@speculative_options
@click.pass_context
def show(
    ctx: click.Context, /, model: str, as_json: bool, devices: int | None, device_memory: str | None, **values: Any
) -> None:
    """Say what MODEL is, which plugin serves it and why, whether it loads, and whether it fits this machine.

    Reads headers only, never a weight. The audit compares the checkpoint's tensors with the plugin's mapping, and the
    memory plan is what engine generate would use with the same options. What the files say is also shown where no
    plugin serves the architecture.

    \b
      engine show smollm2-135m-instruct
      engine show ./my-model --dtype bfloat16 --max-model-len 8192
      engine show ./my-model --devices 8 --device-memory 141GB

    Exit codes beside the general ones: 1 if the audit finds tensors that are missing, unexpected, double or of a wrong
    shape, 4 if no plugin serves the architecture, 6 if the model does not fit.
    """
    config, wanted = engine_config(model, values, ctx.obj), _devices(devices, device_memory)
    path = find_model(config)
    from hookline.checkpoint import open_checkpoint
    from hookline.cli.inspection import Devices, inspect_checkpoint

    planned = None if wanted is None else Devices(*wanted)
    with _without_collector():
        found = inspect_checkpoint(config, path, open_checkpoint(path, config.load_format), planned)
    click.echo(json.dumps(_as_object(model, found), indent=2) if as_json else "\n".join(_as_lines(model, found)))
    failed_audit = found.audit is not None and not found.audit.is_clean
    if found.error is not None and not failed_audit:
        raise found.error
    ctx.exit(1 if failed_audit else 0)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A large checkpoint has hundreds of thousands of tensors: small records that all stay, through which the garbage
    collector would go again and again, half of the whole time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _devices(count: int | None, memory: str | None) -> tuple[int, int] | None:
    if count is None and memory is None:
        return None
    if count is None or memory is None:
        given, lacking = ("--device-memory", "--devices") if count is None else ("--devices", "--device-memory")
        raise UsageError(f"{given} is given without {lacking}", hint="Give both, as --devices 8 --device-memory 141GB.")
    return count, parse_bytes(memory, "--device-memory")


def _as_object(model: str, found: Inspection) -> dict[str, Any]:
    audit = None if found.audit is None else {"ok": found.audit.is_clean, **dataclasses.asdict(found.audit)}
    return {
        "schema": "hookline.show/1",
        "engine_version": engine_version(),
        "model": model,
        **found.header,
        "plugin": found.plugin,
        "parameters": found.parameters,
        "shapes": None if found.config is None else _shapes(found.config),
        "audit": audit,
        "memory": None if found.plan is None else dataclasses.asdict(found.plan),
        "computed_weights": found.computed_weights,
        "error": None if found.error is None else found.error.message,
    }


def _shapes(config: ModelConfig) -> dict[str, int | float | str | bool]:
    values = ((entry.name, getattr(config, entry.name)) for entry in dataclasses.fields(config))
    return {name: value for name, value in values if isinstance(value, int | float | str)}


def _as_lines(model: str, found: Inspection) -> Iterator[str]:
    from hookline.memory_planner import format_bytes

    header = found.header
    yield from _rows(
        ("model", model),
        ("path", header["path"]),
        ("architecture", header["architecture"]),
        ("plugin", _plugin_line(found)),
    )
    if found.parameters is not None:
        yield from _rows(("parameters", f"{found.parameters:,}"))
    yield from _rows(
        ("format", f"{header['format']}, {_tensors(header['tensors'])}, {format_bytes(header['tensor_bytes'])}"),
        *(("file", f"{file['name']}, {format_bytes(file['bytes'])}") for file in header["files"]),
        *(
            ("encoding", f"{name}, {_tensors(entry['tensors'])}, {format_bytes(entry['bytes'])}")
            for name, entry in header["encodings"].items()
        ),
        ("context", f"{header['context_length'] or 'unknown'} tokens"),
        ("tokenizer", "yes" if header["tokenizer"] else "no: prompts must be token ids"),
        ("chat template", "yes" if header["chat_template"] else "no"),
        ("end tokens", _end_tokens(header["end_tokens"])),
    )
    if found.config is not None:
        yield "Shapes:"
        yield from (f"  {name:<24} {value}" for name, value in _shapes(found.config).items())
    if found.audit is not None:
        yield from _audit_lines(found.audit)
    if found.plan is not None:
        yield found.plan.table()
        if found.computed_weights is not None and found.computed_weights != found.plan.weights:
            computed = format_bytes(found.computed_weights)
            yield f"  weights count as they are stored; in the type that they are computed in they take {computed}"


def _rows(*rows: tuple[str, str]) -> Iterator[str]:
    return (f"{name:<14} {value}" for name, value in rows)


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _end_tokens(tokens: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{token['id']} {token['text'] or ''}".strip() for token in tokens) or "none"


def _plugin_line(found: Inspection) -> str:
    if found.plugin is None:
        return "none that can be used"
    return "{distribution} {version}, {why}".format(**found.plugin)


def _audit_lines(audit: CheckpointAudit) -> Iterator[str]:
    yield f"Audit: {'every tensor has its place' if audit.is_clean else 'the checkpoint does not load'}"
    yield f"  {'matched':<12} {audit.matched}"
    if audit.joined:
        yield f"  {'joined':<12} {audit.joined}, such as scales with their weights"
    for title, names in (
        ("missing", audit.missing),
        ("unexpected", audit.unexpected),
        ("double", audit.duplicate),
        ("wrong shape", audit.wrong_shape),
        ("dropped", audit.dropped),
    ):
        yield f"  {title:<12} {len(names)}"
        yield from (f"    {name}" for name in names[:_NAMES_SHOWN])
        if len(names) > _NAMES_SHOWN:
            yield f"    and {len(names) - _NAMES_SHOWN} more; --json has all"
