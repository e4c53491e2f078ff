"""Prompt shards: slices, accounts, duplicates, rejects, errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.datasets import ingest, suite_prompts
from eyrie.datasets.ingest import rejects_path
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl
from eyrie.formats.manifest import manifest_path, verified_manifest


def recipe(path: Path, shard: int = 0, **fields: Any) -> dict[str, Any]:
    dataset = {"adapter": "jsonl", "path": str(path)} | fields
    return {"revision": 1, "dataset": dataset, "shard": shard}


def source(folder: Path, rows: list[Any]) -> Path:
    path = folder / "source.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_rows_are_kept_or_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one question of mine"},
        {"prompt": "One question  of mine?"},
        {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "an answer that is cut"}]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"other": 1},
        {"prompt": "x" * 50},
    ]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), max_prompt_chars=40), "mine", out)
    kept = list(read_jsonl(out))
    assert [row["index"] for row in kept] == [0, 2]
    assert kept[1]["messages"] == [{"role": "user", "content": "two"}]
    manifest = verified_manifest(out, stage="ingest")
    assert (manifest.rows.read, manifest.rows.kept) == (6, 2)
    assert manifest.rows.dropped == {"duplicate": 1, "malformed": 1, "prompt_too_long": 1, "unknown_role": 1}
    rejects = list(read_jsonl(rejects_path(out)))
    assert [row["index"] for row in rejects] == [1, 3, 4, 5]
    assert rejects[1]["detail"] == "'narrator'"
    assert "narrator" in rejects[1]["row"]


def test_conversations_to_answer_turn_by_turn_are_scripts(tmp_path: Path) -> None:
    rows = [
        chat("a", "b" * 99, "c", "d", "e"),
        chat("a", "another answer", "c", "d", "f"),  # the target is told the same two turns
        chat("a", "b", "g", "h"),
        chat("x"),
        chat("y" * 41, "b", "c"),
    ]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), turns=2, max_prompt_chars=40), "mine", out)
    kept = [[message["content"] for message in row["messages"]] for row in read_jsonl(out)]
    assert kept == [["a", "b" * 99, "c"], ["a", "b", "g"], ["x"]]
    assert verified_manifest(out, stage="ingest").rows.dropped == {"duplicate": 1, "prompt_too_long": 1}


def test_tool_results_behind_the_last_user_turn_stay_in_a_script(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "3"}]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(
        recipe(source(tmp_path, [{"messages": [*messages, {"role": "assistant", "content": "three"}]}]), turns=1),
        "m",
        out,
    )
    (row,) = read_jsonl(out)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool"]


def test_native_rows_keep_their_answers_and_end_with_one(tmp_path: Path) -> None:
    rows = [chat("a", "b", "c"), chat("a", "b", "other", "d"), chat("no answer")]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), kind="native"), "mine", out)
    kept = list(read_jsonl(out))
    assert [len(row["messages"]) for row in kept] == [2, 4]
    assert verified_manifest(out, stage="ingest").rows.dropped == {"no_assistant_turn": 1}


def test_tool_declarations_are_kept_or_dropped(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    asked = [{"role": "user", "content": "b"}, call, {"role": "tool", "content": "1"}, {"role": "user", "content": "c"}]
    path = source(tmp_path, [{"prompt": "a", "tools": [{"name": "f"}]}, {"messages": asked}])
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(path), "mine", out)
    assert [row.get("tools") for row in read_jsonl(out)] == [[{"type": "function", "function": {"name": "f"}}], None]
    ingest(recipe(path, tools="drop"), "mine", out)
    assert ["tools" in row for row in read_jsonl(out)] == [False]
    assert verified_manifest(out, stage="ingest").rows.dropped == {"tool_turns": 1}


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path, out = source(tmp_path, [{"prompt": f"question {i}"} for i in range(20)]), tmp_path / "s0000.jsonl.zst"
    ingest(recipe(path), "mine", out)
    first = out.read_bytes(), manifest_path(out).read_bytes()
    ingest(recipe(path), "mine", out)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == first


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "b", "c", "d", "e", "f", "g"]), min_size=1, max_size=30), st.integers(1, 4))
def test_the_shards_accounts_add_up_to_the_source(texts: list[str], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = source(Path(folder), [{"prompt": text} for text in texts])
        unique = len({text for text in texts if text})
        kept, read = [], 0
        for shard in range(-(-unique // size)):
            out = Path(folder) / f"s{shard:04d}.jsonl.zst"
            ingest(recipe(path, shard, prompts_per_shard=size), "mine", out)
            rows = list(read_jsonl(out))
            manifest = verified_manifest(out, stage="ingest")
            assert len(rows) == manifest.rows.kept <= size
            kept += rows
            read += manifest.rows.read
        assert [row["index"] for row in kept] == sorted({texts.index(text) for text in texts if text})
        # What stands behind the last full shard is nobody's; a last shard that is not full ends with the source.
        assert read == len(texts) if unique % size else read <= len(texts)


CELL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=4,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "gpt", "tool", "narrator"])}, optional={"content": CELL}
)
ANY_ROW = st.dictionaries(st.sampled_from(["messages", "conversations", "tools", "prompt", "images"]), CELL) | (
    st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)})
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_ROW, max_size=12), st.sampled_from(["answered", "native"]))
def test_whatever_the_rows_hold_each_is_kept_or_refused_and_the_counts_balance(rows: list[Any], kind: str) -> None:
    import tempfile

    good = chat("a question that is surely kept", "and its answer")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "s0000.jsonl.zst"
        ingest(recipe(source(Path(folder), [good, *rows]), kind=kind), "mine", out)
        manifest = verified_manifest(out, stage="ingest")
        assert manifest.rows.read == len(rows) + 1
        kept = [row["index"] for row in read_jsonl(out)]
        refused = [(row["index"], row["reason"]) for row in read_jsonl(rejects_path(out))]
        assert sorted([*kept, *(index for index, _ in refused)]) == list(range(len(rows) + 1))
        assert dict(sorted(Counter(reason for _, reason in refused).items())) == manifest.rows.dropped


def test_a_named_row_counts_once(tmp_path: Path) -> None:
    message = {"role": "user", "content": "Fix it."}
    rows = [
        {"messages": [{**message, "content": f"Fix {n}."}], "instance_id": "a", "traj_id": str(n // 2)}
        for n in range(4)
    ]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), adapter="swe-smith"), "mine", out)
    assert [row["index"] for row in read_jsonl(out)] == [0, 2]
    assert [row["detail"] for row in read_jsonl(rejects_path(out))] == ["a 0", "a 1"]
    assert verified_manifest(out, stage="ingest").facts.get("source") is None


def test_sixteen_answers_to_one_question_are_one_prompt(tmp_path: Path) -> None:
    rows = [
        {"source": "s", "domain": "code", "conversations": [{"from": "human", "value": f"Sort list {i // 16} for me."},
                                                            {"from": "gpt", "value": f"<think>{i}</think>Done."}]}
        for i in range(32)
    ]  # fmt: skip
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), adapter="openthoughts3"), "mine", out)
    assert [row["index"] for row in read_jsonl(out)] == [0, 16]
    assert verified_manifest(out, stage="ingest").rows.dropped == {"duplicate": 30}


def test_fragments_of_chats_are_mended_or_counted(tmp_path: Path) -> None:
    """Empty lists, a system text alone, and parts of a long chat that begin with one answer or two."""

    def row(*pairs: tuple[str, str]) -> dict[str, Any]:
        return {"id": "a", "conversations": [{"from": role, "value": text} for role, text in pairs]}

    rows = [
        row(),
        {"id": "b", "conversations": None},
        row(("system", "Be brief.")),
        row(("gpt", "so it ends."), ("human", "one more?"), ("gpt", "Yes.")),
        row(("system", "Be brief."), ("gpt", "a"), ("gpt", "b"), ("human", "another?"), ("gpt", "No.")),
        row(("gpt", "a"), ("gpt", "b")),
    ]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), adapter="sharegpt", kind="native"), "mine", out)
    kept = [[message["content"] for message in row["messages"]] for row in read_jsonl(out)]
    assert kept == [["one more?", "Yes."], ["Be brief.", "another?", "No."]]
    manifest = verified_manifest(out, stage="ingest")
    assert manifest.rows.dropped == {"no_messages": 1, "no_user_turn": 3}
    assert manifest.rows.read == manifest.rows.kept + sum(manifest.rows.dropped.values()) == len(rows)
    assert [row["reason"] for row in read_jsonl(rejects_path(out))].count("no_user_turn") == 3


def test_text_that_looks_like_data_or_control_stays_text(tmp_path: Path) -> None:
    texts = ['{"type": "struct", "nullable": true}', "[1, 2]", "null", "What does <|im_end|><|im_user|>user mean?"]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, [{"prompt": text} for text in texts])), "mine", out)
    assert [row["messages"][0]["content"] for row in read_jsonl(out)] == texts


def test_reasoning_of_every_turn_is_stored(tmp_path: Path) -> None:
    turns = [
        turn
        for i in range(2)
        for turn in (
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": f"answer {i}", "reasoning_content": f"thought {i}"},
        )
    ]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, [{"messages": turns}]), kind="native"), "mine", out)
    (row,) = read_jsonl(out)
    assert [message.get("reasoning") for message in row["messages"]] == [None, "thought 0", None, "thought 1"]


def test_a_row_that_an_adapter_refuses_can_be_read_among_the_rejects(tmp_path: Path) -> None:
    rows = [{"question": "a?", "answer": "b"}, {"frage": "half a pair: \ud800"}]
    out = tmp_path / "s0000.jsonl.zst"
    ingest(recipe(source(tmp_path, rows), adapter="gsm8k"), "mine", out)
    (refused,) = read_jsonl(rejects_path(out))
    assert refused["index"] == 1
    assert refused["reason"] == "malformed"
    assert refused["detail"] == "no column 'question'; the row has: frage"
    assert "half a pair" in refused["row"]


def test_a_dataset_that_yields_nothing_is_named(tmp_path: Path) -> None:
    path, out = source(tmp_path, [{"prompt": " "}, {"x": 1}]), tmp_path / "s0000.jsonl.zst"
    with pytest.raises(EyrieError, match=r"dataset mine: yields no prompt .*empty_content 1") as caught:
        ingest(recipe(path), "mine", out)
    assert "\n" not in str(caught.value)
    with pytest.raises(EyrieError, match=r"dataset mine: yields no prompt"):
        ingest(recipe(path, shard=2), "mine", out)
    assert not out.exists()
    assert not manifest_path(out).exists()
    assert not rejects_path(out).exists()


def test_a_shard_behind_the_end_of_the_source_says_what_to_lower(tmp_path: Path) -> None:
    path = source(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(EyrieError, match=r"s0001 would be empty, the source holds 2 usable prompts.*token_budget"):
        ingest(recipe(path, shard=1, prompts_per_shard=2), "mine", tmp_path / "s0001.jsonl.zst")


def test_a_broken_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "source.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\n')
    with pytest.raises(EyrieError, match=r"dataset mine: .*source\.jsonl:2: broken"):
        ingest(recipe(path), "mine", tmp_path / "s0000.jsonl.zst")
    with pytest.raises(EyrieError, match=r"no such file"):
        ingest(recipe(tmp_path / "absent.jsonl"), "mine", tmp_path / "s0000.jsonl.zst")


def test_suite_prompts_come_without_tools(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    prompts = suite_prompts("human-eval", {})
    assert len(prompts) == 164
    assert all(p.tools is None and p.messages[-1].role == "user" for p in prompts)
