"""JSON lines: round trips, and faults that name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl, write_jsonl

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=8)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_round_trip(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "x.jsonl.zst"
    write_jsonl(path, rows)
    assert list(read_jsonl(path)) == rows
    first = path.read_bytes()
    write_jsonl(path, iter(rows))
    assert path.read_bytes() == first


def test_rows_longer_than_a_read_and_many_frames(tmp_path: Path) -> None:
    rows = [{"text": "ü" * 1_500_000}, {"text": "b"}]
    path = tmp_path / "x.jsonl.zst"
    write_jsonl(path, rows)
    path.write_bytes(path.read_bytes() + zstandard.compress(b'{"text": "c"}\n'))
    assert list(read_jsonl(path)) == [*rows, {"text": "c"}]


def test_plain_files_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}')
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("line", "why"), [('{"a": ', "broken or truncated"), ("[1]", "holds list, expected a JSON")])
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(EyrieError, match=f"{path}:2: {why}"):
        list(read_jsonl(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(EyrieError, match=f"{path}:1: broken"):
        list(read_jsonl(path))


@pytest.mark.parametrize("left", [0, 1, 10, -1])
def test_a_truncated_frame_is_an_error_not_a_shorter_file(tmp_path: Path, left: int) -> None:
    path = tmp_path / "x.jsonl.zst"
    write_jsonl(path, [{"a": n, "b": str(n * 7919)} for n in range(200)])
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(EyrieError, match="broken or truncated"):
        list(read_jsonl(path))


def test_a_file_that_is_no_zstd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    path.write_text('{"a": 1}\n')
    with pytest.raises(EyrieError, match="broken or truncated"):
        list(read_jsonl(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=r"x.jsonl: no such file"):
        list(read_jsonl(tmp_path / "x.jsonl"))
