"""From a checkpoint to filled containers: reader, weight adapter, container map, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hookline.checkpoint.reader import CheckpointReader, Progress
from hookline.container import ContainerMap
from hookline.errors import CheckpointError
from hookline.weight_adapter import LazyTensor, WeightAdapter

Shapes = Mapping[str, tuple[int, ...]]


def adapted(reader: CheckpointReader, adapter: WeightAdapter) -> Iterator[LazyTensor]:
    """The checkpoint's tensors under the containers' names, none of them read yet."""
    return adapter.adapt_all(reader.tensors())


def check_shapes(tensors: Iterable[LazyTensor], expected: Shapes) -> None:
    """Raises CheckpointError, naming each tensor, where a shape differs from what the config asks for."""
    wrong = [
        f"{tensor.name} is {list(tensor.shape)}, the config asks for {list(expected[tensor.name])}"
        for tensor in tensors
        if tensor.name in expected and tuple(tensor.shape) != tuple(expected[tensor.name])
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            "Tensors do not have the config's shapes:\n  " + "\n  ".join(wrong[:5]) + more,
            hint="config.json and the weights are of different models, or one of them is damaged.",
        )


def load_weights(
    reader: CheckpointReader,
    adapter: WeightAdapter,
    containers: ContainerMap,
    expected: Shapes,
    progress: Progress | None = None,
) -> None:
    """Fills `containers`. All names and shapes are checked before the first value is read.

    Raises:
        CheckpointError, ContainerError: naming what is missing, unknown, double, or of a wrong shape.
    """
    audit = containers.audit(adapted(reader, adapter))
    if not audit.ok:
        raise CheckpointError(
            f"The checkpoint's tensors are not those that the plugin maps.\n{audit.report(limit=5)}",
            hint="config.json and the weights are of different models, or the checkpoint needs a newer plugin.",
        )
    check_shapes(adapted(reader, adapter), expected)
    done, total = 0, reader.nbytes
    for tensor in adapted(reader, adapter):
        containers.map_param(tensor.name, tensor.load())
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    containers.validate()
