"""Scripts that are run by hand say what is wrong in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["show_progress.py", "results/none"], "results/none/config.resolved.yaml: no such file; give the config of a"),
        (["pin_datasets.py", "none.yaml"], "none.yaml: no such file; give the config of a run"),
        (
            ["record_server_flags.py", "--python", "none/python"],
            "none/python: cannot be run (No such file or directory)",
        ),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, command: list[str], said: str) -> None:
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1
