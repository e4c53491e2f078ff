"""Generation by a server that Eyrie starts: shared, restarted when it dies, and never the prompt's fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Engine, Server, parse_config
from eyrie.engines.http import Patience
from eyrie.engines.managed import ManagedEngine
from eyrie.errors import EyrieError
from eyrie.generate.stage import generate, journal_key
from eyrie.recipes import recipe
from eyrie.servers.process import wait_for
from eyrie.servers.spec import Files, Spec, State
from tests.generate_desk import STOP, Desk, FakeEngine, FakeRenderer, prompt_row, questions, recipe_of
from tests.servers.fake_python import FAKE, write_python

FAST = Patience(timeout=20.0, tries=3, outage=20.0, first_wait=0.01, longest_wait=0.05)
BUDGET = 1500


class House:
    """A folder with a fake server under the real supervisor."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.root, self.pids, self.asked_file = folder / "servers", folder / "pids", folder / "asked"

    def spec(self, *options: str, token_s: float = 0.003, **changes: Any) -> Spec:
        command = [sys.executable, str(FAKE), "--port", "{port}", "--name", "{name}", "--pids", str(self.pids)]
        command += ["--asked", str(self.asked_file), "--token-s", str(token_s), *options]
        quick = {"idle_s": 0.0, "grace_s": 1.0, "backoff_s": 0.05, "start_timeout_s": 20.0, "max_restarts": 100}
        return Spec.model_validate({"command": command, **quick, **changes})

    def engine(self, spec: Spec, concurrency: int = 8) -> ManagedEngine:
        return ManagedEngine(spec, self.root, frozenset({STOP}), concurrency, FAST)

    def asked(self) -> list[list[int]]:
        if not self.asked_file.exists():
            return []
        return [json.loads(line) for line in self.asked_file.read_text().splitlines()]

    def starts(self) -> list[int]:
        return list(map(int, self.pids.read_text().split())) if self.pids.exists() else []

    def state(self) -> State:
        (folder,) = self.root.iterdir()
        state = Files(folder).read_state()
        assert state is not None
        return state


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "house")
    yield house
    gone = [lambda pid=pid: not Path(f"/proc/{pid}").exists() for pid in house.starts()]
    assert wait_for(lambda: all(check() for check in gone), 20.0), "a server outlived its test"


@pytest.fixture
def calm(tmp_path: Path) -> bytes:
    desk = Desk(tmp_path / "calm", questions(200))
    desk.run(BUDGET, FakeEngine())
    return desk.out.read_bytes()


def run(desk: Desk, engine: Callable[[], ManagedEngine]) -> None:
    generate(
        recipe_of(BUDGET), prompts=desk.prompts, target=desk.target, model="m", out=desk.out, journal=desk.journal,
        engine=engine, renderer=FakeRenderer(),
    )  # fmt: skip


class Running(threading.Thread):
    """The stage in a thread, and what it raised."""

    def __init__(self, desk: Desk, engine: ManagedEngine) -> None:
        super().__init__()
        self.desk, self.engine, self.error = desk, engine, None
        self.start()

    def run(self) -> None:
        try:
            run(self.desk, lambda: self.engine)
        except EyrieError as error:
            self.error = error


def wait_until(done: Callable[[], bool]) -> None:
    assert wait_for(done, 30.0, every=0.01)


def test_a_shard_is_the_same_whoever_answers_and_the_server_ends_with_its_last_job(
    house: House, tmp_path: Path, calm: bytes
) -> None:
    desk = Desk(tmp_path / "run", questions(200))
    run(desk, lambda: house.engine(house.spec()))
    assert desk.out.read_bytes() == calm
    facts = desk.records()[0]["facts"]
    assert (facts["server"], facts["cached_tokens"]) == ("sglang 0.5.23", 1)
    assert house.state().phase == "stopped"


def test_a_server_that_dies_again_and_again_costs_neither_answers_nor_prompts(
    house: House, tmp_path: Path, calm: bytes
) -> None:
    desk = Desk(tmp_path / "run", questions(200))
    running = Running(desk, house.engine(house.spec()))
    deaths = 4  # more than a prompt has tries
    for death in range(1, deaths + 1):
        before = len(house.asked())
        wait_until(lambda: len(house.starts()) == death and len(house.asked()) > before)  # noqa: B023
        os.kill(house.starts()[-1], signal.SIGKILL)
    running.join(60)
    assert running.error is None
    assert len(house.starts()) == deaths + 1
    assert desk.out.read_bytes() == calm, "no prompt was refused for the server's deaths"
    assert desk.stats()["faults"]["died"] > 0
    assert "dropped" not in desk.stats()["faults"]
    journaled = [record["id"] for record in desk.records()]
    assert len(journaled) == len(set(journaled)), "an answer was bought twice"


def test_it_is_found_again_on_another_port(house: House, tmp_path: Path, calm: bytes) -> None:
    desk = Desk(tmp_path / "run", questions(200))
    running = Running(desk, house.engine(house.spec(backoff_s=1.0)))
    wait_until(lambda: len(house.asked()) > 16)  # of 8 at a time, so some are answered
    port = int(house.state().url.rpartition(":")[2])
    os.kill(house.starts()[0], signal.SIGKILL)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: takes(stranger, port))
        running.join(60)
    assert running.error is None
    assert desk.out.read_bytes() == calm
    urls = desk.stats()["served_by"]
    assert len(urls) == 2, urls


def takes(stranger: socket.socket, port: int) -> bool:
    try:
        stranger.bind(("127.0.0.1", port))
    except OSError:
        return False
    stranger.listen()
    return True


def test_a_server_that_is_given_up_ends_the_stage_with_its_last_words_and_answers_are_kept(
    house: House, tmp_path: Path, calm: bytes
) -> None:
    desk, broken = Desk(tmp_path / "run", questions(200)), tmp_path / "broken"
    spec = house.spec("--crash", str(broken), max_restarts=1)
    running = Running(desk, house.engine(spec))
    wait_until(lambda: len(desk.records()) > 5)
    broken.touch()
    os.kill(house.starts()[0], signal.SIGKILL)
    running.join(60)
    assert running.error is not None
    assert "status 3; its log ends: a weight is missing" in str(running.error)
    assert not desk.out.exists()
    broken.unlink()
    held = {record["id"] for record in desk.records()}
    before = len(house.asked())
    run(desk, lambda: house.engine(spec))
    assert desk.out.read_bytes() == calm
    again = {prompt_row(0, bytes(ids).decode())["id"] for ids in house.asked()[before:]}
    assert not held & again


def test_jobs_side_by_side_share_one_server(house: House, tmp_path: Path, calm: bytes) -> None:
    desks = [Desk(tmp_path / f"run{n}", questions(200)) for n in range(3)]
    spec = house.spec(idle_s=1.0)
    jobs = [Running(desk, house.engine(spec)) for desk in desks]
    for job in jobs:
        job.join(60)
    assert [job.error for job in jobs] == [None] * 3
    assert [desk.out.read_bytes() for desk in desks] == [calm] * 3
    assert len(house.starts()) == 1
    wait_until(lambda: house.state().phase == "stopped")


# ---- from the config ----
def config(**changes: Any) -> Any:
    raw = {
        "run": "r", "target": {"model": "m"}, "engine": {"kind": "sglang"},
        "datasets": {"code": {"adapter": "jsonl", "token_budget": 1000}},
    }  # fmt: skip
    return parse_config({**raw, **changes})


def made_of(**changes: Any) -> dict[str, Any]:
    return recipe(config(**changes), "generate", dataset="code", shard="s0000")


def test_what_a_server_computes_is_in_the_recipe_and_where_it_runs_is_not() -> None:
    plain = made_of()
    assert "server" not in plain
    elsewhere = {"python": "other", "device": "cpu", "tensor_parallel": 4, "max_running_requests": 99, "idle_s": 5.0,
                 "memory_fraction": 0.5, "preset": "pcie-latency", "host_cache_gb": 1}  # fmt: skip
    assert made_of(server=elsewhere) == plain
    content = {"kv_cache": "fp8", "flags": {"quantization": "fp8"}}
    assert made_of(server=content)["server"] == content
    own = {"kind": "sglang", "urls": ["http://a:1"]}
    assert made_of(engine=own, server=content) == plain, "of your own servers Eyrie knows no options"
    assert journal_key(made_of(server=content), {}) != journal_key(plain, {})
    assert Server(python="p", kv_cache="fp8").with_recipe({"flags": {"page-size": 1}}) == Server(
        python="p", flags={"page-size": 1}
    )


def test_answers_that_do_not_fit_the_server_are_refused_before_it_starts() -> None:
    message = r"datasets\.code\.sampling\.max_tokens \(256\) leaves no room .* within server\.context_length \(200\)"
    with pytest.raises(EyrieError, match=message):
        config(server={"context_length": 200, "pool_tokens": 999})
    with pytest.raises(EyrieError, match=r"within server\.pool_tokens \(99\)"):
        config(server={"context_length": 200, "pool_tokens": 99})
    config(engine={"kind": "sglang", "urls": ["http://a:1"]}, server={"context_length": 200})


def test_the_engine_of_the_config_is_leased_from_its_server_section(tmp_path: Path, calm: bytes) -> None:
    desk = Desk(tmp_path / "run", questions(200))
    (tmp_path / "model").mkdir()
    server = Server(python=str(write_python(tmp_path)), device="cpu", max_running_requests=5, idle_s=0.0)
    generate(
        recipe_of(BUDGET) | {"engine": {"kind": "sglang"}, "server": {"flags": {"page-size": 1}}},
        prompts=desk.prompts, target=desk.target, model=str(tmp_path / "model"), out=desk.out, journal=desk.journal,
        options=Engine(kind="sglang"), server=server, servers=tmp_path / "servers", renderer=FakeRenderer(),
    )  # fmt: skip
    assert desk.out.read_bytes() == calm
    (folder,) = (tmp_path / "servers").iterdir()
    command = Files(folder).read_spec().command
    given = {name: command[command.index(f"--{name}") + 1] for name in ("model-path", "dtype", "page-size")}
    assert given == {"model-path": str(tmp_path / "model"), "dtype": given["dtype"], "page-size": "1"}
    assert given["dtype"] in ("float32", "bfloat16")


def test_without_an_environment_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", questions(20))
    (tmp_path / "model").mkdir()
    with pytest.raises(EyrieError, match=r"server\.python: there is no interpreter nowhere; make it with"):
        generate(
            recipe_of(30) | {"engine": {"kind": "sglang"}}, prompts=desk.prompts, target=desk.target,
            model=str(tmp_path / "model"), out=desk.out, journal=desk.journal, options=Engine(kind="sglang"),
            server=Server(python="nowhere", device="cpu"), servers=tmp_path / "servers", renderer=FakeRenderer(),
        )  # fmt: skip
