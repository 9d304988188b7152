"""Checkpoints that the runners' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.glm5_2.half_right import save_half_right


@pytest.fixture(scope="session")
def half_right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM-5.2 with a draft that is sometimes right."""
    return save_half_right(tmp_path_factory.mktemp("half_right"))
