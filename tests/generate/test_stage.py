"""The generate stage: what a shard holds, what is bought and what is not."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request
from eyrie.errors import EyrieError, run_cli
from eyrie.formats.jsonl import write_jsonl
from eyrie.formats.manifest import RowCounts, read_manifest
from eyrie.formats.publish import publish
from eyrie.generate.budget import Budget
from eyrie.generate.stage import journal_key
from tests.generate_desk import (
    CONTEXT,
    MAX_TOKENS,
    Desk,
    FakeEngine,
    LockstepEngine,
    length_of,
    prompt_row,
    questions,
    shortest_prefix,
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, questions(40))


def test_rows_carry_the_prompt_and_the_answer_as_served(desk: Desk) -> None:
    manifest = desk.run(150, FakeEngine())
    rows = desk.rows()
    for n, row in enumerate(rows):
        answer = FakeEngine.of(Request(n, row["prompt_ids"], Sampling(max_tokens=MAX_TOKENS), 0))
        stopped = answer.finish_reason == "stop"
        spoken = answer.output_ids[:-1] if stopped else answer.output_ids
        assert row == {
            **prompt_row(n, f"question {n}"),
            "prompt_ids": list(f"question {n}".encode()),
            "output_ids": answer.output_ids,
            "text": " ".join(map(str, spoken)),
            "finish_reason": answer.finish_reason,
            "temperature": 0.0,
            "seed": 0,
        }
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    assert 0 < truncated < len(rows)
    assert manifest.facts == {
        "truncated": truncated, "stopped": len(rows) - truncated, "token_budget": 150, "budget_filled": True,
    }  # fmt: skip
    assert manifest.tokens["completion"] == sum(len(row["output_ids"]) for row in rows)
    assert manifest.tokens["prompt"] == sum(len(row["prompt_ids"]) for row in rows)
    assert manifest.rows.dropped == {"beyond_budget": 40 - len(rows)}
    assert manifest.inputs == {"code/s0000.jsonl.zst": read_manifest(desk.prompts).sha256}
    assert manifest.identity == {"target": "target of the day", "tokenizer": "tok", "template": "tpl"}


@given(
    count=st.integers(0, 40),
    budget=st.integers(1, 500),
    slots=st.integers(1, 50),
    order=st.integers(0, 1000),
    killed_at=st.integers(0, 40),
)
@settings(max_examples=25, deadline=None)
def test_bytes_depend_neither_on_concurrency_nor_on_order_nor_on_a_kill(
    count: int, budget: int, slots: int, order: int, killed_at: int
) -> None:
    contents = questions(count)
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as wild:
        one = Desk(Path(calm), contents)
        manifest = one.run(budget, FakeEngine(slots=1))
        assert manifest.rows.kept == shortest_prefix(contents, budget)
        assert manifest.facts["budget_filled"] == (sum(map(length_of, contents)) >= budget)

        other = Desk(Path(wild), contents)
        first, second = FakeEngine(slots, order, fail_after=killed_at), FakeEngine(slots, order + 1)
        try:
            other.run(budget, first)
        except KeyboardInterrupt:
            assert not other.out.exists()
            other.run(budget, second)
        assert other.published() == one.published()
        # no answer that reached the journal is bought again
        lost = {request.position for request in first.asked} & {request.position for request in second.asked}
        assert len(lost) <= slots


@given(first=st.integers(1, 300), raised=st.integers(0, 300), slots=st.integers(1, 12), order=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_a_raised_budget_keeps_the_rows_and_asks_only_for_new_ones(
    first: int, raised: int, slots: int, order: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), questions(60))
        desk.run(first, before := FakeEngine(slots, order))
        old = desk.rows()
        manifest = desk.run(first + raised, after := FakeEngine(slots, order))
        assert desk.rows()[: len(old)] == old
        assert manifest.rows.kept == shortest_prefix(desk.contents, first + raised)
        positions = [request.position for request in before.asked + after.asked]
        assert sorted(positions) == list(range(len(positions)))
        # lowered again, the surplus stays in the journal and the first bytes come back
        desk.run(first, None)
        assert desk.rows() == old


def test_all_in_the_journal_means_no_engine(desk: Desk) -> None:
    desk.run(200, FakeEngine())
    published = desk.published()
    desk.out.unlink()
    desk.run(200, None)
    assert desk.published() == published
    stats = desk.stats()
    assert stats["answered_rows"] == 0
    assert stats["reused_rows"] == len(desk.rows())


def test_stats_say_what_was_bought(desk: Desk) -> None:
    desk.run(100, FakeEngine(slots=3))
    desk.run(200, engine := FakeEngine(slots=3))
    stats = desk.stats()
    assert stats["answered_rows"] == len(engine.asked)
    assert stats["answered_tokens"] == sum(length_of(desk.contents[request.position]) for request in engine.asked)
    assert stats["reused_rows"] + stats["answered_rows"] - stats["surplus_rows"] == len(desk.rows())
    assert stats["seconds"] > 0
    assert stats["tokens_per_cpu_second"] > 0


@pytest.mark.parametrize(("slots", "surplus"), [(1, 0.0), (16, 0.03), (64, 0.06)])
def test_little_more_is_generated_than_the_shard_holds(tmp_path: Path, slots: int, surplus: float) -> None:
    desk = Desk(tmp_path, questions(400))
    completion = desk.run(3000, engine := LockstepEngine(slots)).tokens["completion"]
    bought = sum(length_of(desk.contents[request.position]) for request in engine.asked)
    assert 0 <= bought - completion <= surplus * completion
    # and not by starving the engine: waiting for certainty would take one step per token of the shard
    assert engine.step < 2.0 * completion / slots + MAX_TOKENS


def test_admission_pauses_and_goes_on(tmp_path: Path) -> None:
    """The guess was too high: what is in flight does not fill the budget, so more is asked for."""
    short = [content for content in questions(400) if length_of(content) <= 3][:40]
    desk = Desk(tmp_path, short)
    kept = desk.run(60, engine := FakeEngine(slots=64)).rows.kept
    assert kept == shortest_prefix(short, 60)
    assert engine.pauses > 0


def test_prompts_that_run_out_are_published_with_a_warning(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    manifest = desk.run(10_000, FakeEngine())
    total = sum(map(length_of, desk.contents))
    assert (manifest.rows.kept, manifest.tokens["completion"]) == (40, total)
    assert manifest.facts["budget_filled"] is False
    assert f"its 40 prompts hold {total} completion tokens, the budget is 10000; raise prompts_per_shard" in caplog.text


def test_prompts_that_cannot_be_answered_are_counted(tmp_path: Path) -> None:
    contents = [*questions(3), "x" * (CONTEXT - MAX_TOKENS + 1), "refuse me", "y" * (CONTEXT - MAX_TOKENS), "z" * 60]
    manifest = Desk(tmp_path / "a", contents).run(10_000, FakeEngine())
    assert manifest.rows.dropped == {"prompt_too_long": 2, "template_refused": 1}
    assert manifest.rows.kept == 4
    # behind the end of the shard nothing is looked at
    manifest = Desk(tmp_path / "b", contents).run(1, FakeEngine(slots=1))
    assert manifest.rows.dropped == {"beyond_budget": 6}


def test_another_target_or_sampling_buys_new_answers(desk: Desk) -> None:
    desk.run(50, FakeEngine())
    desk.run(50, hotter := FakeEngine(), temperature=0.7)
    assert hotter.asked
    desk.set_target("another target")
    desk.run(50, other := FakeEngine())
    assert other.asked
    desk.set_target("target of the day")
    desk.run(50, None)
    desk.run(50, None, temperature=0.7)


def test_the_journal_key_holds_what_changes_an_answer() -> None:
    identity = {"target": "a"}
    base = {"revision": 1, "target": {"model": "x"}, "engine": {}, "sampling": {"max_tokens": 8}, "token_budget": 5}
    same: list[dict[str, Any]] = [{**base, "token_budget": 9}, {**base, "target": {"model": "y"}}]
    other: list[dict[str, Any]] = [{**base, "sampling": {"max_tokens": 9}}, {**base, "target": {"dtype": "bfloat16"}}]
    assert {journal_key(recipe, identity) for recipe in [base, *same]} == {journal_key(base, identity)}
    assert journal_key(base, identity) not in {journal_key(recipe, identity) for recipe in other}
    assert journal_key(base, identity) != journal_key(base, {"target": "b"})


def test_afresh_greedy_gives_the_same_bytes_and_keeps_the_old_journal(desk: Desk) -> None:
    desk.run(100, FakeEngine())
    published, journal = desk.published(), desk.journal.read_bytes()
    desk.run(100, engine := FakeEngine(), afresh=True)
    assert len(engine.asked) >= len(desk.rows())
    assert desk.published() == published
    assert desk.journal.with_name("s0000.jsonl.1").read_bytes() == journal


def test_afresh_at_a_temperature_moves_the_seed_on(desk: Desk) -> None:
    desk.run(100, FakeEngine(), temperature=0.7, seed=5)
    first = desk.rows()
    assert {row["seed"] for row in first} == {5}
    desk.run(100, FakeEngine(), afresh=True, temperature=0.7, seed=5)
    assert {row["seed"] for row in desk.rows()} == {6}
    assert desk.rows()[0]["output_ids"] != first[0]["output_ids"]
    # and a raise afterwards goes on with the moved seed
    desk.run(200, FakeEngine(), temperature=0.7, seed=5)
    assert {row["seed"] for row in desk.rows()} == {6}


@pytest.mark.parametrize("content", [[], [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]])
def test_rows_that_are_no_question_are_named(desk: Desk, content: list[dict[str, Any]]) -> None:
    with publish(desk.prompts, stage="ingest", recipe={}) as draft:
        write_jsonl(draft.path, [prompt_row(0, "fine"), {**prompt_row(1, "x"), "messages": content}])
        draft.rows = RowCounts(read=2, kept=2)
    with pytest.raises(EyrieError, match=r"zst:2: (ends with an assistant turn|has no id or no messages)"):
        desk.run(1000, FakeEngine())
    assert not desk.out.exists()


def test_a_damaged_prompt_shard_is_refused_before_work(desk: Desk) -> None:
    desk.prompts.write_bytes(desk.prompts.read_bytes()[:-3])
    with pytest.raises(EyrieError, match="truncated or edited"):
        desk.run(100, None)
    assert not desk.journal.exists()


def test_an_engine_that_breaks_its_promise_is_a_bug(desk: Desk) -> None:
    class Faulty(FakeEngine):
        answers = iter([Answer([], "stop"), Answer([5] * (MAX_TOKENS + 1), "length"), Answer([5], "odd")])

        @classmethod
        def of(cls, request: Request) -> Answer:
            return next(cls.answers)

    for fault in ("0 tokens", f"{MAX_TOKENS + 1} tokens", "finish_reason 'odd'"):
        with pytest.raises(ValueError, match=f"the engine gave {fault}"):
            desk.run(100, Faulty())


def test_a_disk_that_fills_while_answers_come(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = os.write

    def full(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(EyrieError, match=r"journal/s0000\.jsonl: cannot grow .*; the 5 answers in it are kept$"):
            desk.run(200, FakeEngine())
    assert not desk.out.exists()
    desk.run(200, again := FakeEngine())
    assert {request.position for request in again.asked}.isdisjoint(read_positions(desk, 5))


def read_positions(desk: Desk, count: int) -> set[int]:
    """Positions of the first ``count`` journaled rows."""
    ids = [prompt_row(0, content)["id"] for content in desk.contents]
    return {ids.index(json.loads(line)["id"]) for line in desk.journal.read_text().splitlines()[1 : count + 1]}


def test_a_disk_that_fills_while_publishing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, rows: Iterator[dict[str, Any]]) -> None:
        path.write_text(json.dumps(next(iter(rows))))
        raise OSError(errno.ENOSPC, "No space left on device")

    def run() -> None:
        desk.run(200, FakeEngine())

    with monkeypatch.context() as patched:
        patched.setattr("eyrie.generate.stage.write_jsonl", full)
        with pytest.raises(SystemExit, match=r"error: no space left on device while writing .* nothing half-written"):
            run_cli(run)
    assert list(desk.out.parent.iterdir()) == []
    desk.run(200, None)
    assert desk.rows()


@given(
    lengths=st.lists(st.integers(1, 30), max_size=60),
    budget=st.integers(1, 400),
    slots=st.integers(1, 20),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_budget_never_stalls_and_never_asks_for_what_it_knows_to_be_needless(
    lengths: list[int], budget: int, slots: int, data: st.DataObject
) -> None:
    book = Budget(budget, 30)
    running: list[int] = []
    position = 0
    while not book.full and (position < len(lengths) or running):
        if book.needs_next and position < len(lengths) and len(running) < slots:
            assert sum(lengths[:position]) < budget or running
            book.start(position)
            running.append(position)
            position += 1
        else:
            assert running, "paused with nothing in flight"
            done = running.pop(data.draw(st.integers(0, len(running) - 1)))
            book.book(done, lengths[done])
    prefix = next((n for n in range(len(lengths)) if sum(lengths[:n]) >= budget), len(lengths))
    assert book.end == prefix
    assert book.filled == sum(lengths[:prefix])
