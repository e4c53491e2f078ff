"""Reading files, folders and hub datasets row by row."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from eyrie.datasets.keys import KeySet
from eyrie.datasets.registry import Hub, Source
from eyrie.datasets.streams import resolved, rows_of
from eyrie.errors import EyrieError
from eyrie.formats import jsonl
from eyrie.formats.jsonl import json_rows, write_jsonl

EARLY = {"messages": [{"role": "user", "content": "x" * 400}], "tools": None, "extra": [], "mixed": None}
LATE = {
    "messages": [{"role": "user", "content": "late", "tool_calls": [{"id": "1"}]}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "extra": [{"deep": {"er": 1}}],
    "mixed": "text",
    "new": 1,
}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **hub: str) -> list[dict[str, Any]]:
    return list(rows_of(Source({}, path=str(path), hub=Hub(**hub))))


def test_columns_that_are_null_or_empty_for_megabytes_and_a_struct_later(tmp_path: Path) -> None:
    rows = [EARLY] * 4000 + [LATE, {**LATE, "mixed": 7, "tools": "[]"}, EARLY]
    assert read(lines(tmp_path / "a.jsonl", rows)) == rows
    assert read(lines(tmp_path / "b.jsonl", rows[::-1])) == rows[::-1]


def test_the_order_of_files_does_not_change_the_rows(tmp_path: Path) -> None:
    for name, order in (("one", [EARLY, LATE]), ("two", [LATE, EARLY])):
        folder = tmp_path / name
        folder.mkdir()
        for i, row in enumerate(order):
            lines(folder / f"part-{i}.jsonl", [row] * 3)
        assert read(folder) == [row for row in order for _ in range(3)]


def test_a_plain_folder_of_files_stands_for_a_dataset_with_subsets(tmp_path: Path) -> None:
    lines(tmp_path / "mine.jsonl", [{"a": 1}])
    assert read(tmp_path, subset="kimi", split="train_sft") == [{"a": 1}]


def test_parquet_files_keep_their_own_schemas(tmp_path: Path) -> None:
    first = {"messages": [{"role": "user", "content": "a"}], "tools": None, "big": "unread"}
    second = {"messages": [{"role": "user", "content": "b", "name": "n"}], "tools": [{"name": "f"}]}
    for i, row in enumerate((first, second)):
        parquet.write_table(pa.Table.from_pylist([row] * 2), tmp_path / f"part-{i}.parquet")
    assert read(tmp_path) == [first, first, second, second]
    source = Source({}, path=str(tmp_path / "part-0.parquet"))
    wanted = [{"messages": first["messages"], "tools": None}] * 2
    assert list(rows_of(source, ["messages", "tools", "absent"])) == wanted


def test_a_folder_is_read_by_subset_and_split_as_its_card_says(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: kimi\n  data_files:\n  - split: train.success.oss\n    path: k.jsonl\n"
        "- config_name: other\n  data_files:\n  - split: tool\n    path: t.jsonl\n  - split: xml\n    path: x.json\n"
        "---\n"
    )
    lines(tmp_path / "k.jsonl", [{"a": 1}])
    lines(tmp_path / "t.jsonl", [{"a": 2}])
    (tmp_path / "x.json").write_text('[{"a": 3}, {"a": null}]')
    assert read(tmp_path, subset="kimi") == [{"a": 1}]
    assert read(tmp_path, subset="kimi", split="train.success.oss") == [{"a": 1}]
    assert read(tmp_path, subset="other", split="tool") == [{"a": 2}]
    assert read(tmp_path, subset="other", split="xml") == [{"a": 3}, {"a": None}]
    with pytest.raises(EyrieError, match=r"has no split None; set `split` to one of: tool, xml"):
        read(tmp_path, subset="other")
    with pytest.raises(EyrieError, match=r"'claude' not found.*check `repo`, `subset`"):
        read(tmp_path, subset="claude")


def test_a_hub_dataset_is_asked_for_by_name_and_its_commit_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = tmp_path / f"repo@{commit}"
    folder.mkdir()
    lines(folder / "a.jsonl", [{"a": 1}])
    asked: list[Any] = []

    def load_dataset_builder(*names: Any, **how: Any) -> Any:
        asked.extend([*names, how])
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": [str(folder / "a.jsonl")]}))

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    source = Source({}, hub=Hub("owner/name", "sub", "train", "main", "a*.jsonl"))
    assert list(rows_of(source)) == [{"a": 1}]
    assert asked == ["owner/name", "sub", {"revision": "main", "data_files": "a*.jsonl"}]
    place = {"repo": "owner/name", "subset": "sub", "files": "a*.jsonl", "split": "train"}
    assert source.facts == {**place, "revision": commit}


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(EyrieError, match=r"owner/name: cannot be read \(ConnectionError: .*give `path`") as caught:
        resolved(Hub("owner/name"))
    assert "\n" not in str(caught.value)


def test_other_files_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(EyrieError, match=r"a\.csv: unknown kind of file"):
        read(tmp_path / "a.csv")
    with pytest.raises(EyrieError, match=r"b\.jsonl: no such file"):
        read(tmp_path / "b.jsonl")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(EyrieError, match=r"c\.parquet: cannot be read"):
        read(tmp_path / "c.parquet")
    with pytest.raises(EyrieError, match=r"needs `path`.*or `repo`"):
        list(rows_of(Source({})))


def test_compressed_files(tmp_path: Path) -> None:
    rows = [{"a": i, "text": "y" * i} for i in range(50)]
    write_jsonl(tmp_path / "a.jsonl.zst", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    for name in ("a.jsonl.zst", "b.jsonl.gz", "c.json.gz"):
        assert read(tmp_path / name) == rows
    whole = (tmp_path / "b.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(EyrieError, match=r"b\.jsonl\.gz:\d+: broken or truncated"):
        read(tmp_path / "b.jsonl.gz")


def test_a_carriage_return_or_a_paragraph_separator_ends_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "\u2028 \u0085"}\r\n\r\n{"a": 2}'.encode())
    assert read(path) == [{"a": "\u2028 \u0085"}, {"a": 2}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_arrays_and_lines_arrive_whole_however_they_are_cut(
    rows: list[dict[str, Any]], chunk: int, ascii_only: bool, indent: int | None
) -> None:
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    listed = "".join(json.dumps(row) + "\n" for row in rows).encode()
    before, jsonl.CHUNK = jsonl.CHUNK, chunk
    try:
        assert list(json_rows(io.BytesIO(listed), "x.jsonl")) == rows
        assert list(json_rows(io.BytesIO(array), "x.json")) == rows
    finally:
        jsonl.CHUNK = before


@pytest.mark.parametrize("text", ["[", '[{"a": 1}', '[{"a": 1} {"a": 2}]', '[{"a": 1},]', '[{"a": 1}, 2]', '[{"a": }]'])
def test_a_broken_array_is_an_error_that_names_the_row(text: str) -> None:
    with pytest.raises(EyrieError, match=r"x\.json:\d+: "):
        list(json_rows(io.BytesIO(text.encode()), "x.json"))


@pytest.mark.parametrize("shape", ["lines", "array"])
def test_memory_holds_a_chunk_and_a_row(shape: str, tmp_path: Path) -> None:
    rows = [EARLY] * 8000
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows) if shape == "array" else "".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 3_500_000
    tracemalloc.start()
    count = sum(1 for _ in rows_of(Source({}, path=str(path))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000
    assert peak < 2_000_000


@given(st.lists(st.text(max_size=3)))
def test_a_key_set_is_a_set(texts: list[str]) -> None:
    seen, reference = KeySet(), set[str]()
    for text in texts:
        assert seen.add(text) is (text not in reference)
        reference.add(text)
    assert len(seen) == len(reference)


def test_a_key_set_grows() -> None:
    seen = KeySet()
    assert all(seen.add(str(i)) for i in range(20_000))
    assert not any(seen.add(str(i)) for i in range(20_000))
    assert len(seen) == 20_000
