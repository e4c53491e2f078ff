"""``summary.json``: what the report, the preview and a person look at before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyrie.merge.rows import SPLITS
from eyrie.merge.vocabulary import Vocabulary, coverage
from eyrie.train.plan import cut_batches

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

HISTOGRAM_STEP = 128  # tokens per bar of the length histogram
PERCENTILES = (5, 25, 50, 75, 95, 99)
PACKED_SAMPLE = 50_000  # rows that packing is judged by
BATCH_SIZES = 5  # batch_tokens that packing is shown for: powers of two from the longest row on
SHARE_FACTOR = 2  # a dataset with more than this many even shares of the training tokens is worth a warning
HELD_OUT_SHARE = 0.25  # of a dataset's rows lost to the test split: from here on its prompts are too much alike


def summarise(
    rows: pl.DataFrame, counts: Mapping[str, np.ndarray], vocabulary: Vocabulary, names: list[str]
) -> dict[str, Any]:
    """Rows and tokens by dataset and split, reasons, lengths, packing, shares, coverage, warnings.

    Args:
        rows: all rows with ``split``, ``reason``, ``weight``.
        counts: supervised tokens by dataset, int64 ``[3, V]``, see :func:`eyrie.merge.vocabulary.token_counts`.
        vocabulary: the draft vocabulary.
        names: datasets in config order.
    """
    import polars as pl

    left = rows.filter(pl.col("reason") == "")
    weighted = (pl.col("completion_tokens") * pl.col("weight")).filter(pl.col("split") == "train").sum()
    total = left.select(weighted).item() or 1.0
    datasets = {}
    for name in names:
        mine, all_mine = left.filter(pl.col("dataset") == name), rows.filter(pl.col("dataset") == name)
        share = mine.select(weighted).item() / total
        datasets[name] = {
            "rows": len(mine),
            "conversations": mine["conversation"].n_unique(),
            "left_out": reasons(all_mine),
            "splits": _by_split(mine),
            "share": round(share, 6),
            "over_share": over_share(share, len(names)),
            "coverage": coverage(counts[name].sum(axis=0), vocabulary),
        }
    bars = left.group_by((pl.col("length") // HISTOGRAM_STEP * HISTOGRAM_STEP).alias("from")).agg(rows=pl.len())
    return {
        "rows": {"read": len(rows), "kept": len(left)},
        "splits": _by_split(left),
        "left_out": reasons(rows),
        "datasets": datasets,
        "lengths": {
            "step": HISTOGRAM_STEP,
            "histogram": {str(start): n for start, n in bars.sort("from").iter_rows()},
            "longest": left["length"].max(),
        },
        "packing": packing(left.filter(pl.col("split") == "train")),
        "draft_vocabulary": _vocabulary(counts, vocabulary),
        "warnings": warnings(datasets, vocabulary),
    }


def reasons(rows: pl.DataFrame) -> dict[str, int]:
    """Rows left out, by reason."""
    return dict(rows.filter(rows["reason"] != "")["reason"].value_counts().sort("reason").iter_rows())


def over_share(share: float, datasets: int) -> bool:
    """More than twice an even share of the training tokens; of two datasets neither can have that."""
    return datasets > SHARE_FACTOR and share > SHARE_FACTOR / datasets


def packing(rows: pl.DataFrame) -> dict[str, Any]:
    """How well ``rows`` (``length``, ``completion_tokens``) fill batches.

    Percentiles of tokens per row, and for batches of 2**k tokens, from the longest row on: mean rows per batch, the
    share of the padded tokens that is padding, and the share of ``batch_tokens`` that is row tokens. Batches are cut as
    training cuts them.
    """
    import numpy as np

    lengths = rows["length"].to_numpy()
    order = np.random.default_rng(0).permutation(len(lengths))[:PACKED_SAMPLE].tolist()
    plain = lengths.tolist()
    batches = {}
    smallest = 1 << (max(plain, default=1) - 1).bit_length()
    for size in (smallest << step for step in range(BATCH_SIZES)):
        cut = cut_batches(order, plain, size)
        padded = sum(max(plain[row] for row in batch) * len(batch) for batch in cut)
        used = sum(plain[row] for batch in cut for row in batch)
        if cut:
            batches[str(size)] = {
                "rows_per_batch": round(len(order) / len(cut), 2),
                "padding_share": round(1 - used / padded, 4),
                "filled_share": round(used / (size * len(cut)), 4),
            }
    return {
        "tokens_per_row": _percentiles(lengths),
        "completion_tokens_per_row": _percentiles(rows["completion_tokens"].to_numpy()),
        "batches": batches,
    }


def warnings(datasets: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary) -> list[str]:
    """What should be looked at before anything is trained: one sentence each, with the mend."""
    found = []
    for name, figures in datasets.items():
        lost = figures["left_out"]
        total = figures["rows"] + sum(lost.values())
        if figures["over_share"]:
            even = 1 / len(datasets)
            found.append(
                f"dataset {name} brings {figures['share']:.0%} of the weighted training tokens, "
                f"{figures['share'] / even:.1f} times its even share; set datasets.{name}.token_cap or a lower weight, "
                "unless that is what will be served"
            )
        if not figures["rows"]:
            why = ", ".join(f"{reason} {count}" for reason, count in lost.items())
            found.append(f"dataset {name} brings no row ({why}); take it out of the config, or put it earlier")
        elif lost.get("held_out_prompt", 0) > HELD_OUT_SHARE * total:
            found.append(
                f"dataset {name} loses {lost['held_out_prompt'] / total:.0%} of its rows because they share "
                "long runs of words with its own test prompts; raise merge.decontamination_ngram above the text that its "
                "prompts have in common, or lower merge.test_fraction"
            )
    if vocabulary.missing_specials:
        ids = ", ".join(map(str, vocabulary.missing_specials))
        found.append(
            f"{vocabulary.kept_from} lacks special or stop ids of the target ({ids}), which the drafter can never "
            "propose; leave merge.draft_vocab_from out to choose a new vocabulary"
        )
    return found


def _vocabulary(counts: Mapping[str, np.ndarray], vocabulary: Vocabulary) -> dict[str, Any]:
    import numpy as np

    train, test = SPLITS.index("train"), SPLITS.index("test")
    total = np.sum(list(counts.values()), axis=0)
    return {
        "size": len(vocabulary.ids),
        "kept_from": str(vocabulary.kept_from) if vocabulary.kept_from else None,
        "missing_specials": vocabulary.missing_specials,
        "supervised_ids_in_train": int((total[train] > 0).sum()),
        "coverage": {
            "all": coverage(total.sum(axis=0), vocabulary),
            "train": coverage(total[train], vocabulary),
            "held_out": coverage(total[test], vocabulary),
            "held_out_by_dataset": {name: coverage(mine[test], vocabulary) for name, mine in counts.items()},
        },
    }


def _by_split(rows: pl.DataFrame) -> dict[str, dict[str, int]]:
    import polars as pl

    table = {}
    for split in SPLITS:
        mine = rows.filter(pl.col("split") == split)
        table[split] = {
            "rows": len(mine),
            "tokens": int(mine["length"].sum()),
            "completion_tokens": int(mine["completion_tokens"].sum()),
        }
    return table


def _percentiles(values: np.ndarray) -> dict[str, int]:
    import numpy as np

    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="nearest")
    return {str(percent): int(value) for percent, value in zip(PERCENTILES, found, strict=True)}
