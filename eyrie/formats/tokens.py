"""Token shards: one row per supervised assistant turn, in Parquet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.errors import EyrieError

if TYPE_CHECKING:
    import polars as pl

MIN_LABELS = 2  # of a row: a drafter is never asked for the first label of a span, so a lone one teaches nothing


def token_schema() -> dict[str, Any]:
    """Columns of a token shard.

    ``spans`` are half-open ranges of *label* positions: ``input_ids[start:end]`` are tokens that the target (or, for a
    native dataset, the data) produced. ``prompt_key`` names the conversation's prompt across datasets. ``asked``
    are the user turns of the row's context that no earlier row of its conversation has: together all, each once.
    """
    import polars as pl

    return {
        "row_id": pl.String(),
        "conversation": pl.String(),
        "prompt_key": pl.String(),
        "turn": pl.Int32(),
        "input_ids": pl.List(pl.Int32()),
        "spans": pl.List(pl.Struct({"start": pl.Int32(), "end": pl.Int32()})),
        "length": pl.Int32(),
        "completion_tokens": pl.Int32(),
        "finish_reason": pl.String(),
        "asked": pl.List(pl.String()),
    }


def write_tokens(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of :func:`token_schema`; the bytes depend on the rows alone."""
    import polars as pl

    pl.DataFrame(list(rows), schema=token_schema()).write_parquet(path, compression="zstd", statistics=False)


def read_tokens(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """Columns of a token shard (default: all). Raises :class:`EyrieError` when it is no readable token shard."""
    import polars as pl

    try:
        return pl.read_parquet(path, columns=columns or list(token_schema()))
    except FileNotFoundError:
        raise EyrieError(f"{path}: missing; rebuild it with `snakemake {path}`") from None
    except pl.exceptions.PolarsError as error:
        why = " ".join(str(error).split())[:120]
        raise EyrieError(f"{path}: no readable token shard ({why}); rebuild it with `snakemake -f {path}`") from error
