"""Manifests: rows balance, and a file that is not what its manifest says is refused with the way to mend it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest, stats_path, verified_manifest
from eyrie.formats.publish import publish

IDENTITY = {"target": "a" * 64, "tokenizer": "b" * 64}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "s0000.parquet"
    with publish(path, stage="tokenize", recipe={"revision": 1}, inputs={"x": "1"}, identity=IDENTITY) as draft:
        draft.path.write_bytes(b"twelve bytes")
        draft.rows = RowCounts(read=3, kept=2, dropped={"too_long": 1})
        draft.tokens = {"prompt": 5}
        draft.stats = {"seconds": 1.5}
    return path


@settings(max_examples=30, deadline=None)
@given(kept=st.integers(0, 9), dropped=st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), off=st.integers())
def test_every_row_is_kept_or_dropped_for_a_reason(kept: int, dropped: dict[str, int], off: int) -> None:
    read = kept + sum(dropped.values())
    assert RowCounts(read=read, kept=kept, dropped=dropped).read == read
    if off:
        with pytest.raises(ValidationError, match="do not balance"):
            RowCounts(read=read + off, kept=kept, dropped=dropped)


def test_a_whole_file_of_this_target_passes(shard: Path) -> None:
    manifest = verified_manifest(shard, stage="tokenize", identity=IDENTITY)
    assert (manifest.file, manifest.bytes, manifest.tokens) == ("s0000.parquet", 12, {"prompt": 5})
    assert manifest == read_manifest(shard)


def test_a_manifest_holds_no_time(shard: Path) -> None:
    before = manifest_path(shard).read_bytes()
    assert b"seconds" not in before
    assert json.loads(stats_path(shard).read_text()) == {"seconds": 1.5}
    with publish(shard, stage="tokenize", recipe={"revision": 1}, inputs={"x": "1"}, identity=IDENTITY) as draft:
        draft.path.write_bytes(b"twelve bytes")
        draft.rows = RowCounts(read=3, kept=2, dropped={"too_long": 1})
        draft.tokens = {"prompt": 5}
        draft.stats = {"seconds": 99.0}
    assert manifest_path(shard).read_bytes() == before


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"twelve", "holds 6 bytes, its manifest says 12"),
        (b"twelve bytes and more", "holds 21 bytes, its manifest says 12"),
        (b"TWELVE bytes", "bytes differ from its manifest's hash"),
    ],
)
def test_truncated_and_edited_bytes_are_refused(shard: Path, data: bytes, why: str) -> None:
    shard.write_bytes(data)
    with pytest.raises(EyrieError, match=rf"{shard}: {why}.*rebuild it with `snakemake -f {shard}`"):
        verified_manifest(shard, stage="tokenize")


def test_a_missing_file_and_a_missing_manifest_are_named(shard: Path) -> None:
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(EyrieError, match="missing though its manifest is there"):
        verified_manifest(shard, stage="tokenize")
    shard.write_bytes(data)
    manifest_path(shard).unlink()
    with pytest.raises(EyrieError, match=r"s0000.parquet.manifest.json: missing; rebuild it with"):
        verified_manifest(shard, stage="tokenize")


def test_another_target_is_refused(shard: Path) -> None:
    with pytest.raises(EyrieError, match="was made for another target \\(aaaaaaaaaaaa, this run has cccccccccccc\\)"):
        verified_manifest(shard, stage="tokenize", identity={**IDENTITY, "target": "c" * 64})
    with pytest.raises(EyrieError, match="was made for another template \\(none, this run has ccc"):
        verified_manifest(shard, stage="tokenize", identity={"template": "c" * 64})


def test_another_stage_is_refused(shard: Path) -> None:
    with pytest.raises(EyrieError, match="was made by stage 'tokenize', expected 'generate'"):
        verified_manifest(shard, stage="generate")


@pytest.mark.parametrize("change", [{"rows": {"read": 3, "kept": 3, "dropped": {"a": 1}}}, {"surprise": 1}])
def test_a_malformed_manifest_is_refused(shard: Path, change: dict[str, object]) -> None:
    path = manifest_path(shard)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EyrieError, match=f"not a manifest \\({next(iter(change))}: "):
        verified_manifest(shard, stage="tokenize")


def test_a_manifest_that_is_no_json_is_refused(shard: Path) -> None:
    manifest_path(shard).write_text("{")
    with pytest.raises(EyrieError, match="not a manifest"):
        read_manifest(shard)
