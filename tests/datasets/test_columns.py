"""The generic adapter: any dataset by the names of its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from eyrie.conversation import Reject, normalise
from eyrie.datasets import find_adapter, ingest
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl
from eyrie.formats.manifest import verified_manifest


def made(folder: Path, rows: list[dict[str, Any]], kind: Any = "native", **options: Any) -> list[Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out: list[Any] = []
    for raw in find_adapter("columns").open(options, kind, str(path)):
        try:
            if isinstance(raw, Reject):
                raise raw
            out.append([message.to_dict() for message in normalise(raw).messages])
        except Reject as reject:
            out.append(reject.reason)
    return out


def test_prompt_and_response(tmp_path: Path) -> None:
    rows = [{"q": "a?", "a": "b", "why": "w", "sys": "s"}, {"q": "c?", "a": "d", "why": None, "sys": ""}, {"a": "e"}]
    options = {"prompt": "q", "response": "a", "reasoning": "why", "system": "sys"}
    assert made(tmp_path, rows, **options) == [
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "b", "reasoning": "w"},
        ],
        [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}],
        "malformed",
    ]
    assert made(tmp_path, rows[1:2], "answered", prompt="q") == [[{"role": "user", "content": "c?"}]]


def test_messages_with_keys_and_roles_of_their_own(tmp_path: Path) -> None:
    turns = [{"who": "Pupil", "said": "a?"}, {"who": "teacher", "said": "b"}]
    rows = [{"talk": turns}, {"talk": json.dumps(turns)}, {"talk": [{"who": "dean", "said": "x"}]}, {"talk": 3}]
    options = {"messages": "talk", "role": "who", "content": "said", "roles": "teacher=assistant, pupil=user"}
    expected = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    assert made(tmp_path, rows, **options) == [expected, expected, "unknown_role", "malformed"]


def test_tools_and_system_columns(tmp_path: Path) -> None:
    row = {"m": [{"from": "human", "value": "a?"}], "t": '[{"name": "f"}]', "s": "be brief"}
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{**row, "other": "unread"}]), path)
    options = {"messages": "m", "tools": "t", "system": "s"}
    (raw,) = find_adapter("columns").open(options, "answered", str(path))
    conversation = normalise(raw)
    assert [m.content for m in conversation.messages] == ["be brief", "a?"]
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set option `messages` or option `prompt`"),
        ({"messages": "a", "prompt": "b"}, "not both"),
        ({"prompt": "a"}, "a native dataset needs option `response`"),
        ({"messages": "a", "roles": "x=teacher"}, "option 'roles' holds 'x=teacher'; write name=role"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=message):
        made(tmp_path, [], **options)


def test_a_wrong_column_name_is_said_with_the_names_there_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a?"}\n{"question": "b?"}\n')
    dataset = {"adapter": "columns", "path": str(path), "options": {"prompt": "qestion"}}
    with pytest.raises(EyrieError, match=r"malformed 2, as in: no column 'qestion'; the row has: question"):
        ingest({"revision": 1, "dataset": dataset, "shard": 0}, "mine", tmp_path / "out" / "s0000.jsonl.zst")


def test_a_folder_goes_through_ingest_and_its_files_are_inputs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(2):
        (source / f"{i}.jsonl").write_text(f'{{"q": "question {i}"}}\n{{"q": null}}\n')
    out = tmp_path / "out" / "s0000.jsonl.zst"
    dataset = {"adapter": "columns", "path": str(source), "options": {"prompt": "q"}}
    ingest({"revision": 1, "dataset": dataset, "shard": 0}, "mine", out)
    manifest = verified_manifest(out, stage="ingest")
    assert manifest.rows.dropped == {"empty_content": 2}
    assert sorted(manifest.inputs) == ["0.jsonl", "1.jsonl"]
    assert manifest.facts["source"] == {"split": "train"}
    assert [row["index"] for row in read_jsonl(out)] == [0, 2]


def test_a_place_that_an_adapter_does_not_read_is_refused() -> None:
    from eyrie.datasets.registry import Hub

    with pytest.raises(EyrieError, match="adapter human-eval: reads no `path`"):
        find_adapter("human-eval").open({}, "answered", "x.jsonl")
    with pytest.raises(EyrieError, match="adapter jsonl: reads no hub dataset"):
        find_adapter("jsonl").open({}, "answered", None, Hub("a/b"))


def test_another_repository_takes_neither_subset_nor_revision_from_the_entry() -> None:
    from eyrie.datasets.registry import ADAPTERS, Hub

    preset = ADAPTERS["glaive"].hub
    assert Hub(split="test").over(preset) == Hub(preset.repo, None, "test", preset.revision)
    assert Hub("me/copy").over(preset) == Hub("me/copy")
