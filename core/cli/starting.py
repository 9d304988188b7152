"""From a command's options to an engine that is ready, with what it does said on stderr."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hookline.cli.pull import pull_with_progress
from hookline.cli.render import ProgressDisplay
from hookline.config import EngineConfig, expand_home, read_environment
from hookline.model_store import find_pullable, resolve_model

if TYPE_CHECKING:
    from hookline.checkpoint.reader import CheckpointReader
    from hookline.engine import Engine


def find_model(config: EngineConfig) -> Path:
    """The folder or file of the model; one that can be pulled and is not there yet is pulled now.

    Raises:
        ModelNotFoundError: if there is no such model, or the options or the environment forbid to fetch it.
    """
    environment = read_environment()
    model = find_pullable(config.model)
    on_disk = os.path.lexists(expand_home(config.model))
    if model is not None and not on_disk and not model.is_pulled(environment.cache_dir):
        return pull_with_progress(model.name, environment, config.offline)
    return resolve_model(config.model, environment, config.offline)


def start_engine(config: EngineConfig, reader: CheckpointReader | None = None) -> Engine:
    """An engine that is ready, its weights from `reader` where it is given and from `config.model` where not."""
    if reader is None:
        find_model(config)
    with ProgressDisplay(f"Loading {Path(config.model).name}") as display:
        from hookline.engine import Engine

        def progress(done: int, total: int) -> None:
            display(done, total)
            if done >= total:  # what comes now, kernels and CUDA graphs, may take longer on a GPU
                display.begin("Starting", "graphs")

        return Engine(config, reader=reader, progress=progress, starting=display)
