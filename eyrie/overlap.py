"""Which rows share their prompt, or a long run of its words, with a set of prompts that must stay unseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

MIX = 6364136223846793005  # odd, so that multiplying by it loses nothing modulo 2**64


class Prompts:
    """Prompts to keep apart.

    Args:
        keys: :func:`eyrie.conversation.prompt_key` of each.
        texts: the text of each (the last user turn).
        ngram: words that a shared run must have. Shorter prompts are compared as a whole, by key.
    """

    def __init__(self, keys: Sequence[str], texts: Sequence[str], ngram: int) -> None:
        import polars as pl

        self.ngram = ngram
        self.keys = pl.Series("key", list(keys), dtype=pl.String).unique()
        self.runs = ngrams(pl.Series("text", list(texts), dtype=pl.String), ngram)["run"].unique()

    def shared_with(self, rows: pl.DataFrame) -> pl.Series:
        """bool per row of ``rows`` (columns ``prompt_key``, ``prompt_text``)."""
        import polars as pl

        hits = ngrams(rows["prompt_text"], self.ngram).filter(pl.col("run").is_in(self.runs.implode()))["row"].unique()
        numbered = rows.select("prompt_key").with_row_index("row")
        return numbered.select(
            pl.col("prompt_key").is_in(self.keys.implode()) | pl.col("row").is_in(hits.implode())
        ).to_series()


def ngrams(texts: pl.Series, size: int) -> pl.DataFrame:
    """Hashes of all runs of ``size`` words: columns ``row`` (u32, position in ``texts``), ``run`` (u64).

    Words are compared without case; punctuation and spacing do not count.
    """
    import polars as pl

    words = (
        pl.DataFrame({"text": texts})
        .with_row_index("row")
        .select("row", word=pl.col("text").str.normalize("NFKC").str.to_lowercase().str.extract_all(r"\w+"))
        .explode("word")
        .drop_nulls("word")
        .select("row", word=pl.col("word").hash(seed=0))
    )
    run = pl.lit(0, pl.UInt64)
    for step in range(size):
        run = run * pl.lit(MIX, pl.UInt64) + pl.col("word").shift(-step)
    last = pl.col("row").shift(1 - size)
    return words.select("row", run=run, whole=last == pl.col("row")).filter("whole").select("row", "run")
