"""The generate stage in a process of its own: a real SIGKILL, a real limit on file size."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.generate_desk import Desk, FakeEngine, questions

CHILD = """
import resource, sys
from pathlib import Path
from eyrie.errors import run_cli
from eyrie.generate import generate
from tests.generate_desk import FakeEngine, FakeRenderer, recipe_of

root, slots, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
run_cli(lambda: generate(
    recipe_of(3000), prompts=root / "code/s0000.jsonl.zst", target=root / "target.json", model="m",
    out=root / "responses/s0000.jsonl.zst", journal=root / "journal/s0000.jsonl",
    engine=lambda: FakeEngine(slots, order=slots, sleep=0.004), renderer=FakeRenderer(),
))
"""


def child(root: Path, slots: int, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(root), str(slots), str(limit)]
    home = Path(__file__).parents[1]
    return subprocess.Popen(
        command, cwd=home, env={**os.environ, "PYTHONPATH": str(home)}, stderr=subprocess.PIPE, text=True
    )


def test_killed_at_any_moment_and_run_again_the_shard_is_byte_identical(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "disturbed", questions(300))
    calm = Desk(tmp_path / "calm", questions(300))
    calm.run(3000, FakeEngine())
    draw = random.Random(4)
    answers = 0
    for slots in (1, 7, 32, 16):
        process = child(desk.root, slots)
        # wait until the journal grows, then for a random while: the kill hits work, not the start of Python
        while process.poll() is None and journaled(desk) <= answers:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not desk.out.exists()
        assert journaled(desk) > answers
        answers = journaled(desk)
    process = child(desk.root, 5)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert desk.published() == calm.published()
    assert desk.stats()["reused_rows"] + desk.stats()["answered_rows"] >= len(calm.rows())
    assert desk.stats()["reused_rows"] > 0


def journaled(desk: Desk) -> int:
    return desk.journal.read_bytes().count(b"\n") if desk.journal.exists() else 0


def test_a_file_that_may_not_grow_is_one_line_and_nothing_is_published(tmp_path: Path) -> None:
    desk = Desk(tmp_path, questions(300))
    process = child(desk.root, 4, limit=4096)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith(f"error: {desk.journal}: cannot grow (File too large); free some space")
    assert "Traceback" not in errors
    assert not desk.out.exists()
    assert journaled(desk) > 5
    desk.run(3000, FakeEngine())
    assert desk.stats()["reused_rows"] > 0
