"""An in-memory module as a checkpoint: a `transformers` model, or any torch module with such a config."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hookline.checkpoint.folder import check_architectures
from hookline.checkpoint.reader import JsonObject, TokenizerSource
from hookline.weight_adapter import LazyTensor


class ModuleReader:
    """Reads a module's parameters; a tied one appears once, under its first name. The module is not changed.

    Args:
        module: has a `config` with `to_dict()`, as the models of `transformers` do.
        tokenizer_source: a module carries no tokenizer; pass one where text is wanted.

    Raises:
        CheckpointError: if the config does not name its architecture.
    """

    weights_format = "module"

    def __init__(self, module: torch.nn.Module, tokenizer_source: TokenizerSource | None = None) -> None:
        self._module = module
        config = _fields(getattr(module, "config", None))
        if not config.get("architectures"):
            config["architectures"] = [type(module).__name__]
        check_architectures(config, type(module).__name__)
        self.hf_config: JsonObject = MappingProxyType(config)
        self.generation_config: JsonObject = MappingProxyType(_fields(getattr(module, "generation_config", None)))
        self.tokenizer_source = tokenizer_source or TokenizerSource()
        self.files: tuple[Path, ...] = ()
        self.nbytes = sum(parameter.nbytes for parameter in module.parameters())

    def tensors(self) -> Iterator[LazyTensor]:
        """In the module's own order."""
        for name, parameter in self._module.named_parameters():
            encoding = str(parameter.dtype).removeprefix("torch.")
            load = partial(_copy, parameter)
            yield LazyTensor(name, tuple(parameter.shape), encoding, parameter.nbytes, load)


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True)


def _fields(config: Any) -> dict[str, Any]:
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}
