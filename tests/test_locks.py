"""File locks, as another process sees them."""

from __future__ import annotations

import os
from pathlib import Path

from eyrie.locks import is_held, take


def test_a_lock_is_seen_from_outside_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    descriptor = take(path)
    assert descriptor is not None
    assert is_held(path)
    assert take(path, seconds=0.1) is None
    os.close(descriptor)
    assert not is_held(path)
