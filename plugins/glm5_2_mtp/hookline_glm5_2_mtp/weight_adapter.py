"""How checkpoints of GLM-5.2 and DeepSeek-V3.2 become the names and values that the containers declare.

Which weights are quantised is told by the tensors that are there, never by the config's lists of exceptions:

    FP8 blocks   X.weight e4m3 [out, in], X.weight_scale_inv [ceil(out / b), ceil(in / b)]
                 value = weight * scale of its block
    NVFP4        X.weight uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16], X.weight_scale_2 one fp32 number
                 value = e2m1(nibble) * weight_scale * weight_scale_2, the low nibble first

A quantised weight and its scales become one tensor, whole: `kv_b_proj` is cut into heads later, for its heads' borders
cut through blocks. Dropped by name are scales of caches and of activations, the draft's copies of embedding and head,
and the indexers that some conversions give to layers that have none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod

import torch

from hookline.errors import CheckpointError
from hookline.weight_adapter import FusedExpertsAdapter, LazyTensor
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig

FP8, FP4 = "float8_e4m3fn", "float4_e2m1fnx2"
_GROUP = 16
_SCALES = (".weight_scale_inv", ".weight_scale", ".weight_scale_2")
# Scales of cached keys and values, and of activations in front of a product: neither is quantised here.
_UNUSED = (".k_scale", ".v_scale", ".input_scale")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BROKEN = "The checkpoint is incomplete, or quantised in a way that this plugin does not know."


class GlmAdapter(FusedExpertsAdapter):
    """Brings weights and their scales together, and splits experts that lie in one tensor."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__("mlp", gate="gate_proj", up="up_proj", down="down_proj")
        self.config = config
        # The layer's number, and what is in it.
        self._in_layer = re.compile(r"model\.layers\.(\d+)\.(self_attn\.indexer|embed_tokens|shared_head\.head)\.")

    def adapt_all(self, tensors: Iterable[LazyTensor]) -> Iterator[LazyTensor]:
        """Scales may come before or after their weights, in this shard or another.

        A scale whose weight is missing, or needs none, goes on under its own name, which no container has.

        Raises:
            CheckpointError: naming a quantised weight without its scales, or with scales of another shape.
        """
        scales: dict[str, LazyTensor] = {}
        others: list[LazyTensor] = []
        for tensor in tensors:
            if not self._is_dropped(tensor.name):
                if tensor.name.endswith(_SCALES):
                    scales[tensor.name] = tensor
                else:
                    others.append(tensor)
        for tensor in others:
            yield from self.adapt(self._joined(tensor, scales))
        yield from scales.values()

    def _is_dropped(self, name: str) -> bool:
        if name.endswith(_UNUSED):
            return True
        found = self._in_layer.match(name)
        if found is None:
            return False
        layer, layers = int(found[1]), self.config.num_layers
        if layer >= layers:
            return found[2] != "self_attn.indexer"
        return found[2] == "self_attn.indexer" and not self.config.full_index[layer]

    def _joined(self, tensor: LazyTensor, scales: dict[str, LazyTensor]) -> LazyTensor:
        """`tensor` with its scales, which are taken out of `scales`; a tensor of another kind as it is."""
        if tensor.encoding == "float8_e4m3fn" and len(tensor.shape) == 2:
            scale = _taken(tensor, scales, "_scale_inv")
            block = self.config.weight_block_size
            _check_shape(tensor, scale, (-(-tensor.shape[0] // block[0]), -(-tensor.shape[1] // block[1])), block)
            return _combined(tensor, [scale], FP8, tensor.shape, partial(from_blocks, block=block))
        if tensor.encoding == "uint8" and len(tensor.shape) == 2:
            rows, packed = tensor.shape
            groups, whole = (_taken(tensor, scales, suffix) for suffix in ("_scale", "_scale_2"))
            _check_shape(tensor, groups, (rows, 2 * packed // _GROUP), (1, _GROUP))
            if prod(whole.shape) != 1 or 2 * packed % _GROUP:
                raise CheckpointError(
                    f"{whole.name} is {list(whole.shape)} for {tensor.name}, {list(tensor.shape)}; expected one number "
                    f"for rows of whole groups of {_GROUP} values",
                    hint=_BROKEN,
                )
            return _combined(tensor, [groups, whole], FP4, (rows, 2 * packed), from_nibbles)
        return tensor


def _taken(tensor: LazyTensor, scales: dict[str, LazyTensor], suffix: str) -> LazyTensor:
    scale = scales.pop(tensor.name + suffix, None)
    if scale is None:
        raise CheckpointError(
            f"{tensor.name} is {tensor.encoding}, and there is no {tensor.name}{suffix}", hint=_BROKEN
        )
    return scale


def _check_shape(tensor: LazyTensor, scale: LazyTensor, expected: tuple[int, int], block: tuple[int, int]) -> None:
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{scale.name} is {list(scale.shape)}; {tensor.name}, {list(tensor.shape)}, has {list(expected)} blocks of "
            f"{block[0]} x {block[1]}",
            hint="Compare quantization_config.weight_block_size in config.json.",
        )


def _combined(
    tensor: LazyTensor,
    scales: list[LazyTensor],
    encoding: str,
    shape: tuple[int, ...],
    function: Callable[..., torch.Tensor],
) -> LazyTensor:
    """One tensor of fp32 values, made by `function` from those of `tensor` and `scales` when it is read."""
    parts = [tensor, *scales]
    return LazyTensor(
        name=tensor.name,
        shape=shape,
        encoding=encoding,
        nbytes=sum(part.nbytes for part in parts),
        load=lambda: function(*(part.load() for part in parts)),
        sources=tuple(part.name for part in parts),
    )


def from_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """FP8 values [out, in] times the scales of their blocks, in fp32; blocks at the ends may be cut."""
    rows, columns = weight.shape
    spread = scale.float().repeat_interleave(block[1], 1)[:, :columns].repeat_interleave(block[0], 0)[:rows]
    return weight.float().mul_(spread)


def from_nibbles(packed: torch.Tensor, groups: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """NVFP4 values [out, in] in fp32, of `packed` [out, in / 2], `groups` [out, in / 16] and one number."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten()
    values = torch.tensor(_E2M1).index_select(0, codes.int()).view(*groups.shape, _GROUP)
    return values.mul_((groups.float() * whole.float().reshape(())).unsqueeze(-1)).flatten(1)
