"""Progress of answers: the line, the file, and what a reader makes of many files."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eyrie.engines.base import Answer, Request
from eyrie.formats.publish import write_json
from eyrie.generate.answers import Counts
from eyrie.generate.board import Board, boards, of_dataset, table
from eyrie.generate.budget import Budget
from eyrie.generate.forecast import Pace
from tests.fake_server import FakeServer
from tests.generate_desk import Desk, FakeEngine, questions


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_file_says_what_is_there_and_what_is_in_flight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock, budget, counts = Clock(), Budget(1000, 100), Counts()
    pace, path = Pace(clock), tmp_path / "logs" / "code" / "s0003.json"
    board = Board("code/s0003", path, every=5.0, clock=clock)
    with board.showing(budget, counts, pace, turns=1):
        for position in range(3):
            budget.start(position)
            pace.asked(position)
        clock.now += 4
        pace.ended(0, 80)
        budget.book(0, 80)
        counts.outcomes["stop"] += 1
        counts.book(80, {"cost": 0.25, "faults": {"429": 2}})
        clock.now += 2
        board.moved()
        said = json.loads(path.read_text())
    assert said["state"] == "running"
    assert {
        "dataset": "code",
        "shard": "s0003",
        "token_budget": 1000,
        "tokens": 80,
        "in_flight": 2,
    }.items() <= said.items()
    assert said["tokens_in_flight"] == 2 * 100, "two for six seconds at 20 a second, bounded by max_tokens"
    assert said["tokens_per_second"] == pytest.approx(280 / 6, abs=0.01)
    assert said["faults"] == {"429": 2}
    assert said["dollars"] == 0.25
    low, high = said["remaining_seconds"]
    assert 0 < low < high
    assert json.loads(path.read_text())["state"] == "done"
    assert [entry.name for entry in path.parent.iterdir()] == ["s0003.json"]
    assert "error 429 2" in capsys.readouterr().err


def test_an_interrupted_stage_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s0000.json"
    with pytest.raises(KeyboardInterrupt), Board("code/s0000", path).showing(Budget(9, 9), Counts(), Pace(), 1):
        raise KeyboardInterrupt
    assert json.loads(path.read_text())["state"] == "stopped"


def test_it_is_shown_while_no_answer_ends(tmp_path: Path) -> None:
    desk = Desk(tmp_path, questions(3))
    seen: list[dict[str, Any]] = []

    class Slow(FakeEngine):
        @staticmethod
        def of(request: Request) -> Answer:
            until = time.monotonic() + 10
            while not (desk.progress.exists() and (said := json.loads(desk.progress.read_text()))["in_flight"]):
                assert time.monotonic() < until, "nothing is shown before an answer ends"
                time.sleep(0.02)
            seen.append(said)
            return FakeEngine.of(request)

    desk.run(1000, Slow(slots=3))
    assert seen[0]["state"] == "running"
    assert seen[0]["tokens"] == 0
    assert json.loads(desk.progress.read_text())["tokens"] == sum(len(row["output_ids"]) for row in desk.rows())
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "_tick" in t.name]


def test_faults_and_dollars_of_servers_are_in_the_file(tmp_path: Path) -> None:
    desk = Desk(tmp_path, questions(20))
    with FakeServer(share=0.5, faults=("500",), most=1) as server:
        desk.run_served(150, {"kind": "sglang", "urls": [server.url], "concurrency": 4})
        faults = server.injected["500"]
    said = json.loads(desk.progress.read_text())
    assert said["faults"] == {"500": faults}
    assert said["faults"] == desk.stats()["faults"]


def shard(name: str, state: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "format": 1, "dataset": "code", "shard": name, "state": state, "updated": time.time(), "token_budget": 1000,
        "tokens": tokens, "tokens_in_flight": 40, "tokens_per_second": 10.0, "in_flight": 4, "answers": 7,
        "truncated": 1, "unusable": {"drifted": 1}, "faults": {"429": 2}, "dollars": 0.5,
        "remaining_seconds": [50.0, 80.0], **more,
    }  # fmt: skip


def test_a_dataset_is_the_sum_of_its_shards(tmp_path: Path) -> None:
    running = shard("s0001", "running", 400)
    done = shard("s0000", "done", 1010, in_flight=0, tokens_in_flight=0, remaining_seconds=[0.0, 0.0])
    lost = shard("s0002", "running", 100, updated=time.time() - 3600)
    for said in (running, done, lost):
        write_json(tmp_path / "code" / f"{said['shard']}.json", said)
    (tmp_path / "code" / "half.json").write_text("{")
    (tmp_path / "code" / "other.json").write_text("[1]")
    found = boards(tmp_path)
    assert [said["state"] for said in found] == ["done", "running", "lost"]
    whole = of_dataset("code", 4000, found)
    assert whole["tokens"] == 1510
    assert whole["in_flight"] == 4
    assert whole["errors"] == {"drifted": 3, "error 429": 6}
    assert whole["dollars"] == 1.5
    # 2,000 tokens are in no shard that runs or is done: 200 s more at 10 a second, give or take a quarter
    assert whole["remaining_seconds"] == [50 + 150, 80 + 250]
    lines = table({"code": 4000, "none": 10}, found).splitlines()
    assert lines[0].startswith("code: 1,510 of 4,000 tokens (37%), 10 tokens/s, 4 in flight with 40 tokens")
    assert lines[0].endswith("$1.5000, 3 min 20 s to 5 min 30 s left, 1 shard done")
    assert lines[1].startswith("  s0001 (running): 400 of 1,000 tokens (40%)")
    assert lines[2].startswith("  s0002 (lost): ")
    assert lines[3].startswith("none: 0 of 10 tokens (0%)")
