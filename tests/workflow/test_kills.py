"""Kills of the whole house: Snakemake, its jobs, the server that they share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from eyrie.orphan import WORKFLOW
from eyrie.servers.process import wait_for
from tests.workflow.kill_run import VICTIMS, KillRun


def test_server_worker_and_workflow_are_killed_and_nothing_is_lost_or_left(tmp_path: Path) -> None:
    run = KillRun(tmp_path, kills=3)
    figures = run.disturb(kills=3)
    assert figures["kills"] == dict.fromkeys(VICTIMS, 1)
    clean = {"lost": 0, "doubled": 0, "bought_twice": 0, "left": 0, "identical": 1}
    assert {name: figures[name] for name in clean} == clean, run.said()


def test_two_living_workflows_refuse_each_other_and_a_dead_one_refuses_nobody(tmp_path: Path) -> None:
    run = KillRun(tmp_path, kills=1)
    locks = tmp_path / ".snakemake" / "locks"
    first = run.start("prompts")
    try:
        assert wait_for(lambda: len(list(locks.glob("*.lock"))) == 2 or first.poll() is not None, 300.0)
        first.send_signal(signal.SIGSTOP)
        held = sorted(locks.glob("*.lock"))
        assert [path.name for path in held] == ["0.input.lock", "0.output.lock"]
        assert run.start("prompts", "--dry-run").wait() == 0, run.said()
        assert run.start("prompts").wait() == 1
        assert "LockException" in run.said()
        assert sorted(locks.glob("*.lock")) == held, "whoever only looked, or was refused, took no lock away"
    finally:
        first.kill()
        first.wait()
    assert sorted(locks.glob("*.lock")) == held
    assert run.start("prompts").wait() == 0, run.said()
    assert "removed the locks of a workflow that was killed" in run.said()
    assert not locks.exists()


JOB = """
import sys, time
from eyrie.errors import run_cli
run_cli(lambda: (print("works", flush=True), time.sleep(60)))
"""


def test_a_job_ends_with_its_workflow_and_not_before() -> None:
    workflow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    environment = {**os.environ, WORKFLOW: str(workflow.pid)}
    job = subprocess.Popen([sys.executable, "-c", JOB], env=environment, stdout=subprocess.PIPE, text=True)
    by_hand = subprocess.Popen(
        [sys.executable, "-c", JOB], env={**os.environ, WORKFLOW: ""}, stdout=subprocess.PIPE, text=True
    )
    try:
        for process in (job, by_hand):
            assert process.stdout is not None
            assert process.stdout.readline() == "works\n"
        assert job.poll() is None
        workflow.kill()
        workflow.wait()
        assert job.wait(20) == -signal.SIGTERM
        assert by_hand.poll() is None
        late = subprocess.run([sys.executable, "-c", JOB], env=environment, capture_output=True, text=True, timeout=30)
        assert late.returncode == -signal.SIGTERM, "its workflow was gone before it began"
        assert late.stderr == f"the workflow (process {workflow.pid}) has ended, so this job ends too\n"
    finally:
        for process in (workflow, job, by_hand):
            process.kill()
            process.communicate()
