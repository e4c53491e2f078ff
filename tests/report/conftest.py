"""The fixture of this folder; what it makes is in :mod:`fake_run`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import FakeRun


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    """A complete run of the default shape."""
    return FakeRun(tmp_path).everything()
