"""``index.parquet``: which rows of which shards are in, with split, weight and lengths; written as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.formats.tokens import read_tokens
from eyrie.merge.rows import KEPT, SPLITS, Rows

if TYPE_CHECKING:
    import polars as pl

GROUP_ROWS = 1 << 16  # rows of the index in memory at a time


def index_schema() -> dict[str, Any]:
    """Columns of the index; a row is the ``row``-th (from 0) of token shard ``<dataset>/<shard>.parquet``."""
    import polars as pl

    return {
        "dataset": pl.String(),
        "shard": pl.String(),
        "row": pl.Int32(),
        "row_id": pl.String(),
        "conversation": pl.String(),
        "split": pl.String(),
        "weight": pl.Float32(),
        "length": pl.Int32(),
        "completion_tokens": pl.Int32(),
    }


def write_index(path: Path, rows: Rows, weights: Mapping[str, float]) -> None:
    """Write the rows that stay, in the order of ``rows``; the bytes depend on the rows alone."""
    from polars.io.plugins import register_io_source

    def parts(*_: Any) -> Iterator[pl.DataFrame]:
        return _parts(rows, weights)

    source = register_io_source(parts, schema=index_schema())
    source.sink_parquet(path, compression="zstd", statistics=False, row_group_size=GROUP_ROWS, maintain_order=True)


def _parts(rows: Rows, weights: Mapping[str, float]) -> Iterator[pl.DataFrame]:
    """The index of each shard that has a row in it."""
    import numpy as np
    import polars as pl

    names = pl.Series(SPLITS)
    for shard in rows.shards:
        chosen = np.flatnonzero(rows.reason[shard.place] == KEPT)
        if len(chosen):
            table = read_tokens(shard.path, ["row_id", "conversation", "length", "completion_tokens"])
            yield (
                table[chosen]
                .with_columns(
                    dataset=pl.lit(shard.dataset),
                    shard=pl.lit(shard.name),
                    row=pl.Series(chosen, dtype=pl.Int32),
                    split=names.gather(rows.split[shard.place][chosen]),
                    weight=pl.lit(weights[shard.dataset], pl.Float32),
                )
                .select(*index_schema())
            )
