"""A paid provider answers conversations turn by turn: what it is told, what it costs, what faults and kills leave."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Gates
from eyrie.conversation import Reject
from eyrie.errors import EyrieError
from eyrie.render.renderer import Renderer
from tests.fake_server import FakeServer
from tests.family_targets import family_target
from tests.generate_desk import Desk
from tests.turns_desk import SAID, TOOLS, calls, result, user

pytestmark = pytest.mark.usefixtures("quick")
TURNS = 3
OPEN = {"unparsed": 1.0}  # the fake renderer cannot read an answer in eleven back
Paid = Callable[..., dict[str, Any]]


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations of three turns; no two of their texts are equal, so that the server can tell them apart."""
    return [
        {
            "id": f"{n:016x}",
            "index": n,
            "messages": [user(text_of(n, 0)), SAID, user(text_of(n, 1)), SAID, user(text_of(n, 2))],
        }
        for n in range(count)
    ]


def text_of(number: int, turn: int) -> str:
    return f"({number}) asks {turn}"


def desk_in(folder: Path, count: int = 40) -> Desk:
    return Desk(folder, [], rows=talks(count), turns=TURNS, gates=Gates(**OPEN))


def spent(desk: Desk) -> dict[str, Any]:
    ledger: dict[str, Any] = json.loads((desk.root / "dollars.json").read_text())
    return ledger


@pytest.fixture
def calm(tmp_path: Path, paid: Paid) -> Desk:
    """What an undisturbed provider makes of the same conversations."""
    desk = desk_in(tmp_path / "calm")
    with FakeServer() as server:
        desk.run_served(100_000, paid(server))
    assert max(row["turn"] for row in desk.rows()) == TURNS - 1
    return desk


def test_a_provider_is_told_the_target_s_own_calls_and_the_data_s_results(tmp_path: Path, paid: Paid) -> None:
    renderer = Renderer(family_target("qwen3", tmp_path / "model"))
    rows = [
        {
            "id": f"{n:016x}", "index": n, "tools": TOOLS,
            "messages": [user(f"What is {n}?"), calls("search"), result(f"found {n}", "d0"), SAID, user(f"Why {n}?")],
        }
        for n in range(6)
    ]  # fmt: skip
    looked = {"id": "call_x", "type": "function", "function": {"name": "search", "arguments": '{"word": "a {b}"}'}}
    answers: dict[str, dict[str, Any]] = {
        "What": {"content": "", "reasoning": "Look it up.", "tool_calls": [looked]},
        "found": {"content": "It is a number."},
        "Why": {"content": "Because.", "reasoning": "Hm."},
    }

    def speak(made: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", **answers[body["messages"][-1]["content"].split()[0]]}
        stored = {**message, **({"tool_calls": [parsed]} if "tool_calls" in message else {})}
        row = renderer.last_turn([user("x"), stored], TOOLS)
        assert not isinstance(row, Reject)
        made["usage"]["completion_tokens"] = len(row.input_ids) - row.start
        made["choices"][0] |= {"message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return made

    parsed = {**looked, "function": {"name": "search", "arguments": {"word": "a {b}"}}}
    desk = Desk(tmp_path / "run", [], rows=rows, turns=TURNS, renderer=renderer, context=4096)
    with FakeServer(route=speak, share=0.3) as server:
        manifest = desk.run_served(100_000, paid(server), max_tokens=200)
        assert max(server.answered.values()) == 1
    assert (manifest.rows.kept, manifest.rows.dropped) == (18, {})

    called = {"id": "functions.search:0", "type": "function"}
    told = {body["messages"][-1]["content"]: body for body in server.bodies}
    assert told["Why 3?"]["tools"] == TOOLS
    assert told["Why 3?"]["messages"] == [
        user("What is 3?"),
        {
            "role": "assistant", "content": "", "reasoning": "Look it up.",
            "tool_calls": [{**called, "function": {"name": "search", "arguments": '{"word": "a {b}"}'}}],
        },
        result("found 3", "functions.search:0"),
        {"role": "assistant", "content": "It is a number."},
        user("Why 3?"),
    ]  # fmt: skip
    for row in desk.rows():
        answer = {"role": "assistant", **answers[row["messages"][-1]["content"].split()[0]]}
        if "tool_calls" in answer:
            answer["tool_calls"] = [parsed]
        wanted = renderer.last_turn([*row["messages"], answer], TOOLS)
        assert not isinstance(wanted, Reject)
        assert row["prompt_ids"] + row["output_ids"] == wanted.input_ids


def test_the_cost_of_a_conversation_is_that_of_its_turns_and_the_cap_holds_between_them(
    tmp_path: Path, paid: Paid, calm: Desk
) -> None:
    desk = desk_in(tmp_path / "run")
    with FakeServer(delay=lambda ids: 0.002) as server:
        with pytest.raises(EyrieError, match=r"engine\.max_dollars: the next request can cost .* raise it and run"):
            desk.run_served(100_000, paid(server, max_dollars=0.004))
        assert 0.002 < server.dollars <= 0.004
        assert spent(desk) == {"spent": pytest.approx(server.dollars), "reserved": {}}
        begun = {record["id"] for record in desk.records()}
        assert len(begun) < len(desk.records()), "the cap was met in the middle of conversations"
        desk.run_served(100_000, paid(server))
        assert max(server.answered.values()) == 1, "a turn was bought twice"
        assert spent(desk) == {"spent": pytest.approx(server.dollars), "reserved": {}}
        assert sum(record["facts"]["cost"] for record in desk.records()) == pytest.approx(server.dollars)
        assert desk.stats()["dollars_of_kept_answers"] == pytest.approx(server.dollars, abs=1e-5)
    assert desk.published() == calm.published()


def test_faults_in_later_turns_leave_the_shard_of_a_calm_day(tmp_path: Path, paid: Paid, calm: Desk) -> None:
    desk = desk_in(tmp_path / "run")
    with FakeServer(share=0.5) as server:
        desk.run_served(100_000, paid(server, tries=9))
        assert max(server.answered.values()) == 1
        assert sum(count > 1 for name, count in server.attempts.items() if name.endswith("2")) > 5, "later turns too"
        # what ended in an error after it began may have been billed, so the worst is booked
        assert spent(desk)["spent"] >= server.dollars
    assert desk.published() == calm.published()


@pytest.mark.parametrize("how", ["403", "content_filter", "message"])
def test_a_refusal_in_a_later_turn_ends_the_conversation_there(
    tmp_path: Path, paid: Paid, calm: Desk, how: str
) -> None:
    whole = next(row["index"] for row in calm.rows() if row["turn"] == TURNS - 1)
    bad = text_of(whole, 1)

    def route(made: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["content"] == bad and how == "content_filter":
            made["choices"][0]["finish_reason"] = "content_filter"
        if body["messages"][-1]["content"] == bad and how == "message":
            made["choices"][0]["message"] = {"role": "assistant", "content": "", "refusal": "I will not"}
        return made

    desk, poison = desk_in(tmp_path / "run"), bad if how == "403" else "\0"
    with FakeServer(route=route, poison=poison, poison_fault="403") as server:
        manifest = desk.run_served(100_000, paid(server))
        assert manifest.rows.dropped["refused"] == 2, "its turn, and the one that can no more be asked"
        assert desk.rows() == [row for row in calm.rows() if row["index"] != whole or row["turn"] == 0]
        assert text_of(whole, 2) not in server.asked
        assert spent(desk)["spent"] == pytest.approx(server.dollars)
        asked = len(server.asked)
        desk.out.unlink()
        desk.run_served(100_000, paid(server))
        assert len(server.asked) == asked, "a refusal is kept, so a rerun does not ask again"


CHILD = """
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
    {**recipe_of(100_000), "engine": subtree(options), "turns": 3}, prompts=root / "code/s0000.jsonl.zst",
    target=root / "target.json", model="m", out=root / "responses/s0000.jsonl.zst",
    journal=root / "journal/s0000.jsonl", options=options, renderer=FakeRenderer(),
))
"""


def test_killed_between_turns_nothing_is_bought_twice_and_the_ledger_knows_every_dollar(
    tmp_path: Path, paid: Paid, calm: Desk
) -> None:
    desk, draw, kills = desk_in(tmp_path / "run"), random.Random(5), 0
    home = Path(__file__).parents[2]
    with FakeServer(share=0.2, delay=lambda ids: 0.02 + sum(ids) % 5 / 50) as server:
        while True:
            held, asked = {asked_by(record) for record in desk.records()}, len(server.asked)
            options = json.dumps(paid(server, tries=9, gates=OPEN, concurrency=draw.choice([2, 6])))
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(desk.root), options],
                cwd=home, env={**os.environ, "PYTHONPATH": str(home)},
            )  # fmt: skip
            while kills < 3 and process.poll() is None and len(server.asked) < asked + 9:
                time.sleep(0.005)
            if kills < 3 and process.poll() is None:
                time.sleep(draw.uniform(0.0, 0.1))
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.wait()
            assert not held & set(server.asked[asked:]), "a turn was bought twice"
            ledger = spent(desk)
            kept = sum(record["facts"]["cost"] for record in desk.records())
            assert max(kept, server.dollars) <= ledger["spent"] + sum(ledger["reserved"].values()) + 1e-9
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL
    assert kills == 3
    assert ledger["reserved"] == {}
    assert {record["turn"] for record in desk.records()} == {0, 1, 2}
    assert desk.published() == calm.published()


def asked_by(record: dict[str, Any]) -> str:
    """The last text of the prompt that a record of the journal answers."""
    return text_of(int(record["id"], 16), record["turn"])
