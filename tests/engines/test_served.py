"""Engines over HTTP, against a server of ours that does everything the documentation says can go wrong."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie.errors import EyrieError
from tests.fake_server import ENDPOINT, FAST, PASSING, PRICE, FakeServer, answer_to, spoken
from tests.generate_desk import MAX_TOKENS, STOP, Desk, FakeEngine, questions, shortest_prefix

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "run", questions(60))


@pytest.fixture
def calm(tmp_path: Path) -> Callable[[int], tuple[bytes, bytes]]:
    """What an undisturbed engine makes of the same prompts."""

    def make(budget: int) -> tuple[bytes, bytes]:
        other = Desk(tmp_path / "calm", questions(60))
        other.run(budget, FakeEngine())
        return other.published()

    return make


def sglang(*servers: FakeServer, **options: Any) -> dict[str, Any]:
    return {"kind": "sglang", "urls": [server.url for server in servers]} | FAST | options


def openai(server: FakeServer, **options: Any) -> dict[str, Any]:
    return {"kind": "openai", "urls": [f"{server.url}/v1"], "model": "the-target", **FAST, **options}


# ---- what rows hold ----
def test_sglang_rows_hold_the_served_ids_and_the_journal_who_served_them(
    desk: Desk, calm: Callable[[int], tuple[bytes, bytes]]
) -> None:
    with FakeServer() as server:
        desk.run_served(300, sglang(server))
    assert desk.out.read_bytes() == calm(300)[0]
    facts = desk.records()[0]["facts"]
    assert facts["server"] == "sglang 0.5.23"
    assert facts["cached_tokens"] == 3
    assert desk.stats()["served_by"] == {server.url: desk.stats()["answered_rows"]}


def test_sglang_gets_stop_ids_and_seeds_of_the_request_alone() -> None:
    from eyrie.config import Sampling
    from eyrie.engines.base import Request
    from eyrie.engines.sglang import SglangWire

    wire = SglangWire(frozenset({7, 2}))
    greedy = wire.payload(Request(0, [1, 2], Sampling(max_tokens=9), 5))
    assert greedy["input_ids"] == [1, 2]
    assert greedy["sampling_params"]["stop_token_ids"] == [2, 7]
    assert "sampling_seed" not in greedy["sampling_params"]
    hot = [wire.payload(Request(n, [1, 2], Sampling(temperature=1.0), 5))["sampling_params"] for n in (0, 1)]
    assert hot[0] == hot[1]
    assert 0 <= hot[0]["sampling_seed"] < 2**63


def test_chat_with_ids_holds_them_and_without_them_the_text_encoded_again(desk: Desk, tmp_path: Path) -> None:
    with FakeServer(ids=True) as server:
        desk.run_served(300, openai(server))
    for row in desk.rows():
        assert row["output_ids"] == answer_to(row["prompt_ids"], MAX_TOKENS).output_ids
    other = Desk(tmp_path / "text", questions(60))
    with FakeServer() as server:
        other.run_served(300, openai(server))
    for row in other.rows():
        answer = answer_to(row["prompt_ids"], MAX_TOKENS)
        ended = [STOP] if row["finish_reason"] == "stop" else []
        assert row["output_ids"] == [*spoken(answer).encode(), *ended]
    assert {row["finish_reason"] for row in other.rows()} == {"stop", "length"}


def test_a_wrong_model_name_is_named(desk: Desk) -> None:
    with FakeServer() as server, pytest.raises(EyrieError, match=r"serves the-target, not 'other'; mend engine\.model"):
        desk.run_served(300, openai(server, model="other"))


def changed(**message: Any) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    def route(made: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        made["choices"][0]["message"].update(message)
        return made

    return route


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "<think>hm"}, "unparsed"),
        ({"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}, "unparsed"),
        ({"content": "y" * (MAX_TOKENS - 1)}, "drifted"),
        ({"content": "", "refusal": "I will not"}, "refused"),
    ],
)
def test_answers_that_cannot_be_used_are_counted_and_stop_the_run_at_the_gate(
    desk: Desk, message: dict[str, Any], reason: str
) -> None:
    with FakeServer(route=changed(**message)) as server:
        with pytest.raises(EyrieError, match=rf"answers are {reason}, engine\.gates\.{reason} allows a share of 0\.1"):
            desk.run_served(300, openai(server))
        assert len(server.asked) < 40, "it stopped long before the prompts ran out"
        assert not desk.out.exists()
        # the cause is mended: what was bad is asked for again
        server.route = lambda made, body: made
        desk.run_served(300, openai(server))
    assert desk.rows()
    # an open gate publishes, and counts them
    with FakeServer(route=changed(**message)) as server:
        manifest = Desk(desk.root / "open", questions(9)).run_served(30, openai(server, gates={reason: 1.0}))
    assert manifest.rows.dropped[reason] >= 6


def test_the_gate_for_truncation_looks_at_the_whole_shard(desk: Desk) -> None:
    with FakeServer() as server, pytest.raises(EyrieError, match=r"are truncated, engine\.gates\.truncated allows"):
        desk.run_served(900, sglang(server, gates={"truncated": 0.05}))
    desk.run_served(900, {"kind": "sglang", "gates": {"truncated": 0.9}})  # raised: nothing is bought again
    assert desk.rows()


# ---- weather ----
@pytest.mark.parametrize("kind", ["sglang", "openai", "openrouter"])
def test_through_every_passing_fault_the_shard_is_that_of_a_calm_day(
    tmp_path: Path, kind: str, paid: Callable[..., dict[str, Any]]
) -> None:
    def run(name: str, **weather: Any) -> tuple[Desk, FakeServer]:
        desk = Desk(tmp_path / name, questions(60))
        with FakeServer(ids=kind == "openai", **weather) as server:
            make = {"sglang": sglang, "openai": openai, "openrouter": paid}[kind]
            desk.run_served(500, make(server, tries=9))
        return desk, server

    calm, _ = run("calm")
    rough, server = run("rough", share=0.6)
    assert rough.published() == calm.published()
    assert len(server.injected) > 12
    assert max(server.answered.values()) == 1, "an answer was paid for twice"
    faults = rough.stats()["faults"]
    assert faults["429"] > 0
    assert sum(faults.values()) == server.injected.total()
    assert set(PASSING) >= set(server.injected)


def test_a_third_of_429_slows_down_and_loses_nothing(desk: Desk, calm: Callable[[int], tuple[bytes, bytes]]) -> None:
    with FakeServer(share=0.3, faults=("429",), most=50, delay=lambda ids: 0.01) as server:
        desk.run_served(600, sglang(server))
    assert desk.out.read_bytes() == calm(600)[0]
    assert server.injected["429"] > 5
    assert max(server.answered.values()) == 1


def test_a_slow_loris_is_left_after_the_timeout(desk: Desk, calm: Callable[[int], tuple[bytes, bytes]]) -> None:
    with FakeServer(share=0.4, faults=("loris",), most=1) as server:
        desk.run_served(300, sglang(server, timeout=0.5))
    assert desk.out.read_bytes() == calm(300)[0]
    assert desk.stats()["faults"] == {"timeout": server.injected["loris"]}


@pytest.mark.parametrize("fault", ["500", "drop", "400", "403", "413", "422", "502:content_policy_violation"])
def test_a_poison_prompt_ends_as_refused_and_blocks_nobody(tmp_path: Path, fault: str) -> None:
    contents = questions(40)
    contents[3] += " poison"
    desk = Desk(tmp_path, contents)
    with FakeServer(poison="poison", poison_fault=fault) as server:
        manifest = desk.run_served(300, sglang(server, tries=3))
        assert manifest.rows.dropped["refused"] == 1
        assert server.attempts[contents[3]] == (3 if fault in ("500", "drop") else 1)
        # the refusal is kept, so a rerun does not ask again
        asked = len(server.asked)
        desk.out.unlink()
        desk.run_served(300, sglang(server))
        assert len(server.asked) == asked
    assert "why" in next(record for record in desk.records() if record["finish_reason"] == "refused")["facts"]


def test_a_poison_prompt_alone_is_told_from_a_dead_server_by_a_probe(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["poison"])
    with FakeServer(poison="poison") as server:
        assert desk.run_served(300, sglang(server, tries=2)).rows.dropped == {"refused": 1}


@pytest.mark.parametrize(("code", "again"), [("401", 300), ("402", 300), ("404", 300), ("429:payment_required", 300)])
def test_what_waiting_cannot_mend_ends_the_stage_and_is_resumed(
    tmp_path: Path, code: str, again: int, calm: Callable[[int], tuple[bytes, bytes]]
) -> None:
    desk = Desk(tmp_path / "run", questions(60))
    with FakeServer(poison="question 14", poison_fault=code, delay=lambda ids: random.random() / 50) as server:
        with pytest.raises(EyrieError, match=rf"{code[:3]}: fault {code}; mend that and run the same command again"):
            desk.run_served(again, sglang(server, concurrency=4))
        assert not desk.out.exists()
        assert len(desk.records()) == server.answered.total(), "what was in flight was waited for and kept"
        server.poison = "\0"
        desk.run_served(again, sglang(server, concurrency=4))
        assert max(server.answered.values()) == 1
    assert desk.out.read_bytes() == calm(again)[0]


def test_a_server_that_is_gone_for_a_while_costs_nothing(
    desk: Desk, calm: Callable[[int], tuple[bytes, bytes]]
) -> None:
    server = FakeServer(delay=lambda ids: 0.02)
    back: list[FakeServer] = []

    def outage() -> None:
        while len(server.answered) < 12:
            time.sleep(0.002)
        server.__exit__()
        time.sleep(0.4)
        back.append(FakeServer(port=server.port).__enter__())

    with_outage = threading.Thread(target=outage)
    server.__enter__()
    options = sglang(server)
    with_outage.start()
    try:
        desk.run_served(600, options)
    finally:
        with_outage.join()
        back[0].__exit__()
    assert desk.out.read_bytes() == calm(600)[0]
    assert not set(server.answered) & set(back[0].answered)
    assert desk.stats()["faults"].keys() & {"dropped", "unreachable"}


def test_no_server_at_all_ends_the_stage_with_the_mend(desk: Desk) -> None:
    began = time.monotonic()
    with pytest.raises(EyrieError, match=r"no server has answered for 0\.5 s \(unreachable: .*mend engine\.urls"):
        desk.run_served(300, {"kind": "sglang", "urls": ["http://127.0.0.1:9"], **FAST, "outage": 0.5})
    assert time.monotonic() - began < 5


def test_servers_that_are_busy_for_ever_end_the_stage(desk: Desk) -> None:
    with (
        FakeServer(share=1.0, faults=("429",), most=10**6) as server,
        pytest.raises(EyrieError, match="every answer says that the server is busy, and none came; lower engine"),
    ):
        desk.run_served(300, sglang(server, outage=0.3, timeout=0.3))


def test_several_servers_share_the_load_and_a_dead_one_is_left_out(
    desk: Desk, calm: Callable[[int], tuple[bytes, bytes]]
) -> None:
    with FakeServer(delay=lambda ids: 0.03) as slow, FakeServer(delay=lambda ids: 0.005) as fast:
        desk.run_served(700, sglang(concurrency=4, urls=[slow.url, fast.url, "http://127.0.0.1:9"]))
        assert 0 < slow.answered.total() < fast.answered.total()
        assert slow.most_in_flight + fast.most_in_flight <= 6  # of which one can be a probe, on each
    assert desk.out.read_bytes() == calm(700)[0]


def test_concurrency_bounds_what_is_in_flight(desk: Desk) -> None:
    with FakeServer(delay=lambda ids: 0.01) as server:
        desk.run_served(300, sglang(server, concurrency=3))
        assert server.most_in_flight == 3


# ---- money ----
def test_openrouter_pins_what_makes_one_run_one_target(desk: Desk, paid: Callable[..., dict[str, Any]]) -> None:
    with FakeServer() as server:
        desk.run_served(100, paid(server, reasoning="high"), temperature=0.6)
        body = server.bodies[0]
        assert body["provider"] == {
            "only": ["Alpha"], "allow_fallbacks": False, "require_parameters": True, "enforce_distillable_text": True,
            "quantizations": ["int4"],
        }  # fmt: skip
        assert body["plugins"] == [{"id": "context-compression", "enabled": False}]
        assert body["reasoning"] == {"effort": "high", "exclude": False}
        assert 0 <= body["seed"] < 2**31
        server.bodies.clear()
        reason = {"not_distillable": "the author agreed in writing"}
        desk.run_served(130, paid(server, openrouter=reason))
        assert server.bodies[0]["provider"]["enforce_distillable_text"] is False


def test_every_dollar_is_booked_per_row_and_none_is_spent_twice(
    desk: Desk, paid: Callable[..., dict[str, Any]]
) -> None:
    with FakeServer(share=0.3, faults=("429-in-200", "mid-stream", "error-finish")) as server:
        desk.run_served(300, paid(server))
        costs = [record["facts"]["cost"] for record in desk.records()]
        assert sum(costs) == pytest.approx(server.dollars)
        assert desk.stats()["dollars"] == pytest.approx(server.dollars, abs=1e-5)
        assert desk.records()[0]["facts"]["provider"] == "Alpha"
        ledger = json.loads((desk.root / "dollars.json").read_text())
        assert ledger["reserved"] == {}
        assert ledger["spent"] == pytest.approx(server.dollars)
        desk.run_served(500, paid(server))
        assert json.loads((desk.root / "dollars.json").read_text())["spent"] == pytest.approx(server.dollars)
        assert max(server.answered.values()) == 1


def test_the_cap_is_never_passed_and_a_raise_goes_on(desk: Desk, paid: Callable[..., dict[str, Any]]) -> None:
    with FakeServer(delay=lambda ids: 0.005) as server:
        with pytest.raises(EyrieError, match=r"engine\.max_dollars: the next request can cost .* raise it and run"):
            desk.run_served(900, paid(server, max_dollars=0.002))
        assert 0.001 < server.dollars <= 0.002
        assert not desk.out.exists()
        desk.run_served(900, paid(server, max_dollars=1.0))
        assert max(server.answered.values()) == 1
    assert desk.rows()


def test_a_request_that_was_given_up_is_booked_at_its_worst(desk: Desk, paid: Callable[..., dict[str, Any]]) -> None:
    with FakeServer(share=0.2, faults=("loris",), most=1) as server:
        desk.run_served(200, paid(server, timeout=0.4))
    ledger = json.loads((desk.root / "dollars.json").read_text())
    assert ledger["spent"] >= server.dollars + server.injected["loris"] * PRICE["completion"] * MAX_TOKENS


@pytest.mark.parametrize(
    ("endpoint", "options", "message"),
    [
        ({"quantization": "fp8"}, {}, r"no endpoint of maker/model fits \(Alpha has quantization fp8\)"),
        ({"provider_name": "Beta", "tag": "beta"}, {}, r"fits \(no such provider\); on offer: Beta \(int4\)"),
        ({"max_completion_tokens": 16}, {}, r"answers with at most 16 tokens, sampling\.max_tokens is 24"),
        ({"supported_parameters": ["max_tokens"]}, {}, r"does not support temperature, top_p"),
        ({"status": -5}, {}, r"has status -5"),
        ({"pricing": {}}, {}, r"names no price"),
    ],
)
def test_the_preflight_names_what_does_not_fit(
    desk: Desk, paid: Callable[..., dict[str, Any]], endpoint: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with FakeServer() as server:
        server.endpoints = [{**ENDPOINT, **endpoint}]
        with pytest.raises(EyrieError, match=message):
            desk.run_served(300, paid(server, **options))
        assert server.asked == [], "nothing was bought"


def test_the_preflight_shows_the_estimate_and_refuses_without_credit(
    desk: Desk, paid: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eyrie")
    with FakeServer(limit_remaining=0.0001) as server:
        with pytest.raises(EyrieError, match=r"openrouter: \$0\.0001 of credit is left and this shard is estimated at"):
            desk.run_served(300, paid(server))
        assert server.asked == []
    assert "$1.00 in and $5.00 out per million tokens; this shard is estimated at $0.0015 to $0.0017" in caplog.text


def test_the_key_is_needed_sent_and_never_shown(
    desk: Desk, paid: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sk-or-v1-very-secret"
    with FakeServer(key=secret, share=0.3) as server:
        options = paid(server)
        desk.run_served(200, options)
        monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-v1-wrong-secret")
        with pytest.raises(EyrieError, match=r"401: no such key: Bearer \[key\]; mend that"):
            desk.run_served(400, options)
        monkeypatch.delenv("OPENROUTER_API_KEY")
        with pytest.raises(EyrieError, match="the environment has no OPENROUTER_API_KEY; export the key there"):
            desk.run_served(400, options)
    written = b"".join(path.read_bytes() for path in desk.root.rglob("*") if path.is_file())
    assert b"secret" not in written
    assert "secret" not in caplog.text


# ---- the budget ----
def test_a_raised_budget_buys_only_what_is_missing(desk: Desk) -> None:
    with FakeServer() as server:
        desk.run_served(200, sglang(server))
        old = desk.rows()
        desk.run_served(500, sglang(server))
        assert desk.rows()[: len(old)] == old
        assert len(desk.rows()) == shortest_prefix(desk.contents, 500)
        assert max(server.answered.values()) == 1
