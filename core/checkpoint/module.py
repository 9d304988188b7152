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
    """Reads what a module would save; a tied parameter appears once, under its first name. The module is not changed.

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
        self.nbytes = sum(tensor.nbytes for _, tensor in self._saved())

    def tensors(self) -> Iterator[LazyTensor]:
        """In the module's own order, parameters before buffers."""
        for name, tensor in self._saved():
            encoding = str(tensor.dtype).removeprefix("torch.")
            yield LazyTensor(name, tuple(tensor.shape), encoding, tensor.nbytes, partial(_copy, tensor))

    def _saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, and the buffers that are no mere by-product of the config."""
        yield from self._module.named_parameters()
        saved = self._module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self._module.named_buffers() if name in saved)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _fields(config: Any) -> dict[str, Any]:
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}
