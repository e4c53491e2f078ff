"""The generate stage in a process of its own: a real SIGKILL, a real limit on file size."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fake_server import FakeServer
from tests.generate_desk import Desk, FakeEngine, prompt_row, questions
from tests.turns_desk import desk_of

CHILD = """
import resource, sys
from pathlib import Path
from eyrie.errors import run_cli
from eyrie.generate.stage import generate
from tests.generate_desk import FakeEngine, FakeRenderer, recipe_of
from tests.turns_desk import TalkRenderer

root, slots, limit, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
run_cli(lambda: generate(
    {**recipe_of(3000), **({"turns": turns} if turns else {})}, prompts=root / "code/s0000.jsonl.zst",
    target=root / "target.json", model="m", out=root / "responses/s0000.jsonl.zst",
    journal=root / "journal/s0000.jsonl",
    engine=lambda: FakeEngine(slots, order=slots, sleep=0.004), renderer=TalkRenderer() if turns else FakeRenderer(),
    progress=root / "logs/s0000.json",
))
"""


def child(root: Path, slots: int, limit: int = 0, turns: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(root), str(slots), str(limit), str(turns)]
    home = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=home, env={**os.environ, "PYTHONPATH": str(home)}, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("turns", [0, 9])
def test_killed_at_any_moment_and_run_again_the_shard_is_byte_identical(tmp_path: Path, turns: int) -> None:
    def desk_in(folder: Path) -> Desk:
        return desk_of(folder, 200) if turns else Desk(folder, questions(300))

    desk, calm = desk_in(tmp_path / "disturbed"), desk_in(tmp_path / "calm")
    calm.run(3000, FakeEngine())
    draw = random.Random(4)
    answers = 0
    for slots in (1, 7, 32, 16):
        process = child(desk.root, slots, turns=turns)
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
    process = child(desk.root, 5, turns=turns)
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


SERVED = """
import json, sys
from pathlib import Path
from eyrie.config import Engine
from eyrie.engines import http
from eyrie.errors import run_cli
from eyrie.generate.stage import generate
from eyrie.recipes import subtree
from tests.generate_desk import FakeRenderer, recipe_of

made = http.Patience
http.Patience = lambda *args: made(*args, first_wait=0.01, longest_wait=0.05)
root, options = Path(sys.argv[1]), Engine.model_validate(json.loads(sys.argv[2]))
run_cli(lambda: generate(
    {**recipe_of(3000), "engine": subtree(options)}, prompts=root / "code/s0000.jsonl.zst",
    target=root / "target.json", model="m", out=root / "responses/s0000.jsonl.zst",
    journal=root / "journal/s0000.jsonl", options=options, renderer=FakeRenderer(),
))
"""


def kill_and_resume(root: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Kill the stage ``kills`` times while a faulty server answers it; the count of tries, and what went wrong.

    Returns ``tries``, ``kills``, ``lost`` (rows that differ from an undisturbed shard), ``bought_twice`` (prompts that
    were asked for although their answer was in the journal).
    """
    desk, calm = Desk(root / "disturbed", questions(300)), Desk(root / "calm", questions(300))
    calm.run(3000, FakeEngine())
    draw = random.Random(seed)
    done = bought_twice = 0
    with FakeServer(share=0.3, most=3, delay=lambda ids: 0.01 + sum(ids) % 7 / 50) as server:
        while True:
            options = {"kind": "sglang", "urls": [server.url], "concurrency": draw.choice([1, 4, 16, 64])}
            held, asked = {record["id"] for record in desk.records()}, len(server.asked)
            command = [sys.executable, "-c", SERVED, str(desk.root), json.dumps({**options, "tries": 12})]
            home = Path(__file__).parents[2]
            process = subprocess.Popen(command, cwd=home, env={**os.environ, "PYTHONPATH": str(home)})
            while done < kills and process.poll() is None and len(server.asked) == asked:
                time.sleep(0.005)
            if done < kills:
                time.sleep(draw.uniform(0.0, 0.15))
                process.send_signal(signal.SIGKILL)
            process.wait()
            bought_twice += len(held & {prompt_row(0, name)["id"] for name in server.asked[asked:]})
            done += process.returncode == -signal.SIGKILL
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL
    rows, wanted = desk.rows(), calm.rows()
    lost = sum(row not in rows for row in wanted) + abs(len(rows) - len(wanted))
    return {"tries": done + 1, "kills": done, "lost": lost, "bought_twice": bought_twice} | {
        "identical": int(desk.out.read_bytes() == calm.out.read_bytes())
    }


def test_killed_while_servers_answer_and_run_again_nothing_is_lost_or_bought_twice(tmp_path: Path) -> None:
    figures = kill_and_resume(tmp_path, kills=8)
    assert figures["kills"] >= 3, "the stage was hit while it worked"
    assert {name: figures[name] for name in ("lost", "bought_twice", "identical")} == {
        "lost": 0, "bought_twice": 0, "identical": 1,
    }  # fmt: skip
