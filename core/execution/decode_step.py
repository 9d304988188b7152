"""A whole decode step on the device: inputs from the slots, forward pass, logits, choice, and the slots' new tokens.

It reads nothing from the host and its shapes are fixed by the number of rows, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from hookline.execution.device_batch import DeviceBatch
from hookline.model import CacheTensors, ForwardBatch, TransformerModel
from hookline_kernels.decode_inputs import DecodeInputs, SamplingOptions, decode_inputs
from hookline_kernels.sampling import sample

# Rows of the captured steps: few apart where a row more costs a good part of a step.
_SMALL, _STEP_8_UP_TO, _STEP_16_UP_TO = (1, 2, 4), 64, 256

Notice = Callable[[int, int], None]


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows for which steps are captured: 1, 2, 4, by 8 to 64, by 16 to 256, by 32 beyond; `most` is last."""
    sizes = [*_SMALL, *range(8, _STEP_8_UP_TO + 1, 8), *range(_STEP_8_UP_TO + 16, _STEP_16_UP_TO + 1, 16)]
    sizes += range(_STEP_16_UP_TO + 32, most + 1, 32)
    return (*(size for size in sizes if size < most), most)


class DeviceStep(ABC):
    """Runs steps of a number of requests, from a CUDA graph where there is one.

    Args:
        max_context_len: most tokens of a request, a bound for every context.
        rope_lengths: whether the model asks for `ForwardBatch.rope_lengths`.
    """

    def __init__(
        self,
        model: TransformerModel,
        cache: Mapping[str, Sequence[CacheTensors]],
        batch: DeviceBatch,
        max_context_len: int,
        rope_lengths: bool,
    ) -> None:
        self.model = model
        self.cache = cache
        self.batch = batch
        self.max_context_len = max_context_len
        self.rope_lengths = rope_lengths
        inputs = batch.inputs
        self.sizes = bucket_sizes(inputs.context_lens.shape[0])
        self.each = inputs.token_ids.shape[0] // self.sizes[-1]  # rows of a request
        self._order = torch.arange(self.sizes[-1] * self.each + 1, device=batch.device)
        self._starts = self._order[:: self.each].int()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]] = {}

    def size_for(self, requests: int) -> int:
        """Requests of the smallest step that holds so many."""
        return next(size for size in self.sizes if size >= requests)

    def run(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step of the requests, one a column, that `DeviceBatch.rows` made.

        Returns:
            what `_run` gives; with a graph it lies in memory that the next step writes to, of this size or any.
        """
        captured = self._graphs.get(rows.shape[1])
        if captured is None:
            return self._run(rows)
        graph, found = captured
        graph.replay()
        return found

    def capture(self, notice: Notice | None = None) -> float:
        """Captures all sizes as CUDA graphs, the largest first, whose memory the smaller ones use again.

        Args:
            notice: is told how many of how many are done.

        Returns:
            seconds that it took.
        """
        begin = time.perf_counter()
        pool = None
        for done, size in enumerate(reversed(self.sizes)):
            rows = self.batch.rows((), size)
            with torch.inference_mode():
                self._run(rows)  # compiles what is not compiled, outside of the graph
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    answer, *others = self._run(rows)
            pool = pool or graph.pool()
            self._graphs[size] = graph, (answer, *map(borrowed, others))
            del others  # so that smaller graphs can have their memory
            if notice is not None:
                notice(done + 1, len(self.sizes))
        return time.perf_counter() - begin

    def kinds(self) -> list[Callable[[], object]]:
        """A step of each kind that has kernels of its own. All their rows are padding, so that they may run at once."""
        most = self.sizes[-1]
        sizes = sorted({self.size_for(min(2**power, most)) for power in range(most.bit_length() + 1)})
        return [partial(self._run, self.batch.padding_rows(size)) for size in sizes]

    @abstractmethod
    def _run(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The step itself: what the host reads, and whatever else is read before the next step."""

    def _forward_batch(self, inputs: DecodeInputs) -> ForwardBatch:
        requests, each = inputs.context_lens.shape[0], self.each
        return ForwardBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            block_tables=inputs.block_tables,
            query_starts=self._starts[: requests + 1],
            context_lens=inputs.context_lens,
            logits_rows=self._order[: requests * each],
            num_decodes=requests if each == 1 else 0,
            max_query_len=each,
            max_context_len=self.max_context_len,
            rope_lengths=inputs.rope_lengths if self.rope_lengths else None,
            cache=self.cache,
        )


class DecodeStep(DeviceStep):
    """Steps of one token a request, whose row of the batch is its slot, the token's position and a new block."""

    @torch.inference_mode()
    def _run(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tokens [R] int64, -1 where none can be chosen, and the logits [R, V] that they were chosen from."""
        inputs, kept = self.batch.inputs.first(rows.shape[1]), self.batch.kept
        decode_inputs(rows, kept, inputs, self.batch.block_size)
        hidden = self.model.forward(self._forward_batch(inputs))
        logits = self.model.compute_logits(hidden)
        tokens = choose_tokens(logits, inputs.options)
        kept.last_tokens.index_copy_(0, rows[0].long(), tokens.clamp(min=0))
        return tokens, logits


def choose_tokens(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """The next token of each row of `logits` [R, V] under the rows' options: [R] int64, -1 where none can be chosen."""
    return sample(logits, options, implementation=None if logits.is_cuda else "reference").token_ids


class _Memory:
    """Memory of a GPU as NumPy's users hand it on (the CUDA array interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": {4: "<i4", 2: "<i2"}[tensor.element_size()],
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "version": 3,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it from being given on.

    A graph's pool never gives memory back to the driver as long as the graph is there, but what Python holds of it no
    other graph can use: the logits of all sizes would take more than a gigabyte. Whoever reads the answer has to do it
    on the graph's stream before another graph is replayed.
    """
    view = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
    if view.data_ptr() != tensor.data_ptr():
        raise RuntimeError("torch made a copy of memory that was given to it by the CUDA array interface")
    return view
