"""The rows of all token shards: where they lie, their split, and who keeps a prompt that several datasets hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyrie.config import Merge
from eyrie.errors import EyrieError
from eyrie.formats.tokens import read_tokens

if TYPE_CHECKING:
    import polars as pl

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Shard:
    """A token shard and its place in the frame of all rows: ``rows[first : first + count]``."""

    dataset: str
    name: str
    path: Path
    first: int
    count: int

    def of(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows.slice(self.first, self.count)


def split_of(prompt_key: str, options: Merge) -> str:
    """The split of all conversations with a prompt key: a hash of the key, so that no other row or dataset moves them.

    All rows of a conversation have its key, and so have other answers to its prompt: neither stands in two splits.
    """
    point = int.from_bytes(hashlib.sha256(prompt_key.encode()).digest()[:8], "big") / 2**64
    if point < options.test_fraction:
        return "test"
    return "validation" if point < options.test_fraction + options.validation_fraction else "train"


def all_rows(paths: Sequence[Path], weights: Mapping[str, float]) -> tuple[pl.DataFrame, list[Shard]]:
    """One line per token row, in config order; ids and texts are left on disk.

    Args:
        paths: token shards, ``.../<dataset>/<shard>.parquet``.
        weights: weight of each dataset, in config order.

    Raises:
        EyrieError: a shard of a dataset that is not in ``weights``, or a dataset without rows.
    """
    import polars as pl

    columns = ["row_id", "conversation", "prompt_key", "length", "completion_tokens"]
    rank = {name: number for number, name in enumerate(weights)}
    frames, shards, first = [], [], 0
    for path in sorted(paths, key=lambda path: (rank.get(path.parent.name, -1), path.stem)):
        dataset = path.parent.name
        if dataset not in rank:
            raise EyrieError(f"{path}: belongs to dataset {dataset!r}, which the config does not name; leave it out")
        frame = read_tokens(path, columns).with_columns(
            dataset=pl.lit(dataset),
            shard=pl.lit(path.stem),
            row=pl.int_range(pl.len(), dtype=pl.Int32),
            rank=pl.lit(rank[dataset], pl.Int32),
            weight=pl.lit(weights[dataset], pl.Float32),
        )
        frames.append(frame)
        shards.append(Shard(dataset, path.stem, path, first, len(frame)))
        first += len(frame)
    for name in weights:
        if not sum(shard.count for shard in shards if shard.dataset == name):
            raise EyrieError(
                f"dataset {name}: none of its token shards holds a row; mend it or take it out of the config"
            )
    return pl.concat(frames), shards


def with_splits(rows: pl.DataFrame, options: Merge) -> pl.DataFrame:
    """Adds ``split``."""
    import polars as pl

    made = (split_of(key, options) for key in rows["prompt_key"])
    return rows.with_columns(pl.Series("split", made, dtype=pl.String))


def with_owners(rows: pl.DataFrame, caps: Mapping[str, int]) -> pl.DataFrame:
    """Adds ``reason``: ``cross_dataset_duplicate``, ``over_cap``, or an empty string for a row that stays.

    The first dataset in config order keeps a shared prompt, unless its cap leaves the row out: then the next one does.

    Args:
        caps: completion tokens that a dataset may bring; a dataset that is not named brings all.

    Raises:
        EyrieError: a cap that holds not one conversation.
    """
    import polars as pl

    rows = rows.with_columns(reason=pl.lit(""))
    for dataset in rows["dataset"].unique(maintain_order=True):
        if dataset in caps:  # what it may keep depends on the datasets before it alone, and those are settled
            rows = _capped(_without_duplicates(rows), dataset, caps[dataset])
    return _without_duplicates(rows)


def _without_duplicates(rows: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    first = pl.col("rank").filter(pl.col("reason") != "over_cap").min().over("prompt_key")
    again = (pl.col("reason") != "over_cap") & (pl.col("rank") > first)
    return rows.with_columns(
        reason=pl.when(pl.col("reason") == "over_cap")
        .then(pl.col("reason"))
        .when(again)
        .then(pl.lit("cross_dataset_duplicate"))
        .otherwise(pl.lit(""))
    )


def _capped(rows: pl.DataFrame, dataset: str, cap: int) -> pl.DataFrame:
    """Keeps the longest run of whole conversations, in the order of a hash of their ids, that ``cap`` can hold.

    So a raised cap only adds, and all splits shrink alike: the hash is not the one that splits are made of.
    """
    import polars as pl

    mine = (pl.col("dataset") == dataset) & (pl.col("reason") == "")
    sizes = rows.filter(mine).group_by("conversation").agg(pl.col("completion_tokens").cast(pl.Int64).sum())
    order = [hashlib.sha256(f"cap {name}".encode()).digest() for name in sizes["conversation"]]
    sizes = sizes.with_columns(order=pl.Series(order, dtype=pl.Binary)).sort("order")
    kept = sizes.filter(pl.col("completion_tokens").cum_sum() <= cap)["conversation"]
    if kept.is_empty() and len(sizes):
        raise EyrieError(
            f"datasets.{dataset}.token_cap is {cap}, its first conversation alone holds "
            f"{sizes['completion_tokens'][0]} completion tokens; raise it"
        )
    over = mine & ~pl.col("conversation").is_in(kept.implode())
    return rows.with_columns(reason=pl.when(over).then(pl.lit("over_cap")).otherwise(pl.col("reason")))
