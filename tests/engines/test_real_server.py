"""Answers from a real SGLang that Eyrie starts, on the CPU: one start for all tests but those that kill it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from eyrie.config import Engine, Server
from eyrie.engines.cache_gate import follow
from eyrie.formats.publish import write_json
from eyrie.generate.stage import generate
from eyrie.servers.lease import lease
from eyrie.servers.process import members, wait_for
from eyrie.servers.spec import Files, State
from eyrie.targets.card import identify, read_card
from tests.generate_desk import Desk, recipe_of
from tests.servers.test_lease import alive

pytestmark = pytest.mark.slow

SAID = ["the capital of France", "a short letter to my friend", "two numbers", "the weather", "the lazy dog", "a book"]
CONTENTS = [f"Please write {what} {n} times." for n in range(10) for what in SAID]
BUDGET, MAX_TOKENS = 500, 32


class House:
    """The tiny target, a folder for the server's files, and a way to answer a shard."""

    def __init__(self, folder: Path, model: Path, python: Path) -> None:
        self.folder, self.model, self.servers = folder, model, folder / "servers"
        self.server = Server(python=str(python), device="cpu", idle_s=600.0)
        self.stop_ids: list[int] = []

    def desk(self, name: str) -> Desk:
        desk = Desk(self.folder / name, CONTENTS)
        identify({"target": {}}, str(self.model), desk.target)
        if self.stop_ids:
            card = read_card(desk.target)
            write_json(desk.target, card.model_copy(update={"stop_ids": self.stop_ids}).model_dump())
        return desk

    def answer(self, desk: Desk, kind: str, **more: Any) -> None:
        """``more``: further parts of the recipe."""
        made_of: dict[str, Any] = {
            "target": {"dtype": "float32"},
            "engine": {} if kind == "transformers" else {"kind": kind},
        }
        generate(
            recipe_of(BUDGET, max_tokens=MAX_TOKENS) | made_of | more, prompts=desk.prompts, target=desk.target,
            model=str(self.model), out=desk.out, journal=desk.journal, options=Engine(kind=kind),
            server=self.server, servers=self.servers,
        )  # fmt: skip

    def files(self) -> Files:
        (folder,) = self.servers.iterdir()
        return Files(folder)

    def state(self) -> State:
        state = self.files().read_state()
        assert state is not None
        return state


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, serving_python: Path) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("real"), tiny_target, serving_python)
    endless = house.desk("endless")
    house.answer(endless, "transformers")
    # random weights hardly ever end an answer: a token that many answers hold shall do so
    often = Counter(id for row in endless.rows() for id in set(row["output_ids"])).most_common(1)[0][0]
    house.stop_ids = sorted({2, often})
    yield house
    if not house.servers.exists():
        return
    state = house.state()
    left = [state.supervisor, state.guard, *members(state.guard)]
    os.kill(state.supervisor, signal.SIGTERM)
    assert wait_for(lambda: not any(map(alive, left)), 90.0), "a process was left behind"


@pytest.fixture(scope="module")
def calm(house: House) -> Desk:
    """The shard as the engine in this process makes it."""
    desk = house.desk("calm")
    house.answer(desk, "transformers")
    return desk


def test_a_real_server_makes_the_shard_of_the_engine_in_this_process(house: House, calm: Desk) -> None:
    desk = house.desk("served")
    house.answer(desk, "sglang")
    assert desk.out.read_bytes() == calm.out.read_bytes()
    facts = desk.records()[0]["facts"]
    assert (facts["server"], facts["prompt_tokens"]) == ("sglang 0.5.23", len(desk.records()[0]["prompt_ids"]))
    assert {row["finish_reason"] for row in desk.rows()} == {"stop", "length"}
    assert house.state().pool_tokens == 16_384


def test_a_real_server_follows_its_own_answers(house: House, calm: Desk) -> None:
    rows = calm.rows()[:8]
    with lease(house.files().read_spec(), house.servers) as held:
        right = follow(
            held, [row["prompt_ids"] for row in rows], [[(id, 0.0) for id in row["output_ids"]] for row in rows]
        )
        bent = [[(id if n != 5 else 3, 0.0) for n, id in enumerate(row["output_ids"])] for row in rows]
        wrong = follow(held, [row["prompt_ids"] for row in rows], bent)
    assert right.same == right.decoded == sum(len(row["output_ids"]) - 1 for row in rows)
    assert right.drift > 0, "the server gave log-probabilities"
    assert wrong.same < wrong.decoded


def test_a_real_server_that_is_killed_in_the_middle_comes_back_and_the_shard_is_the_same(
    house: House, calm: Desk, long_serving_python: Path
) -> None:
    desk = house.desk("killed")
    job = Thread(target=house.answer, args=(desk, "sglang"))
    job.start()
    assert wait_for(lambda: len(desk.records()) > 3, 300.0, every=0.02)
    for pid in members(house.state().guard):
        os.kill(pid, signal.SIGKILL)
    job.join(900)
    assert desk.out.read_bytes() == calm.out.read_bytes()
    assert house.state().restarts == 1
    ids = [record["id"] for record in desk.records()]
    assert len(ids) == len(set(ids)), "an answer was bought twice"


def test_a_real_server_with_an_fp8_cache_is_held_against_the_plain_one(house: House, long_serving_python: Path) -> None:
    """A random target is far from sure of its words, so the gate stands as low as it can: that it looks is tested."""
    other = House(house.folder / "fp8", house.model, long_serving_python)
    changed = {"kv_cache_gate": 0.01, "idle_s": 0.0}
    other.server, other.stop_ids = other.server.model_copy(update=changed), house.stop_ids
    other.answer(other.desk("answers"), "sglang", server={"kv_cache": "fp8"})
    (record,) = other.servers.glob("*/kv_cache.json")
    figures = json.loads(record.read_text())
    assert figures["plain_agreement"] == 1.0
    assert 0.01 <= figures["agreement"] <= 1.0
    assert figures["logprob_drift"] > 0, "rounded keys and values change probabilities"
    assert "fp8_e4m3" in Files(record.parent).read_spec().command
