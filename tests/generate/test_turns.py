"""Conversations answered turn by turn: what is asked, what is kept, and what a kill leaves."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import Engine, Gates
from eyrie.conversation import Reject, prompt_key
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl, write_jsonl
from eyrie.formats.manifest import RowCounts
from eyrie.formats.publish import publish
from eyrie.formats.tokens import read_tokens
from eyrie.generate.budget import Budget
from eyrie.generate.stage import generate
from eyrie.generate.turns import Step, Talk, script
from eyrie.render.renderer import Renderer
from eyrie.targets import identify
from eyrie.tokenize_rows import tokenize
from tests.fake_server import FakeServer
from tests.generate_desk import Desk, FakeEngine
from tests.turns_desk import SAID, TOOLS, TalkRenderer, calls, conversation, desk_of, result, user


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
            if not talk.hear(renderer.said(prompt, answer.output_ids, tools=row.get("tools"))):
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


@pytest.mark.parametrize("slots", [1, 9])
def test_a_raised_budget_goes_on_in_the_middle_of_a_conversation(tmp_path: Path, slots: int) -> None:
    desk, calm = desk_of(tmp_path / "a", 60), desk_of(tmp_path / "b", 60)
    first, second = FakeEngine(slots), FakeEngine(slots)
    desk.run(150, first)
    old = desk.rows()
    desk.run(600, second)
    calm.run(600, FakeEngine())
    assert desk.out.read_bytes() == calm.out.read_bytes()
    assert desk.rows()[: len(old)] == old
    asked = [tuple(request.prompt_ids) for request in (*first.asked, *second.asked)]
    assert len(asked) == len(set(asked)), "a turn was bought twice"


def test_a_conversation_of_one_turn_has_the_bytes_that_it_has_without_turns(tmp_path: Path) -> None:
    rows = [conversation(4 * n) for n in range(8)]
    plain = Desk(tmp_path / "a", [], rows=rows, renderer=TalkRenderer())
    turned = Desk(tmp_path / "b", [], rows=rows, turns=3, renderer=TalkRenderer())
    for desk in (plain, turned):
        desk.run(50, FakeEngine())
    assert plain.out.read_bytes() == turned.out.read_bytes()
    assert plain.journal.read_bytes() == turned.journal.read_bytes()


def test_answers_that_cannot_be_read_back_stop_the_run_at_the_gate(tmp_path: Path) -> None:
    class Deaf(TalkRenderer):
        def said(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise Reject("unparsed", "a call that is none")

    rows = [conversation(4 * n + 1) for n in range(60)]
    desk = Desk(tmp_path, [], rows=rows, turns=9, renderer=Deaf())
    with pytest.raises(EyrieError, match=r"4 of \d+ answers are unparsed.*datasets\.code\.gates\.unparsed"):
        desk.run(100_000, engine := FakeEngine(slots=2))
    assert len(engine.asked) < 40, "it stopped long before the prompts ran out"
    again = Desk(tmp_path, [], rows=rows, turns=9, renderer=Deaf(), gates=Gates(unparsed=1.0))
    manifest = again.run(100_000, second := FakeEngine())
    assert again.stats()["reused_rows"] >= len(engine.asked) - 2, "the answers themselves are kept"
    assert len(second.asked) + again.stats()["reused_rows"] == manifest.rows.kept
    assert manifest.rows.dropped["unparsed"] > 40


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


def test_the_target_in_this_process_answers_itself_and_rows_hold_its_ids(
    tiny_target: Path,
    tiny_library,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    """A real model, tokenizer and template, from the prompt shard to token rows."""
    torch.set_num_threads(1)
    card = tmp_path / "target.json"
    identify({"target": {}}, str(tiny_target), card)
    stops = [2, *range(5, 600, 7)]  # a random model must come to an end
    card.write_text(json.dumps({**json.loads(card.read_text()), "stop_ids": stops}))
    prompts, out = tmp_path / "code" / "s0000.jsonl.zst", tmp_path / "responses" / "s0000.jsonl.zst"
    texts = ["What is the capital of France?", "Please write a letter.", "And the weather?"]
    rows = [
        {"id": f"{n:016x}", "index": n, "messages": [user(texts[n % 3]), SAID, user(texts[1]), SAID, user(f"{n}")]}
        for n in range(12)
    ]
    with publish(prompts, stage="ingest", recipe={}) as draft:
        write_jsonl(draft.path, rows)
        draft.rows = RowCounts(read=12, kept=12)
    made = {"sampling": {"max_tokens": 10}, "token_budget": 10_000, "turns": 3, "target": {"dtype": "float32"}}
    generate(
        made, prompts=prompts, target=card, model=str(tiny_target), out=out,
        journal=tmp_path / "journal" / "code" / "s0000.jsonl", options=Engine(batch_size=4),
    )  # fmt: skip
    renderer, answered = Renderer(tiny_target, stops), list(read_jsonl(out))
    assert Counter(row["turn"] for row in answered)[2] >= 2
    for row in answered:
        assert row["prompt_ids"] == renderer.prompt_ids(row["messages"])
        tokens = torch.tensor([row["prompt_ids"]])
        ids = tiny_library.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=10, do_sample=False, eos_token_id=stops
        )
        assert row["output_ids"] == ids[0, tokens.shape[1] :].tolist()
    shard = tmp_path / "tokens" / "s0000.parquet"
    tokenize(
        {"kind": "answered", "tokenize": {"truncated": "keep"}}, source=out, name="code", target=card,
        model=str(tiny_target), out=shard,
    )  # fmt: skip
    table = read_tokens(shard).to_dicts()
    assert [row["input_ids"] for row in table] == [[*row["prompt_ids"], *row["output_ids"]] for row in answered]
    assert len({row["row_id"] for row in table}) == len(answered)
    keys = {row["conversation"]: row["prompt_key"] for row in table}
    assert all(row["prompt_key"] == keys[row["conversation"]] for row in table)
    assert keys == {row["id"]: prompt_key(row["messages"]) for row in rows if row["id"] in keys}
