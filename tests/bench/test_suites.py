"""Which prompts a suite holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from eyrie.bench.suites import Prompt, held_out
from eyrie.config import Suite
from eyrie.errors import EyrieError
from eyrie.formats.tokens import write_tokens


def token_row(row_id: str, ids: list[int], start: int, reason: str = "stop") -> dict[str, Any]:
    return {
        "row_id": row_id, "conversation": row_id.split(":")[0], "prompt_key": row_id, "turn": 0, "input_ids": ids,
        "spans": [{"start": start, "end": len(ids)}], "length": len(ids), "completion_tokens": len(ids) - start,
        "finish_reason": reason, "asked": [],
    }  # fmt: skip


def build(folder: Path, shards: dict[str, list[dict[str, Any]]], splits: dict[str, str]) -> tuple[Path, list[Path]]:
    """Token shards ``<dataset>/<shard>`` and an index that leaves out rows without a split."""
    files, index = [], []
    for name, rows in shards.items():
        dataset, shard = name.split("/")
        file = folder / "tokens" / dataset / f"{shard}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(file, rows)
        files.append(file)
        index += [
            {"dataset": dataset, "shard": shard, "row": i, "row_id": row["row_id"], "split": splits[row["row_id"]]}
            for i, row in enumerate(rows)
            if row["row_id"] in splits
        ]
    merged = folder / "merged"
    merged.mkdir()
    pl.DataFrame(index, schema={
        "dataset": pl.String, "shard": pl.String, "row": pl.Int32, "row_id": pl.String, "split": pl.String,
    }).write_parquet(merged / "index.parquet")  # fmt: skip
    return merged, files


def ids_of(prompts: Iterable[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_only_test_rows_cut_before_the_answer(tmp_path: Path) -> None:
    shards = {
        "code/s0000": [token_row("a:0", [1, 2, 3, 4, 5], 3), token_row("b:0", [9, 8, 7], 1)],
        "code/s0001": [token_row("c:0", [6, 6, 6], 2)],
        "chat/s0000": [token_row("d:0", [1, 1, 4], 2), token_row("e:0", [5, 5, 5], 2), token_row("f:0", [5, 3], 1)],
    }
    splits = {"a:0": "test", "b:0": "train", "c:0": "test", "d:0": "validation", "e:0": "test"}  # f was left out
    found = held_out(Suite(), *build(tmp_path, shards, splits))
    assert sorted((p.dataset, p.id, p.ids) for p in found) == [
        ("chat", "e:0", [5, 5]), ("code", "a:0", [1, 2, 3]), ("code", "c:0", [6, 6]),
    ]  # fmt: skip


def test_native_rows_are_left_out(tmp_path: Path) -> None:
    shards = {"talk/s0000": [token_row("a:0", [1, 2, 3], 2, "native")], "code/s0000": [token_row("b:0", [1, 2, 3], 2)]}
    found = held_out(Suite(), *build(tmp_path, shards, {"a:0": "test", "b:0": "test"}))
    assert ids_of(found) == ["b:0"]


def test_the_choice_is_by_hash_and_stays_when_a_dataset_grows(tmp_path: Path) -> None:
    rows = [token_row(f"{i}:0", [i, i + 1, i + 2], 2) for i in range(20)]
    splits = {row["row_id"]: "test" for row in rows}
    suite = Suite(prompts_per_dataset=5)
    (tmp_path / "whole").mkdir()
    (tmp_path / "turned").mkdir()
    whole = ids_of(held_out(suite, *build(tmp_path / "whole", {"d/s0000": rows[:12], "d/s0001": rows[12:]}, splits)))
    turned = ids_of(held_out(suite, *build(tmp_path / "turned", {"d/s0000": rows[::-1]}, splits)))
    assert len(whole) == 5
    assert turned == whole
    assert whole != [f"{i}:0" for i in range(5)]
    for count in range(1, 5):
        (tmp_path / str(count)).mkdir()
        built = build(tmp_path / str(count), {"d/s0000": rows}, splits)
        assert ids_of(held_out(Suite(prompts_per_dataset=count), *built)) == whole[:count]


def test_no_prompt_at_all_says_what_to_do(tmp_path: Path) -> None:
    built = build(tmp_path, {"d/s0000": [token_row("a:0", [1, 2, 3], 2)]}, {"a:0": "train"})
    with pytest.raises(EyrieError, match="no answered row in its test split; raise") as caught:
        held_out(Suite(), *built)
    assert "\n" not in str(caught.value)
