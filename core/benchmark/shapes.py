"""Models without a checkpoint: named reference shapes from the plugins' records, and config files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.files import parse_json_object, regular_size
from hookline.config import PluginOptions
from hookline.errors import ModelNotFoundError, PluginError, UsageError
from hookline.plugins import PluginRegistry, PluginState

_MAX_CONFIG_BYTES = 4 * 2**20

Config = Mapping[str, Any]


def reference_shapes(plugins: PluginOptions) -> dict[str, Config]:
    """Every reference shape of every plugin that can be used, by name, in alphabetical order.

    A plugin that cannot be loaded is left out: the others' shapes must stay within reach.

    Raises:
        UsageError: if two architectures give one name to different shapes.
    """
    registry, found, owners = PluginRegistry(plugins), dict[str, Config](), dict[str, str]()
    for claim in registry.claims:
        if claim.is_gguf or claim.state is not PluginState.OK:
            continue
        try:
            record = registry.load(claim.architecture).record
        except PluginError:
            continue
        for name, config in record.reference_shapes.items():
            if name in found and dict(found[name]) != dict(config):
                raise UsageError(
                    f"{owners[name]} and {claim.title} have different reference shapes called {name!r}",
                    hint="Leave one of the plugins out with engine -p no:ID.",
                )
            found[name], owners[name] = config, claim.title
    return dict(sorted(found.items()))


def find_shape(name: str, plugins: PluginOptions) -> Config:
    """The `config.json` fields of the reference shape `name`.

    Raises:
        UsageError: listing the shapes that there are, if there is none of this name.
    """
    known = reference_shapes(plugins)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        listed = ", ".join(known) or "none: no usable plugin's record has one"
        raise UsageError(f"no plugin has a reference shape {name!r:.80}", hint=f"{hint}Shapes are: {listed}.")
    return known[name]


def read_config_file(path: Path) -> Config:
    """The fields of a `config.json`, whatever the file is called.

    Raises:
        ModelNotFoundError: if there is no such file.
        CheckpointError: if it is no sound JSON object.
        UsageError: if it is too large for a config.
    """
    try:
        size = regular_size(path)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.message, hint="Give --config the path of a config.json.") from None
    if size > _MAX_CONFIG_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, too many for a config", hint="Give a config.json.")
    return parse_json_object(path.read_bytes(), str(path))
