"""Readers of weights: a safetensors folder, a GGUF file, a module in memory, our snapshots, random weights."""

from hookline.checkpoint.opening import open_checkpoint
from hookline.checkpoint.reader import CheckpointReader, Progress, TokenizerSource

__all__ = ["CheckpointReader", "Progress", "TokenizerSource", "open_checkpoint"]
