"""``summary.json``: what the report, the preview and a person look at before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyrie.merge.rows import KEPT, REASONS, SPLITS, Rows
from eyrie.merge.vocabulary import Vocabulary, coverage
from eyrie.packing import cut_batches

if TYPE_CHECKING:
    import numpy as np

HISTOGRAM_STEP = 128  # tokens per bar of the length histogram
PERCENTILES = (5, 25, 50, 75, 95, 99)
PACKED_SAMPLE = 50_000  # rows that packing is judged by
BATCH_SIZES = 5  # batch_tokens that packing is shown for: powers of two from the longest row on
SHARE_FACTOR = 2  # a dataset with more than this many even shares of the training tokens is worth a warning
HELD_OUT_SHARE = 0.25  # of a dataset's rows lost to the test split: from here on its prompts are too much alike


def summarise(
    rows: Rows,
    counts: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    weights: Mapping[str, float],
    templates: Mapping[str, int],
) -> dict[str, Any]:
    """Rows and tokens by dataset and split, reasons, lengths, packing, shares, coverage, warnings.

    Args:
        rows: all rows with their splits and reasons.
        counts: supervised tokens by dataset, int64 ``[3, V]``, see :func:`eyrie.merge.vocabulary.token_counts`.
        vocabulary: the draft vocabulary.
        weights: weight of each dataset, in config order.
        templates: word runs of each dataset that were taken for its template.
    """
    import numpy as np

    whole = slice(0, len(rows))
    places = {name: rows.of_dataset(name) for name in weights}
    splits = {name: _by_split(rows, place) for name, place in places.items()}
    weighted = {name: splits[name]["train"]["completion_tokens"] * weight for name, weight in weights.items()}
    total = sum(weighted.values()) or 1.0
    datasets = {}
    for name, place in places.items():
        share = weighted[name] / total
        left = rows.reason[place] == KEPT
        datasets[name] = {
            "rows": int(left.sum()),
            "conversations": len(np.unique(rows.conversation[place][left])),
            "left_out": reasons(rows.reason[place]),
            "splits": splits[name],
            "share": round(share, 6),
            "over_share": over_share(share, len(weights)),
            "coverage": coverage(counts[name].sum(axis=0), vocabulary),
            "template_runs": templates[name],
        }
    left = rows.reason == KEPT
    lengths = rows.length[left]
    bars = np.bincount(lengths // HISTOGRAM_STEP)
    train = left & (rows.split == SPLITS.index("train"))
    return {
        "rows": {"read": len(rows), "kept": len(lengths)},
        "splits": _by_split(rows, whole),
        "left_out": reasons(rows.reason),
        "datasets": datasets,
        "lengths": {
            "step": HISTOGRAM_STEP,
            "histogram": {str(bar * HISTOGRAM_STEP): int(bars[bar]) for bar in np.flatnonzero(bars)},
            "longest": int(lengths.max()),
        },
        "packing": packing(rows.length[train], rows.completion_tokens[train]),
        "draft_vocabulary": _vocabulary(counts, vocabulary),
        "warnings": warnings(datasets, vocabulary),
    }


def reasons(reason: np.ndarray) -> dict[str, int]:
    """Rows left out, by reason, from places in :data:`eyrie.merge.rows.REASONS`."""
    import numpy as np

    counts = np.bincount(reason, minlength=len(REASONS))
    return {name: int(count) for name, count in sorted(zip(REASONS, counts, strict=True)) if name and count}


def over_share(share: float, datasets: int) -> bool:
    """More than twice an even share of the training tokens; of two datasets neither can have that."""
    return datasets > SHARE_FACTOR and share > SHARE_FACTOR / datasets


def packing(lengths: np.ndarray, completion_tokens: np.ndarray) -> dict[str, Any]:
    """How well rows fill batches.

    Percentiles of tokens per row, and for batches of 2**k tokens, from the longest row on: mean rows per batch, the
    share of the padded tokens that is padding, and the share of ``batch_tokens`` that is row tokens. Batches are cut as
    training cuts them.
    """
    import numpy as np

    plain = lengths[np.random.default_rng(0).permutation(len(lengths))[:PACKED_SAMPLE]].tolist()
    order = range(len(plain))
    batches = {}
    smallest = 1 << (int(lengths.max(initial=1)) - 1).bit_length()
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
        "completion_tokens_per_row": _percentiles(completion_tokens),
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
                "long runs of words with the test split; raise merge.decontamination_ngram above the text that its "
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


def _by_split(rows: Rows, place: slice) -> dict[str, dict[str, int]]:
    """Rows that stay and their tokens, by split."""
    table = {}
    for number, split in enumerate(SPLITS):
        mine = (rows.reason[place] == KEPT) & (rows.split[place] == number)
        table[split] = {
            "rows": int(mine.sum()),
            "tokens": int(rows.length[place][mine].sum()),
            "completion_tokens": int(rows.completion_tokens[place][mine].sum()),
        }
    return table


def _percentiles(values: np.ndarray) -> dict[str, int]:
    import numpy as np

    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="nearest")
    return {str(percent): int(value) for percent, value in zip(PERCENTILES, found, strict=True)}
