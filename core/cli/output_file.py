"""Where a command may write: a file in a folder of the user's, or a device or a pipe as it stands."""

from __future__ import annotations

import os
from pathlib import Path

from hookline.config import expand_home
from hookline.errors import UsageError


def is_stream(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder, such as `/dev/null`. It must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_output(name: str, option: str) -> Path:
    """Where `name` leads, if a file can be written there; a device or a pipe stays as it is named.

    Raises:
        UsageError: naming `option`, if it cannot.
    """
    path = expand_home(name)
    if is_stream(path):
        return path
    try:
        path = path.resolve()
        usable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the file of {option}, {name!r}, cannot be: {error}", hint="Give another name.") from None
    if path.is_dir() or not usable:
        why = "is a folder" if path.is_dir() else "is not in a folder that can be written"
        raise UsageError(f"the file of {option}, {name}, {why}", hint="Give a file in a folder of yours.")
    return path
