"""Real servers that the clients share: of a tiny random model, of the tiny trained GLM-5.2, and of the real SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.server import Server, running_server
from tests.source_tree import ROOT

GLM = ROOT / "tests/data/tiny-glm5.2-mtp"


@pytest.fixture(scope="session")
def tiny_server(checkpoint: Callable[..., Path]) -> Iterator[Server]:
    """Random weights: fast, and its text is any bytes."""
    with running_server(checkpoint("llama"), "--served-model-name", "tiny", "--drain-seconds", "1") as server:
        yield server


@pytest.fixture(scope="session")
def glm_server() -> Iterator[Server]:
    """A trained model that calls tools and thinks, served with its own draft."""
    with running_server(GLM, "--num-speculative-tokens", "3", "--drain-seconds", "1") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(smollm2: Path) -> Iterator[Server]:
    """The default model, which knows where Paris is."""
    with running_server(smollm2, "--served-model-name", "smollm2", "--drain-seconds", "1") as server:
        yield server
