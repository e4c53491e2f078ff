"""The benchmark runs, small, and every rule of the merge has work in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_benchmark_counts_what_it_made(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "merge.py"), "--rows", "3200", "--ids", "50000"]
    result = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    for part, rows in (("quarter", 800), ("whole", 3200)):
        counted = figures[part]
        assert counted["rows"]["read"] == rows == counted["rows"]["kept"] + sum(counted["left_out"].values())
    assert {"benchmark_prompt", "cross_dataset_duplicate", "over_cap"} <= figures["whole"]["left_out"].keys()
    assert (figures["vocabulary"]["ids"], figures["vocabulary"]["size"]) == (50_000, 32_000)
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
