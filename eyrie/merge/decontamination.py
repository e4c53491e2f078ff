"""Rows that would let training see what is measured: prompts of benchmark suites and of the run's own test split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eyrie.conversation import prompt_key
from eyrie.formats.tokens import read_tokens
from eyrie.merge.overlap import Runs, ngrams
from eyrie.merge.rows import Shard

if TYPE_CHECKING:
    import numpy as np
    import polars as pl


class Suites:
    """Prompts of all configured external suites: their keys, and the word runs of every user turn.

    Args:
        suites: ``dataset`` (adapter) and ``options`` of each suite, by name.
        ngram: words of a run.
    """

    def __init__(self, suites: Mapping[str, Any], ngram: int) -> None:
        import polars as pl

        from eyrie.datasets import suite_prompts

        keys, texts = [], []
        for suite in suites.values():
            for conversation in suite_prompts(suite["dataset"], suite.get("options", {})):
                keys.append(prompt_key([message.to_dict() for message in conversation.messages]))
                texts += [message.content for message in conversation.messages if message.role == "user"]
        self.keys = pl.Series("key", keys, dtype=pl.String)
        self.runs = Runs([ngrams(pl.Series("text", texts, dtype=pl.String), ngram)[1]])


def decontaminated(rows: pl.DataFrame, shards: Sequence[Shard], suites: Suites, ngram: int) -> pl.DataFrame:
    """Gives ``reason`` to rows that share a prompt, or ``ngram`` words in a row, with a prompt to be measured on.

    ``benchmark_prompt``: with a suite, whatever the row's split. ``held_out_prompt``: words with a row of the test
    split that stays (the prompt itself it cannot share: splits go by prompt). One turn that shares takes its whole conversation along, because later turns hold it as context. Texts are
    read shard by shard, each once.
    """
    import numpy as np
    import polars as pl

    left = (rows["reason"] == "").to_numpy()
    test = (rows["split"] == "test").to_numpy()
    benchmark = rows["prompt_key"].is_in(suites.keys.implode()).to_numpy(writable=True)
    held_out = np.zeros(len(rows), np.bool_)
    parts = []
    for place, row, run in _runs(rows, shards, left & test, ngram):
        benchmark[place[row[suites.runs.among(run)]]] = True
        benchmark[place] = _whole_conversations(rows, place, benchmark)
        parts.append(np.unique(run[~benchmark[place][row]]))
    held_runs = Runs(parts)
    if len(held_runs) or len(suites.runs):
        for place, row, run in _runs(rows, shards, left & ~test, ngram):
            benchmark[place[row[suites.runs.among(run)]]] = True
            held_out[place[row[held_runs.among(run)]]] = True
    everything = np.arange(len(rows))
    benchmark = left & _whole_conversations(rows, everything, benchmark)
    held_out = left & ~test & _whole_conversations(rows, everything, held_out)
    return rows.with_columns(
        reason=pl.when(pl.Series(benchmark))
        .then(pl.lit("benchmark_prompt"))
        .when(pl.Series(held_out))
        .then(pl.lit("held_out_prompt"))
        .otherwise(pl.col("reason"))
    )


def _runs(
    rows: pl.DataFrame, shards: Sequence[Shard], chosen: np.ndarray, ngram: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per shard with chosen rows: their places in ``rows``, and all their word runs as (number among them, hash)."""
    import numpy as np

    for shard in shards:
        mine = np.flatnonzero(chosen[shard.first : shard.first + shard.count])
        if len(mine):
            texts = read_tokens(shard.path, ["prompt_text"])["prompt_text"]
            yield (mine + shard.first, *ngrams(texts.gather(mine) if len(mine) < len(texts) else texts, ngram))


def _whole_conversations(rows: pl.DataFrame, places: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Marks of ``rows[places]``, spread to every row of a conversation that holds a marked one."""
    import polars as pl

    chosen = rows["conversation"].gather(places) if len(places) < len(rows) else rows["conversation"]
    marks = pl.Series(marked[places])
    return chosen.is_in(chosen.filter(marks).implode()).to_numpy() if marks.any() else marked[places]
