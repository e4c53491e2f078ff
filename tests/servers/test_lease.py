"""Servers start on the first lease, are handed out when they answer, come back when they die, and never stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie.errors import EyrieError
from eyrie.locks import is_held
from eyrie.servers.lease import Lease, _listens, lease
from eyrie.servers.probe import ask
from eyrie.servers.process import wait_for
from eyrie.servers.spec import Files, Spec, State, dump_spec
from eyrie.servers.supervisor import Supervisor

FAKE = Path(__file__).with_name("launched_server.py")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for pid in desk.supervisors():
        if alive(pid):
            os.kill(pid, signal.SIGTERM)
    assert wait_for(lambda: not any(map(alive, desk.pids())), 20.0), "a server outlived its test"


class Desk:
    """A folder with fake servers, and what happened to them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.seen = folder / "servers", folder / "pids"

    def spec(self, *options: str, **changes: object) -> Spec:
        fixed = (sys.executable, str(FAKE), "--port", "{port}", "--name", "{name}", "--pids", str(self.seen))
        values = {"idle_s": 0.0, "grace_s": 1.0, "backoff_s": 0.05, "start_timeout_s": 20.0, **changes}
        return Spec.model_validate({"command": (*fixed, *options), **values})

    def starts(self) -> list[list[int]]:
        """Pids of the server and its workers, one list per start."""
        return (
            [list(map(int, line.split())) for line in self.seen.read_text().splitlines()] if self.seen.exists() else []
        )

    def pids(self) -> list[int]:
        return [pid for start in self.starts() for pid in start]

    def supervisors(self) -> list[int]:
        states = [Files(folder).read_state() for folder in self.root.glob("*")]
        return [state.supervisor for state in states if state is not None]

    def state(self, spec: Spec) -> State:
        state = Files(spec.folder(self.root.resolve())).read_state()
        assert state is not None
        return state


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def die(held: Lease) -> None:
    """The server drops the connection first and its port a moment later; a test goes on from the latter."""
    url = held.ready().url
    with pytest.raises(OSError, match=r".*"):
        ask(f"{url}/die", {})
    end = time.monotonic() + 30
    while _listens(url) and time.monotonic() < end:
        time.sleep(0.01)


def test_the_first_lease_starts_it_and_the_last_one_stops_it(desk: Desk) -> None:
    spec = desk.spec()
    with lease(spec, desk.root) as first:
        assert ask(f"{first.ready().url}/generate", {"input_ids": [1]}) == {"output_ids": [7]}
        with lease(spec, desk.root) as second:
            assert second.ready() == first.ready()
        assert alive(desk.pids()[0])
    assert len(desk.starts()) == 1
    assert not alive(desk.pids()[0])
    assert desk.state(spec).phase == "stopped"


def test_an_unused_server_is_kept_for_the_next_job_and_then_stopped(desk: Desk) -> None:
    spec = desk.spec(idle_s=1.5)
    with lease(spec, desk.root):
        pass
    assert alive(desk.pids()[0])
    with lease(spec, desk.root):
        pass
    assert len(desk.starts()) == 1
    assert wait_for(lambda: not alive(desk.pids()[0]), 15.0)


def test_other_arguments_are_another_server(desk: Desk) -> None:
    with lease(desk.spec(), desk.root) as one, lease(desk.spec("--pool", "9000"), desk.root) as two:
        assert one.ready().url != two.ready().url
        assert (one.ready().pool_tokens, two.ready().pool_tokens) == (8192, 9000)


def test_a_healthy_server_that_generates_nothing_is_not_ready(desk: Desk) -> None:
    spec = desk.spec("--mute", start_timeout_s=2.0)
    with pytest.raises(EyrieError, match="gave no answer within 2 s"), lease(spec, desk.root):
        pass
    assert not alive(desk.pids()[0])


def test_a_stranger_on_the_port_is_not_taken_for_ours(desk: Desk) -> None:
    spec = desk.spec(start_timeout_s=2.0)
    renamed = tuple("someone-else" if part == "{name}" else part for part in spec.command)
    spec = spec.model_copy(update={"command": renamed})
    with pytest.raises(EyrieError, match="gave no answer"), lease(spec, desk.root):
        pass


def test_a_pool_under_nine_tenths_of_the_plan_is_refused(desk: Desk) -> None:
    with lease(desk.spec("--pool", "900", planned_pool_tokens=1000), desk.root) as held:
        assert held.ready().pool_tokens == 900
    spec = desk.spec("--pool", "899", planned_pool_tokens=1000)
    message = r"899 key-value tokens, the plan counts on 1,000.*server\.pool_tokens"
    with pytest.raises(EyrieError, match=message), lease(spec, desk.root):
        pass
    assert not any(map(alive, desk.pids()))


def test_a_server_that_cannot_start_is_reported_once_with_its_last_words(desk: Desk, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    spec = desk.spec("--crash", str(broken))
    with pytest.raises(EyrieError, match="status 3; its log ends: a weight is missing"), lease(spec, desk.root):
        pass
    assert len(desk.starts()) == 1
    broken.unlink()
    with lease(spec, desk.root):  # mended: the next lease tries again
        assert len(desk.starts()) == 2


def test_a_port_that_was_taken_meanwhile_is_no_failure(desk: Desk, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with lease(desk.spec("--busy", str(busy)), desk.root) as held:
        assert held.ready().restarts == 1


def test_a_server_that_dies_in_the_middle_comes_back(desk: Desk) -> None:
    with lease(desk.spec(), desk.root) as held:
        for deaths in (1, 2):
            die(held)
            assert wait_for(lambda: len(desk.starts()) == deaths + 1, 15.0)  # noqa: B023
            assert ask(f"{held.ready().url}/generate", {"input_ids": [1]})["output_ids"] == [7]
            assert held.ready().restarts == deaths


def test_it_is_given_up_after_too_many_deaths_in_a_row(desk: Desk, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with lease(desk.spec("--crash", str(broken), max_restarts=2), desk.root) as held:
        broken.touch()
        die(held)
        with pytest.raises(EyrieError, match="a weight is missing"):
            held.ready()
    assert len(desk.starts()) == 3


def test_pauses_between_restarts_double_up_to_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("eyrie.servers.supervisor.wait_for", lambda told, seconds: pauses.append(seconds))
    Files(tmp_path).spec.write_text(dump_spec(Spec(command=("any",), backoff_s=1.0)))
    supervisor = Supervisor(tmp_path)
    for death in range(1, 10):
        supervisor.back_off(death, "it died")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("child", ["group", "own-session"])
@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
def test_it_is_stopped_with_its_workers_even_when_they_ignore_it(desk: Desk, child: str, deaf: tuple[str, ...]) -> None:
    with lease(desk.spec("--child", child, *deaf), desk.root):
        assert len(desk.pids()) == 2
        assert all(map(alive, desk.pids()))
    assert not any(map(alive, desk.pids()))


@pytest.mark.parametrize("victim", ["job", "supervisor", "guard", "server"])
def test_a_kill_leaves_nothing_behind(desk: Desk, victim: str) -> None:
    spec = desk.spec("--child", "group", idle_s=0.0)
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, spec.model_dump_json(), str(desk.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "leased\n"
        state = desk.state(spec)
        pid = {"job": job.pid, "supervisor": state.supervisor, "guard": state.guard, "server": desk.pids()[0]}[victim]
        first = desk.starts()[0]
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not any(map(alive, first)), 15.0), "a process of the dead server is left"
    finally:
        job.kill()
        job.communicate()
    assert wait_for(lambda: not any(map(alive, desk.pids())), 15.0)


JOB = """
import sys, time
from pathlib import Path
from eyrie.servers.lease import lease
from eyrie.servers.spec import Spec
with lease(Spec.model_validate_json(sys.argv[1]), Path(sys.argv[2])):
    print("leased", flush=True)
    time.sleep(60)
"""


def test_a_dead_supervisor_is_replaced(desk: Desk) -> None:
    spec = desk.spec()
    with lease(spec, desk.root) as held:
        os.kill(desk.state(spec).supervisor, signal.SIGKILL)
        assert wait_for(lambda: not alive(desk.pids()[0]), 15.0)
        assert ask(f"{held.ready().url}/generate", {"input_ids": [1]})["output_ids"] == [7]
        assert len(desk.starts()) == 2


def test_the_next_server_waits_for_the_last_one_to_be_gone(desk: Desk) -> None:
    spec = desk.spec("--deaf", grace_s=2.0)  # deaf: it lives on for the whole grace after its supervisor's death
    with lease(spec, desk.root) as held:
        os.kill(desk.state(spec).supervisor, signal.SIGKILL)
        wait_for(lambda: not is_held(held.files.alive), 5.0)
        held.ready()
        assert len(desk.starts()) == 2
        assert not alive(desk.pids()[0])


def test_processes_of_others_are_left_alone(desk: Desk) -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own = os.getpgid(0)
    try:
        with lease(desk.spec("--child", "group"), desk.root):
            pass
        assert neighbour.poll() is None
        assert os.getpgid(0) == own
    finally:
        neighbour.kill()
        neighbour.wait()


def test_many_jobs_at_once_share_one_start(desk: Desk) -> None:
    spec = desk.spec(idle_s=1.0)
    code = JOB.replace("time.sleep(60)", "time.sleep(0.5)")
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, spec.model_dump_json(), str(desk.root)], stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    assert [job.communicate(timeout=60)[0] for job in jobs] == [b"leased\n"] * 6
    assert len(desk.starts()) == 1


def test_the_throughput_of_the_log_reaches_the_state(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = desk.spec()
    with lease(spec, desk.root) as held:
        ask(f"{held.ready().url}/generate", {"input_ids": [1]})
        assert wait_for(lambda: desk.state(spec).tokens_per_s == 41.5, 10.0)
        assert desk.state(spec).version == "0.5.23"
