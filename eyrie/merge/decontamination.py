"""Rows that would let training see what is measured: prompts of benchmark suites and of the run's own test split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyrie.conversation import KEY_WORDS, prompt_key
from eyrie.formats.tokens import read_tokens
from eyrie.merge.overlap import MIX, Runs, Words, words_of
from eyrie.merge.rows import BENCHMARK, HELD_OUT, KEPT, SPLITS, Rows, Shard

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

# A run of words in this share of a dataset's test prompts, and in so many, is its template and tells no prompt.
TEMPLATE_SHARE, TEMPLATE_PROMPTS = 0.1, 20


class Suites:
    """Prompts of all configured external suites: their keys, word runs of every user turn, and short turns as they are.

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
        words = words_of(pl.Series("text", texts, dtype=pl.String), ngram, KEY_WORDS)
        self.runs, self.short = Runs([words.run]), Runs([words.short])


def decontaminate(rows: Rows, suites: Suites, ngram: int) -> dict[str, int]:
    """Gives a reason to rows one of whose user turns shares words with a prompt to be measured on.

    ``benchmark_prompt``: the prompt, a whole turn, or ``ngram`` words in a row with a suite, whatever the row's split.
    ``held_out_prompt``: ``ngram`` words in a row with a row of the test split that stays. The prompt itself it cannot
    share, because splits go by prompt, and short turns ("please go on") are everyone's. A row that shares takes its
    whole conversation along, because later turns hold it as context. Texts are read shard by shard, each once.

    Returns:
        by dataset, how many word runs of its test prompts were taken for its template.
    """
    test = SPLITS.index("test")
    parts, templates = [], {}
    for dataset in dict.fromkeys(shard.dataset for shard in rows.shards):
        held = []
        for turns in _turns(rows, rows.split == test, ngram, dataset):
            turns.leave_out(rows, turns.of_suite(suites), BENCHMARK)
            held.append(turns.prompts_and_runs(rows.reason[turns.shard.place] == KEPT))
        runs, templates[dataset] = told_apart(held)
        parts.append(runs)
    held_runs = Runs(parts)
    parts.clear()
    if len(held_runs) or len(suites.keys):
        for turns in _turns(rows, rows.split != test, ngram):
            turns.leave_out(rows, turns.of_suite(suites), BENCHMARK)
            turns.leave_out(rows, turns.sharing(held_runs), HELD_OUT)
    return templates


@dataclass
class _Turns:
    """User turns of a shard's chosen rows.

    Attributes:
        keys: prompt keys of all rows of the shard.
        words: of the turns, with the number of the row in the shard as their position.
    """

    shard: Shard
    keys: pl.Series
    words: Words

    def sharing(self, runs: Runs) -> np.ndarray:
        """Which rows of the shard have one of ``runs``: bool ``[count]``."""
        import numpy as np

        marked = np.zeros(self.shard.count, np.bool_)
        marked[self.words.row[runs.among(self.words.run)]] = True
        return marked

    def of_suite(self, suites: Suites) -> np.ndarray:
        """Which rows have a prompt or a turn of a suite."""
        marked = self.sharing(suites.runs) | self.keys.is_in(suites.keys.implode()).to_numpy()
        marked[self.words.short_row[suites.short.among(self.words.short)]] = True
        return marked

    def leave_out(self, rows: Rows, marked: np.ndarray, reason: int) -> None:
        """Give the reason to conversations with a marked row, where they have none yet."""
        mine = rows.reason[self.shard.place]
        mine[rows.spread(self.shard, marked) & (mine == KEPT)] = reason

    def prompts_and_runs(self, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and word run of every run in the rows ``left`` (bool ``[count]``): uint64 ``[R]`` each."""
        chosen = left[self.words.row]
        return self.keys.hash(seed=0).to_numpy()[self.words.row[chosen]], self.words.run[chosen]


def told_apart(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, int]:
    """The distinct runs of a dataset's test prompts without those of its template, and how many those were.

    Agents' tasks begin with the same page of instructions: if that were held against training rows, none would stay.

    Args:
        parts: prompt and word run, uint64 ``[R]`` each.
    """
    import numpy as np

    if not parts:
        return np.zeros(0, np.uint64), 0
    prompts, runs = map(np.concatenate, zip(*parts, strict=True))
    count = len(np.unique(prompts))
    once = np.unique(prompts * np.uint64(MIX) + runs, return_index=True)[1]  # a prompt has each of its runs once
    runs, times = np.unique(runs[once], return_counts=True)
    template = times >= max(TEMPLATE_PROMPTS, TEMPLATE_SHARE * count)
    return runs[~template], int(template.sum())


def _turns(rows: Rows, chosen: np.ndarray, ngram: int, dataset: str | None = None) -> Iterator[_Turns]:
    """Of each shard (of ``dataset``) that has any: the user turns of chosen rows (bool ``[N]``) that stay so far."""
    import numpy as np

    for shard in rows.shards:
        if dataset not in {None, shard.dataset}:
            continue
        mine = np.flatnonzero(chosen[shard.place] & (rows.reason[shard.place] == KEPT))
        if len(mine):
            table = read_tokens(shard.path, ["prompt_key", "asked"])
            asked = table["asked"][mine] if len(mine) < len(table) else table["asked"]
            counts = asked.list.len().to_numpy()
            words = words_of(asked.filter(counts > 0).explode(), ngram, KEY_WORDS)
            rows_of = np.repeat(mine, counts)
            placed = words._replace(row=rows_of[words.row], short_row=rows_of[words.short_row])
            yield _Turns(shard, table["prompt_key"], placed)
