"""Locks of dead workflows, told from those of living ones by other processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyrie.workdir import LIVING, STATE, enter

WORKFLOW = """
import sys, time
from pathlib import Path
from eyrie.workdir import enter
assert enter(Path(sys.argv[1])) is not None
Path(sys.argv[1], ".snakemake/locks").mkdir(exist_ok=True)
Path(sys.argv[1], ".snakemake/locks", sys.argv[2] + ".output.lock").write_text("results/a\\n")
print("works", flush=True)
time.sleep(60)
"""


@contextmanager
def workflow(folder: Path, number: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that has entered, locked and works; killed at the end."""
    command = [sys.executable, "-c", WORKFLOW, str(folder), str(number)]
    home = Path(__file__).parents[1]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(home)}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "works\n"
            yield process
        finally:
            process.kill()


def locks(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / STATE / "locks").glob("*"))


def entered(folder: Path) -> list[str]:
    """Enter and leave; the locks that are left."""
    descriptor = enter(folder)
    assert descriptor is not None
    os.close(descriptor)
    return locks(folder)


def test_the_locks_of_a_killed_workflow_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    with workflow(tmp_path) as first:
        assert entered(tmp_path) == ["0.output.lock"]
        with workflow(tmp_path, 1):
            first.kill()
            first.wait()
            assert entered(tmp_path) == ["0.output.lock", "1.output.lock"], "whose they are is not known"
    assert entered(tmp_path) == []


def test_locks_of_another_machine_stay_until_a_person_removes_them(tmp_path: Path) -> None:
    with workflow(tmp_path):
        pass
    living = tmp_path / STATE / LIVING
    assert platform.node() in living.read_text()
    living.write_text("elsewhere 0f6d\n")
    assert entered(tmp_path) == ["0.output.lock"]
    assert entered(tmp_path) == ["0.output.lock"], "having been here makes them nobody else's"
    (tmp_path / STATE / "locks" / "0.output.lock").unlink()
    with workflow(tmp_path):
        pass
    assert entered(tmp_path) == [], "the other machine is forgotten once no lock is left"


def test_a_machine_that_was_started_again_or_is_seen_from_a_container_is_the_same(tmp_path: Path) -> None:
    for was in (f"{platform.node()} an-earlier-start", Path("/proc/sys/kernel/random/boot_id").read_text().strip()):
        with workflow(tmp_path):
            pass
        (tmp_path / STATE / LIVING).write_text(f"{was}\n")
        assert entered(tmp_path) == []


def test_locks_that_were_there_before_anybody_entered_stay(tmp_path: Path) -> None:
    (tmp_path / STATE / "locks").mkdir(parents=True)
    (tmp_path / STATE / "locks" / "0.input.lock").write_text("a\n")
    assert entered(tmp_path) == ["0.input.lock"]


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text("a file where the folder should be")
    assert enter(tmp_path) is None
