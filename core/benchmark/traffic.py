"""Bytes that the kernels of a decode step are given, by kernel, recorded in one step that runs without a graph.

Of a Triton kernel they are the sizes of its tensors, each counted once though it be read and written; of the vendor
library's products, those of operands and results. A cache tensor counts as what is used of it: by a kernel that is
given block tables all contexts, by any other one entry a row; and of experts those count that are expected to be chosen
at least once. Who reads only a part of the rest is slower than it looks here; what a window leaves out is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline.execution.decode_step import choose_tokens
from hookline.execution.kv_cache import allocate_cache
from hookline.model import DraftBatch, ForwardBatch, TransformerModel
from hookline_kernels.decode_inputs import DecodeInputs

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm", "_grouped_mm"})
_NO_EXPERTS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a step.

    Attributes:
        kernels: by the name of the Triton kernel, all its calls together.
        products: of torch's own matrix products, all together.
    """

    kernels: Mapping[str, int]
    products: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what passes while it is entered.

    Args:
        used: by address, the most bytes that are used of a tensor: by a kernel that has `tables`, and by one that has
            not.
        tables: the block tables' address; they count for nothing themselves.
    """

    def __init__(self, used: Mapping[int, tuple[int, int]], tables: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = defaultdict[str, int](int)
        self.products = 0
        self._used = used
        self._tables = tables

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.products += sum(self._size(each) for each in (*args, result) if isinstance(each, torch.Tensor))
        return result

    def launched(self, name: str, arguments: Iterable[object]) -> None:
        """Takes note of a Triton kernel; a tensor that it is given twice, or by a descriptor for TMA, counts once."""
        plain = (each.base if isinstance(each, TensorDescriptor) else each for each in arguments)
        tensors = {each.data_ptr(): each for each in plain if isinstance(each, torch.Tensor)}
        reads_contexts = tensors.pop(self._tables, None) is not None
        self.kernels[name] += sum(self._size(tensor, reads_contexts) for tensor in tensors.values())

    def _size(self, tensor: torch.Tensor, reads_contexts: bool = False) -> int:
        size = tensor.numel() * tensor.element_size()
        most = self._used.get(tensor.data_ptr())
        if most is None:
            return size
        return most[0] if reads_contexts else min(size, most[1])


@torch.inference_mode()
def decode_traffic(
    model: TransformerModel,
    requests: int,
    padded: int,
    context: int,
    longest: int,
    block_size: int,
    experts: Mapping[int, int] = _NO_EXPERTS,
    drafts: int = 0,
) -> Traffic:
    """Runs a decode step of made-up requests of `context` tokens each, on a cache of one block.

    A step that verifies drafts has the target's forward pass and choice for all rows, and the model's own draft, where
    there is one, which proposes as many. What settles which drafts are accepted is left out.

    Args:
        padded: requests of the step; those beyond `requests` are padding.
        longest: most tokens of a request, by which kernels are chosen.
        experts: by the address of a tensor of experts, its bytes that are read.
        drafts: that the step verifies of each request.
    """
    device, each = model.device, 1 + drafts
    rows = padded * each
    cache = allocate_cache(model.cache_specs(), 1, block_size, device)
    tables = torch.zeros((padded, -(-longest // block_size)), dtype=torch.int32, device=device)
    entries = [entry for group in cache.values() for layer in group for entry in layer.values()]
    used = {address: (size, size) for address, size in experts.items()}
    for entry in entries:
        size = entry.numel() * entry.element_size() // block_size
        used[entry.data_ptr()] = requests * context * size, requests * each * size
    order = torch.arange(rows + 1, device=device)
    contexts = torch.where(order[:padded] < requests, context, 0)
    positions = (contexts[:, None] - each + order[:each]).clamp(min=0).flatten()
    batch = ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=positions,
        slots=torch.full((rows,), -1, device=device),
        block_tables=tables,
        query_starts=order[::each].int(),
        context_lens=contexts.int(),
        logits_rows=order[:rows],
        num_decodes=0 if drafts else padded,
        max_query_len=each,
        max_context_len=longest,
        rope_lengths=positions + 1,
        cache=cache,
    )
    recorder = _Recorder(used, tables.data_ptr())
    with recorder, _launches(recorder):
        hidden = model.forward(batch)
        tokens = choose_tokens(model.compute_logits(hidden), DecodeInputs.zeros(rows, 1, device).options)
        if drafts and model.proposer is not None:
            model.proposer.propose(
                DraftBatch(
                    forward=batch,
                    hidden=hidden,
                    next_token_ids=tokens.clamp(min=0),
                    last_rows=order[each - 1 : rows : each],
                    num_drafts=drafts,
                )
            )
    return Traffic(dict(recorder.kernels), recorder.products)


@contextmanager
def _launches(recorder: _Recorder) -> Iterator[None]:
    """Tells the recorder of each launch; Triton's own hook is not given the arguments."""
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            recorder.launched(self.fn.__name__, (*args, *kwargs.values()))
        return original(self, *args, **kwargs)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original
