"""Prompts of a benchmark suite."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from eyrie.config import Suite
from eyrie.errors import EyrieError


@dataclass(frozen=True)
class Prompt:
    """One chat-templated prompt, generation prompt included."""

    dataset: str
    id: str
    ids: list[int]


def held_out(suite: Suite, merged: Path, tokens: Sequence[Path]) -> list[Prompt]:
    """Prompts of the run's own test split: whole conversations that no drafter saw.

    The first ``prompts_per_dataset`` of each answered dataset, in the order of the hash of their id, so the choice
    does not move when a dataset grows. Native rows are left out: their continuation is not the target's.

    Args:
        merged: folder of ``index.parquet``.
        tokens: token shards ``<dataset>/<shard>.parquet``.
    """
    index = pl.read_parquet(merged / "index.parquet").filter(pl.col("split") == "test")
    chosen: dict[str, list[Prompt]] = {}
    for path in tokens:
        rows = index.filter((pl.col("dataset") == path.parent.name) & (pl.col("shard") == path.stem))["row"].to_list()
        if not rows:
            continue
        table = pl.read_parquet(path, columns=["row_id", "input_ids", "spans", "finish_reason"])[rows]
        for row in table.iter_rows(named=True):
            if row["finish_reason"] != "native":
                prompt = Prompt(path.parent.name, row["row_id"], row["input_ids"][: row["spans"][0]["start"]])
                chosen.setdefault(path.parent.name, []).append(prompt)
    if not chosen:
        raise EyrieError(
            f"{merged / 'index.parquet'}: no answered row in its test split; raise merge.test_fraction or the budgets"
        )
    return [
        prompt
        for prompts in chosen.values()
        for prompt in sorted(prompts, key=lambda p: hashlib.sha256(p.id.encode()).hexdigest())[
            : suite.prompts_per_dataset
        ]
    ]
