"""Where a rank stands, and how tensors are cut for it. Shape letters: see docs/containers.md."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank's place: ranks of a TP group hold parts of every layer, ranks of an EP group hold whole experts."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for rank, size, name in ((self.tp_rank, self.tp_size, "tp"), (self.ep_rank, self.ep_size, "ep")):
            if not 0 <= rank < size:
                raise UsageError(f"{name}_rank is {rank} of {size} ranks", hint="Ranks count from 0 to size - 1.")
