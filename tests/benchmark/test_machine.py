"""What is said of a machine, and what is known of a GPU by its name."""

from __future__ import annotations

import pytest
import torch

from hookline.benchmark.machine import describe_machine, describe_versions, known_limits, limits_by_name


def test_this_machine() -> None:
    found = describe_machine(torch.device("cpu"))
    assert (found["device"], found["gpu"], found["driver"]) == ("cpu", None, None)
    assert found["cpu"] and found["cores"] >= 1
    assert describe_versions()["torch"] == torch.__version__


def test_a_known_card() -> None:
    found = limits_by_name("NVIDIA H200", torch.bfloat16)
    assert (found.bandwidth, found.peak, found.attention) == (4.2e12, 790e12, 650e12)
    assert "H200" in found.source
    # Products in fp32 are another matter; reading is not.
    wide = limits_by_name("NVIDIA H200", torch.float32)
    assert (wide.bandwidth, wide.peak) == (4.2e12, None)


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 3g.71gb", "NVIDIA H2000", "Another Card", ""])
def test_an_unknown_card(name: str) -> None:
    found = limits_by_name(name, torch.bfloat16)
    assert (found.bandwidth, found.peak, found.source) == (None, None, "unknown")


def test_nothing_is_known_of_a_cpu() -> None:
    assert known_limits(torch.device("cpu"), torch.float32).bandwidth is None
