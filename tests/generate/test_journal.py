from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.errors import EyrieError
from eyrie.generate.journal import Journal, decode, encode

RECORDS = st.lists(
    st.fixed_dictionaries({"id": st.text(max_size=8), "output_ids": st.lists(st.integers(0, 1 << 31), max_size=6)}),
    min_size=1,
    max_size=6,
)


def fill(path: Path, records: list[dict[str, Any]]) -> bytes:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def records_of(path: Path) -> list[dict[str, Any]]:
    with Journal(path) as journal:
        return list(journal.records)


@given(RECORDS, st.data())
@settings(max_examples=40, deadline=None)
def test_a_journal_cut_at_any_byte_repairs_to_the_records_before_the_cut(
    records: list[dict[str, Any]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s0000.jsonl"
        whole = fill(path, records)
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        survivors = max(whole[:cut].count(b"\n") - 1, 0)
        assert records_of(path) == records[:survivors]
        # what was lost is written again and the file is as good as new
        fill(path, records[survivors:])
        assert path.read_bytes() == whole


@given(RECORDS, st.data())
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_costs_the_records_it_touches_and_no_other(
    records: list[dict[str, Any]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s0000.jsonl"
        whole = bytearray(fill(path, records))
        body = whole.index(b"\n") + 1
        at = data.draw(st.integers(body, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        hit = bytes(whole[:at]).count(b"\n") - 1
        left = records_of(path)
    # a flip in a line end joins two lines, so two records can be lost
    untouched = records[:hit] + records[hit + 1 :]
    assert left in (untouched, records[:hit] + records[hit + 2 :])


VALUES = st.integers() | st.text(max_size=6) | st.lists(st.none(), max_size=2)


@given(st.dictionaries(st.text(max_size=6), VALUES, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_lines_round_trip(record: dict[str, Any]) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line[:-1]) == record


def test_a_damaged_line_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s0000.jsonl"
    path.write_bytes(fill(path, [{"id": "aa"}, {"id": "bb"}, {"id": "cc"}]).replace(b'"bb"', b'"bX"'))
    with caplog.at_level(logging.WARNING):
        assert records_of(path) == [{"id": "aa"}, {"id": "cc"}]
    assert "s0000.jsonl: 1 damaged lines are ignored" in caplog.text


def test_afresh_sets_the_journal_aside_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "s0000.jsonl"
    first = fill(path, [{"id": "a"}])
    for number in (1, 2):
        with Journal(path, afresh=True) as journal:
            assert journal.records == []
            assert journal.generation == number
            journal.append({"id": f"again {number}"})
    assert (tmp_path / "s0000.jsonl.1").read_bytes() == first
    assert [record["id"] for record in records_of(tmp_path / "s0000.jsonl.2")] == ["again 1"]
    with Journal(path) as journal:
        assert journal.generation == 2
        assert journal.records == [{"id": "again 2"}]


def test_afresh_never_overwrites_and_never_repeats_a_number(tmp_path: Path) -> None:
    path = tmp_path / "s0000.jsonl"
    for _ in range(3):
        fill(path, [{"id": "a"}])
        with Journal(path, afresh=True):
            pass
    (tmp_path / "s0000.jsonl.1").unlink()
    (tmp_path / "s0000.jsonl.3").unlink()
    fill(path, [{"id": "a"}])
    with Journal(path, afresh=True) as journal:
        assert journal.generation == 4


def test_afresh_on_an_empty_journal_sets_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "s0000.jsonl"
    for _ in range(2):
        with Journal(path, afresh=True) as journal:
            assert journal.generation == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == [".s0000.jsonl.lock", "s0000.jsonl"]


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s0000.jsonl"
    with Journal(path), pytest.raises(EyrieError, match=r"s0000\.jsonl: another process is answering this shard"):
        Journal(path)
    records_of(path)


def test_a_foreign_file_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "s0000.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(EyrieError, match="is no journal of answers; move it away"):
        Journal(path)
    assert path.read_text() == '{"messages": []}\n'


def test_a_full_disk_takes_half_a_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s0000.jsonl"
    before = fill(path, [{"id": "a"}])
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) == 1:
            return real(file, bytes(data)[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(EyrieError, match=r"cannot grow \(No space left on device\); free some space .* 1 answers"):
            journal.append({"id": "b"})
        monkeypatch.undo()
    assert path.read_bytes() == before
    assert len(calls) == 2


def test_rows_reach_the_disk_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with Journal(tmp_path / "s0000.jsonl") as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        for number in range(130):
            journal.append({"id": str(number)})
        assert 2 <= len(synced) <= 4  # 64 and 128, and the clock may add one
        # a killed process loses nothing: every row is already in the file
        assert (tmp_path / "s0000.jsonl").read_bytes().count(b"\n") == 131
    assert len(synced) >= 3
