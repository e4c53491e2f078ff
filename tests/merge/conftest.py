"""The fixture of this folder; what it makes is in :mod:`merge_desk`."""

from __future__ import annotations

from pathlib import Path

import pytest
from merge_desk import make_card


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """Path of a target card with 100 tokens, of which 0, 1 and 2 are special."""
    return make_card(tmp_path)
