"""Conversations of several turns, from the shard that holds them to the merge: what an earlier turn asks counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from merge_desk import recipe, run, suite

from eyrie.config import Merge
from eyrie.conversation import prompt_key
from eyrie.formats.jsonl import write_jsonl
from eyrie.formats.manifest import RowCounts, read_manifest
from eyrie.formats.publish import publish
from eyrie.formats.tokens import read_tokens
from eyrie.merge import split_of
from eyrie.targets import identify, read_card
from eyrie.tokenize_rows import tokenize

END = 2
ASKED = "Name the seven hills of the old city, and who built on them!"
CLEAN = "How many sheep can graze on an acre of wet land in spring?"
OPENING = "Good morning, I have a question about conversation number {}."


@pytest.fixture(scope="module")
def card(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The card of a target with a tokenizer, which native conversations need."""
    out = tmp_path_factory.mktemp("run") / "target.json"
    identify({"target": {}}, str(tiny_target), out)
    return out


def talk(number: int, *questions: str) -> list[dict[str, str]]:
    """User turns with an answer behind each."""
    messages = []
    for text in (OPENING.format(number), *questions):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Paris."}]
    return messages


def answered(path: Path, talks: list[list[dict[str, str]]], card: Path) -> Path:
    """A response shard as generate writes it for a dataset with ``turns``: a row an answer, behind its context."""
    rows: list[dict[str, Any]] = []
    for number, messages in enumerate(talks):
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, place in enumerate(places):
            rows.append(
                {
                    "id": f"{number:016x}", "index": number, "messages": messages[:place], "turn": turn,
                    "prompt_key": prompt_key(messages), "prompt_ids": [1, 70, 71 + turn], "output_ids": [80, 81, END],
                    "text": "Paris.", "finish_reason": "stop", "temperature": 0.0, "seed": 0,
                }
            )  # fmt: skip
    with publish(path, stage="generate", recipe={}, identity=read_card(card).identity()) as draft:
        write_jsonl(draft.path, rows)
        draft.rows = RowCounts(read=len(rows), kept=len(rows))
    return path


def native(path: Path, talks: list[list[dict[str, str]]]) -> Path:
    """A prompt shard whose conversations keep the data's answers."""
    rows = [{"id": f"{number:016x}", "index": number, "messages": messages} for number, messages in enumerate(talks)]
    with publish(path, stage="ingest", recipe={}) as draft:
        write_jsonl(draft.path, rows)
        draft.rows = RowCounts(read=len(rows), kept=len(rows))
    return path


def tokens(kind: str, talks: list[list[dict[str, str]]], card: Path, model: Path, folder: Path) -> Path:
    source, out = folder / "source" / "s0000.jsonl.zst", folder / "tokens" / "mine" / "s0000.parquet"
    made = answered(source, talks, card) if kind == "answered" else native(source, talks)
    budget = {"token_budget": 10_000} if kind == "native" else {}
    tokenize({"kind": kind, "tokenize": {}, **budget}, source=made, name="mine", target=card, model=str(model), out=out)
    return out


@pytest.mark.parametrize("kind", ["answered", "native"])
def test_a_row_goes_for_what_an_earlier_turn_of_its_conversation_asked(
    kind: str, card: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """The suite's words stand two turns before the last row, whose own question is no one's."""
    talks = [
        talk(0, "so: " + ASKED.lower(), CLEAN, "Thank you."),
        talk(1, CLEAN, "Thank you.", "Go on."),
        talk(2, "Thank you.", CLEAN, "And " + ASKED),
    ]
    shard = tokens(kind, talks, card, tiny_target, tmp_path)
    assert read_manifest(shard).rows.kept == 12
    with suite(["who lives at the beach", ASKED]) as suites:
        made = recipe([("mine", 1.0)], suites, decontamination_ngram=8)
        index, summary = run(made, card, [shard], tmp_path / "merged")
    assert set(index["row_id"].str.split(":").list.first()) == {f"{1:016x}"}
    assert len(index) == 4
    assert summary["left_out"] == {"benchmark_prompt": 8}, "each row once, however often its conversation asks"


@pytest.mark.parametrize("kind", ["answered", "native"])
def test_the_test_split_is_kept_from_later_rows_by_their_earlier_turns(
    kind: str, card: Path, tiny_target: Path, tmp_path: Path
) -> None:
    options = Merge(test_fraction=0.4, validation_fraction=0.0)
    keys = {prompt_key([{"role": "user", "content": OPENING.format(number)}]): number for number in range(40)}

    def chosen(split: str) -> list[int]:
        return [number for key, number in keys.items() if split_of(key, options) == split]

    test, (first, second, *_) = chosen("test")[0], chosen("train")
    # its opening differs from the held-out one by a word, so only what is asked inside can tell the two apart
    talks = [talk(test, ASKED), talk(first, "so: " + ASKED, "Thank you."), talk(second, CLEAN, "Thank you.")]
    shard = tokens(kind, talks, card, tiny_target, tmp_path)
    made = recipe([("mine", 1.0)], test_fraction=0.4, decontamination_ngram=10)
    index, summary = run(made, card, [shard], tmp_path / "merged")
    assert set(index["row_id"].str.split(":").list.first()) == {f"{0:016x}", f"{2:016x}"}
    assert summary["left_out"] == {"held_out_prompt": 3}


def test_both_kinds_tell_the_merge_the_same(card: Path, tiny_target: Path, tmp_path: Path) -> None:
    talks = [talk(number, ASKED, CLEAN, f"Question {number}") for number in range(3)]
    one = read_tokens(tokens("answered", talks, card, tiny_target, tmp_path / "a"))
    other = read_tokens(tokens("native", talks, card, tiny_target, tmp_path / "b"))
    columns = ["row_id", "conversation", "prompt_key", "turn", "asked"]
    assert one.select(columns).equals(other.select(columns))
    assert one["asked"].explode().to_list() == [m["content"] for talk in talks for m in talk if m["role"] == "user"]
