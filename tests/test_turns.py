"""Conversations answered turn by turn: what is asked, what is kept, and what a kill leaves."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.budget import Budget
from eyrie.conversation import Reject, prompt_key
from eyrie.turns import Step, Talk, script
from tests.fake_server import FakeServer
from tests.generate_desk import Desk, FakeEngine, FakeRenderer

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "add")]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*names: str) -> dict[str, Any]:
    made = [
        {"id": f"d{n}", "type": "function", "function": {"name": name, "arguments": {}}} for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(text: str, id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": id} if id else {})}


SAID = {"role": "assistant", "content": "the data's answer"}


# ---- the script ----
def test_the_data_s_answers_are_no_part_of_the_script() -> None:
    system = {"role": "system", "content": "s"}
    messages = [system, user("a"), SAID, user("b"), calls("add"), result("3"), SAID, user("c")]
    assert script(messages) == [
        Step((system, user("a"))), Step((user("b"),)), Step((result("3"),), (("add", "d0"),)), Step((user("c"),)),
    ]  # fmt: skip


def test_a_talk_holds_what_the_target_said() -> None:
    talk = Talk(script([user("a"), SAID, user("b")]))
    first = talk.context()
    assert talk.left == 1
    assert talk.hear({"role": "assistant", "content": "mine"})
    assert talk.messages == [user("a"), {"role": "assistant", "content": "mine"}, user("b")]
    assert talk.left == 0
    assert talk.context() != first
    assert talk.context_of(0) == [user("a")]
    assert talk.context_of(1) == talk.messages


def test_results_are_replayed_to_the_calls_that_match() -> None:
    talk = Talk(
        script([user("a"), calls("add", "search"), result("found", "d1"), result("3", "d0"), SAID, user("b")]), TOOLS
    )
    mine = {"role": "assistant", "content": "", "tool_calls": calls("add", "search")["tool_calls"]}
    assert talk.hear(mine)
    named = {call["function"]["name"]: call["id"] for call in talk.messages[1]["tool_calls"]}
    assert [(m["content"], m["tool_call_id"]) for m in talk.messages[2:]] == [
        ("found", named["search"]),
        ("3", named["add"]),
    ]
    assert len(set(named.values())) == 2
    assert talk.hear(SAID)


@pytest.mark.parametrize(
    ("data", "said", "ended"),
    [
        ([calls("add"), result("3")], SAID, "no_call"),
        ([calls("add"), result("3")], calls("search"), "other_call"),
        ([calls("add"), result("3")], calls("add", "add"), "other_call"),
        ([SAID, user("b")], calls("add"), "unexpected_call"),
    ],
)
def test_calls_that_do_not_match_end_it(data: list[dict[str, Any]], said: dict[str, Any], ended: str) -> None:
    talk = Talk(script([user("a"), *data]), TOOLS)
    assert not talk.hear(said)
    assert talk.ended == ended
    assert talk.messages == [user("a")]


# ---- the stage ----
class TalkRenderer(FakeRenderer):
    """Ids depend on every message of the context."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        if messages[-1]["content"] == "refuse me":
            raise Reject("template_refused")
        return list(hashlib.sha256(json.dumps(messages).encode()).hexdigest()[: 16 + len(messages)].encode())


def conversation(number: int) -> dict[str, Any]:
    """One to four turns; a third of the conversations has tools."""
    messages = [user(f"hello {number}")]
    for turn in range(number % 4):
        if number % 3 == 0 and (number + turn) % 2:
            messages += [calls("search" if turn % 2 else "add"), result(f"result {turn}", "d0")]
        messages += [SAID, user("refuse me" if (number, turn) == (5, 0) else f"and then {turn}")]
    row = {"id": hashlib.sha256(str(number).encode()).hexdigest()[:16], "index": number, "messages": messages}
    return row | ({"tools": TOOLS} if number % 3 == 0 else {})


def desk_of(root: Path, count: int, **more: Any) -> Desk:
    rows = [conversation(number) for number in range(count)]
    return Desk(root, [], rows=rows, turns=9, renderer=TalkRenderer(), **more)


def played(row: dict[str, Any]) -> tuple[list[list[int]], str | None]:
    """The answers that a row gets, worked out the slow way, and why it ended early."""
    renderer, talk, answers = TalkRenderer(), Talk(script(row["messages"]), row.get("tools")), []
    while True:
        try:
            prompt = renderer.prompt_ids(talk.messages)
        except Reject as reject:
            return answers, reject.reason
        answer = FakeEngine.of_ids(prompt)
        answers.append(answer.output_ids)
        if talk.left == 0:
            return answers, None
        if answer.finish_reason == "length":
            return answers, "truncated"
        try:
            if not talk.hear(renderer.said(prompt, answer.output_ids, tools="tools" in row)):
                return answers, talk.ended
        except Reject as reject:
            return answers, reject.reason


def test_each_answer_stands_in_the_context_of_the_next(tmp_path: Path) -> None:
    desk = desk_of(tmp_path, 60)
    manifest = desk.run(100_000, FakeEngine())
    rows, renderer = desk.rows(), TalkRenderer()
    wanted = [(n, ids) for n in range(60) for ids in played(conversation(n))[0]]
    assert [(row["index"], row["output_ids"]) for row in rows] == wanted
    for row in rows:
        assert row["prompt_ids"] == renderer.prompt_ids(row["messages"])
        if "turn" in row:
            assert row["prompt_key"] == prompt_key(conversation(row["index"])["messages"])
            assert sum(message["role"] == "assistant" for message in row["messages"]) == row["turn"]
            assert SAID not in row["messages"]
    assert max(row.get("turn", 0) for row in rows) >= 3
    # one account of every turn, whether it was answered or not
    steps = [len(script(conversation(n)["messages"])) for n in range(60)]
    unanswered: Counter[str] = Counter()
    for n in range(60):
        answers, why = played(conversation(n))
        if why:
            unanswered[why] += steps[n] - len(answers)
    assert manifest.rows.read == sum(steps)
    assert manifest.rows.dropped == dict(unanswered)
    assert {"no_call", "other_call", "unexpected_call", "truncated", "unparsed", "template_refused"} <= set(unanswered)
    assert manifest.facts["conversations"] == 60
    assert any(message["role"] == "tool" for row in rows for message in row["messages"])


@given(
    count=st.integers(1, 30),
    budget=st.integers(1, 900),
    slots=st.integers(1, 40),
    order=st.integers(0, 1000),
    killed_at=st.integers(0, 50),
)
@settings(max_examples=30, deadline=None)
def test_bytes_depend_neither_on_concurrency_nor_on_a_kill(
    count: int, budget: int, slots: int, order: int, killed_at: int
) -> None:
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as wild:
        one, other = desk_of(Path(calm), count), desk_of(Path(wild), count)
        manifest = one.run(budget, FakeEngine(slots=1))
        lengths = [sum(map(len, played(conversation(n))[0])) for n in range(count)]
        prefix = next((n for n in range(count) if sum(lengths[:n]) >= budget), count)
        assert manifest.tokens["completion"] == sum(lengths[:prefix])
        first, second = FakeEngine(slots, order, fail_after=killed_at), FakeEngine(slots, order + 1)
        try:
            other.run(budget, first)
        except KeyboardInterrupt:
            held = {(record["id"], record.get("turn", 0)) for record in other.records()}
            other.run(budget, second)
            again = [(record["id"], record.get("turn", 0)) for record in other.records()]
            assert len(again) == len(set(again)), "an answer was bought twice"
            assert held <= set(again)
        assert other.published() == one.published()


def test_more_turns_keep_what_was_paid_for(tmp_path: Path) -> None:
    rows = [conversation(3 + 4 * n) for n in range(10)]
    short = [{**row, "id": f"s{row['index']}", "messages": row["messages"][:3]} for row in rows if "tools" not in row]
    long = [row for row in rows if "tools" not in row]
    desk = Desk(tmp_path, [], rows=short, turns=2, renderer=TalkRenderer())
    desk.run(100_000, first := FakeEngine())
    other = Desk(tmp_path, [], rows=long, turns=9, renderer=TalkRenderer())
    other.run(100_000, second := FakeEngine())
    assert {tuple(r.prompt_ids) for r in first.asked}.isdisjoint({tuple(r.prompt_ids) for r in second.asked})
    assert other.stats()["reused_rows"] == len(first.asked)


def test_a_conversation_of_one_turn_has_the_bytes_that_it_has_without_turns(tmp_path: Path) -> None:
    rows = [conversation(4 * n) for n in range(8)]
    plain = Desk(tmp_path / "a", [], rows=rows, renderer=TalkRenderer())
    turned = Desk(tmp_path / "b", [], rows=rows, turns=3, renderer=TalkRenderer())
    for desk in (plain, turned):
        desk.run(50, FakeEngine())
    assert plain.out.read_bytes() == turned.out.read_bytes()
    assert plain.journal.read_bytes() == turned.journal.read_bytes()


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
def test_chat_servers_are_told_the_target_s_own_answers(tmp_path: Path, ids: bool) -> None:
    rows = [row for n in range(24) if "tools" not in (row := conversation(n)) and n != 5]
    with FakeServer(ids=ids) as server:
        options = {"kind": "openai", "urls": [f"{server.url}/v1"], "model": "the-target", "concurrency": 4}
        desk = Desk(tmp_path, [], rows=rows, turns=9)
        desk.run_served(100_000, options | {"gates": {"unparsed": 1.0, "drifted": 1.0}})
    got = desk.rows()
    assert max(row.get("turn", 0) for row in got) >= 2
    told = {json.dumps(body["messages"]) for body in server.bodies}
    for row in got:
        assert json.dumps(row["messages"]) in told
        assert row["prompt_ids"] == list(row["messages"][-1]["content"].encode())


def test_sglang_gets_the_ids_of_each_turn(tmp_path: Path) -> None:
    rows = [row for n in range(24) if "tools" not in (row := conversation(n)) and n != 5]
    with FakeServer(share=0.3) as server:
        served = Desk(tmp_path / "a", [], rows=rows, turns=9)
        served.run_served(100_000, {"kind": "sglang", "urls": [server.url], "concurrency": 4})
    calm = Desk(tmp_path / "b", [], rows=rows, turns=9)
    calm.run(100_000, FakeEngine())
    assert served.rows() == calm.rows()
    assert len(calm.rows()) > len(rows)


@given(data=st.data(), budget=st.integers(1, 600), slots=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_budget_of_several_turns_never_stalls(data: st.DataObject, budget: int, slots: int) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), max_size=30))
    book, running, position = Budget(budget, 30), {}, 0
    while not book.full and (position < len(rows) or running):
        if book.needs_next and position < len(rows) and len(running) < slots:
            book.start(position, (), len(rows[position]) - 1)
            running[position] = 0
            position += 1
            continue
        assert running, "paused with nothing in flight"
        chosen = data.draw(st.sampled_from(sorted(running)))
        running[chosen] += 1
        done = rows[chosen][: running[chosen]]
        if len(done) < len(rows[chosen]):
            book.turn(chosen, done)
        else:
            del running[chosen]
            book.book(chosen, *done)
    totals = [sum(row) for row in rows]
    prefix = next((n for n in range(len(rows)) if sum(totals[:n]) >= budget), len(rows))
    assert (book.end, book.filled) == (prefix, sum(totals[:prefix]))
