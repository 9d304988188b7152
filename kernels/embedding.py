"""Embedding look-up.

    y[t] = table[ids[t]]

Shapes: ids [T], table [V, M], y [T, M]. The table may be stored column-major (strides of a contiguous [M, V]), which is
how `pack_linear_weight` leaves an output head that shares its weight with the embedding on the CPU; or it is a packed
weight.
"""

from __future__ import annotations

import torch

from hookline_kernels.packed import check_ids, embedding_packed, is_packed
from hookline_kernels.quantized import QuantizedTensor


def embedding(ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Looks rows up: ids [T] int32 or int64, table [V, M] -> new contiguous [T, M] of `dtype`.

    Raises:
        TypeError, ValueError: a type or shape that does not fit.
        IndexError: on the CPU, an id that is not in the table.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: ids must be int32 or int64, got {ids.dtype}")
    if isinstance(table, QuantizedTensor):
        raise TypeError("embedding: the table is a QuantizedTensor; give what pack_linear_weight makes of it")
    if ids.device != table.device:
        raise ValueError(f"embedding: ids are on {ids.device} and the table on {table.device}")
    if ids.dim() == 1 and is_packed(table):
        return embedding_packed(ids, table, dtype)
    if ids.dim() != 1 or table.dim() != 2:
        raise ValueError(f"embedding: ids [T] and table [V, M] expected, got {list(ids.shape)} and {list(table.shape)}")
    if table.stride(1) == 1:
        return table.index_select(0, ids).to(dtype)
    if table.is_cpu:
        check_ids(ids, table.shape[0])
    return table[ids].contiguous().to(dtype)  # of the ways to read scattered columns, the fastest on the CPU
