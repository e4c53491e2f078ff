"""An fp8 cache answers only when its server goes on as the plain one does, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Engine, Server
from eyrie.engines.cache_gate import CacheGate
from eyrie.errors import EyrieError
from eyrie.generate.stage import generate
from tests.generate_desk import Desk, FakeEngine, FakeRenderer, questions, recipe_of
from tests.servers.fake_python import write_python

BUDGET = 300


class House(Desk):
    """A desk whose server strays from the plain one as far as ``drift`` says, once its cache is fp8."""

    def __init__(self, root: Path, drift: float) -> None:
        root.mkdir()
        super().__init__(root / "run", questions(60))
        self.place, self.model = root, root / "model"
        self.model.mkdir()
        self.python = write_python(root)
        self.set_drift(drift)

    def set_drift(self, drift: float) -> None:
        (self.place / "drift").write_text(str(drift))

    def answer(self, budget: int = BUDGET, kv_cache: str = "fp8", max_tokens: int = 24, **options: Any) -> None:
        server = Server.model_validate({"python": str(self.python), "device": "cpu", "idle_s": 0.0, **options})
        made_of = recipe_of(budget, max_tokens=max_tokens)
        generate(
            made_of | {"engine": {"kind": "sglang"}, "server": {"kv_cache": kv_cache}}, prompts=self.prompts,
            target=self.target, model=str(self.model), out=self.out, journal=self.journal,
            options=Engine(kind="sglang"), server=server, servers=self.place / "servers", renderer=FakeRenderer(),
        )  # fmt: skip

    def starts(self) -> list[str]:
        """The caches of the servers that were started, in order."""
        path = self.place / "caches"
        return path.read_text().split() if path.exists() else []

    def record(self) -> dict[str, Any]:
        (path,) = self.place.glob("servers/*/kv_cache.json")
        return dict(json.loads(path.read_text()))


def test_a_cache_that_changes_nothing_answers_and_is_compared_once(tmp_path: Path) -> None:
    house, calm = House(tmp_path / "house", 0.0), Desk(tmp_path / "calm", questions(60))
    house.answer()
    calm.run(BUDGET, FakeEngine())
    assert house.out.read_bytes() == calm.out.read_bytes()
    assert house.starts() == ["auto", "fp8_e4m3", "fp8_e4m3"]
    found = house.record()
    assert (found["agreement"], found["plain_agreement"], found["logprob_drift"]) == (1.0, 1.0, 0.0)
    assert (found["sglang"], found["target"], found["prompts"]) == ("0.5.23", "target of the day", 8)
    house.answer(2 * BUDGET)
    assert house.starts()[3:] == ["fp8_e4m3"]
    house.set_target("another target")
    house.answer(2 * BUDGET)
    assert house.starts()[4:] == ["auto", "fp8_e4m3", "fp8_e4m3"], "the verdict was another target's"


def test_one_that_strays_buys_nothing_until_the_gate_is_lowered(tmp_path: Path) -> None:
    house = House(tmp_path / "house", 0.3)
    message = r"kv_cache\.json: with server\.kv_cache fp8, [67]\d\.\d% of \d+ greedy tokens .*_gate is 92\.0%: set"
    for _ in range(2):
        with pytest.raises(EyrieError, match=message):
            house.answer()
        assert house.starts() == ["auto", "fp8_e4m3"], "the verdict is remembered"
    assert not house.out.exists()
    assert house.records() == []
    assert house.record()["agreement"] == pytest.approx(0.7, abs=0.1)
    assert house.record()["plain_agreement"] == 1.0
    house.answer(kv_cache_gate=0.5)
    assert house.rows()


def test_tokens_of_a_prefill_do_not_speak_for_the_cache(tmp_path: Path) -> None:
    house = House(tmp_path / "house", 1.0)
    with pytest.raises(EyrieError, match=r"0\.0% of \d+ greedy tokens"):
        house.answer()


def test_without_a_gate_or_an_fp8_cache_no_plain_server_starts(tmp_path: Path) -> None:
    house = House(tmp_path / "house", 1.0)
    house.answer(kv_cache_gate=0.0)
    assert house.starts() == ["fp8_e4m3"]
    house.answer(kv_cache="auto")
    assert house.starts() == ["fp8_e4m3", "auto"]


def test_the_two_servers_differ_in_their_cache_and_the_plain_one_may_have_the_smaller_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CacheGate] = []
    monkeypatch.setattr(CacheGate, "check", lambda gate, requests: seen.append(gate))
    House(tmp_path / "house", 0.0).answer(pool_tokens=20_000)
    plain, chosen = seen[0].plain, seen[0].spec
    assert [pair for pair in zip(plain.command, chosen.command, strict=True) if len(set(pair)) > 1] == [
        ("auto", "fp8_e4m3")
    ]
    assert (plain.planned_pool_tokens, chosen.planned_pool_tokens) == (None, 20_000)


def test_too_little_to_compare_is_no_evidence(tmp_path: Path) -> None:
    house = House(tmp_path / "house", 0.0)
    with pytest.raises(
        EyrieError, match=r"8 prompts give \d tokens to compare .* 64 are needed: set server\.kv_cache to"
    ):
        house.answer(10, max_tokens=2)
    assert house.starts() == ["auto"]
    assert not list(house.place.glob("servers/*/kv_cache.json"))
