"""All token shards -> an index of rows with their splits, and the draft vocabulary.

Nothing is copied: the index names rows by shard and position, so one shard made again leaves all others in place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.config import Merge
from eyrie.conversation import prompt_key
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import publish
from eyrie.formats.tokens import read_tokens
from eyrie.overlap import Prompts
from eyrie.targets.card import TargetCard, read_card

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

SPLITS = ("train", "validation", "test")
INDEX_COLUMNS = ("dataset", "shard", "row", "row_id", "conversation", "split", "weight", "length", "completion_tokens")
HISTOGRAM_STEP = 128  # tokens per bar of the length histogram


def merge(recipe: dict[str, Any], *, target: Path, tokens: Sequence[Path], out: Path) -> None:
    """Publish ``index.parquet``, ``vocab.safetensors`` and ``summary.json`` in folder ``out``.

    Args:
        recipe: ``merge`` options, ``datasets`` as [[name, weight], ...] in config order, external ``suites``.
        target: the run's target card.
        tokens: all token shards, ``.../<dataset>/<shard>.parquet``, verified against their manifests.
        out: folder of the three files.

    Raises:
        EyrieError: a shard of another target, a dataset without rows, no row left to train on, or a draft vocabulary
            larger than the target's.
    """
    card = read_card(target)
    options = Merge.model_validate(recipe["merge"])
    weights: dict[str, float] = dict(recipe["datasets"])
    shards = {(path.parent.name, path.stem): path for path in tokens}
    identity = card.identity()
    inputs = {
        f"{dataset}/{path.name}": verified_manifest(path, stage="tokenize", identity=identity).sha256
        for (dataset, _), path in shards.items()
    }
    rows = _all_rows(shards, weights)
    rows = _with_splits(rows, options)
    rows = _with_reasons(rows, options, _suites(recipe["suites"], options))
    left = rows.filter(rows["reason"] == "")
    if left.filter(left["split"] == "train").is_empty():
        raise EyrieError(
            f"{out}: no row is left to train on out of {len(rows)}; raise the token budgets, "
            "or lower merge.validation_fraction and merge.test_fraction"
        )
    counts = _token_counts(shards, left, card.vocab_size)
    kept_ids = _draft_vocabulary(counts, options.draft_vocab_size, card)
    summary = _summary(rows, counts, kept_ids, list(weights))

    reasons = dict(rows.filter(rows["reason"] != "")["reason"].value_counts().sort("reason").iter_rows())
    tally = RowCounts(read=len(rows), kept=len(left), dropped=reasons)
    completion = {f"completion_{split}": summary["splits"][split]["completion_tokens"] for split in SPLITS}
    common: dict[str, Any] = {"stage": "merge", "recipe": recipe, "inputs": inputs, "identity": identity}
    with publish(out / "index.parquet", **common) as draft:
        left.select(INDEX_COLUMNS).write_parquet(draft.path, compression="zstd", statistics=False)
        draft.rows, draft.tokens = tally, completion
    with publish(out / "vocab.safetensors", **common) as draft:
        _write_vocabulary(draft.path, kept_ids, card.vocab_size)
        draft.rows, draft.tokens = tally, completion
        draft.facts = {"draft_vocab_size": len(kept_ids), "coverage": summary["draft_vocabulary"]["coverage"]}
    with publish(out / "summary.json", **common) as draft:
        draft.path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.rows, draft.tokens = tally, completion


def split_of(conversation: str, options: Merge) -> str:
    """The split of a conversation: a hash of its id, so that no other row or dataset moves it."""
    point = int.from_bytes(hashlib.sha256(conversation.encode()).digest()[:8], "big") / 2**64
    if point < options.test_fraction:
        return "test"
    return "validation" if point < options.test_fraction + options.validation_fraction else "train"


def _all_rows(shards: dict[tuple[str, str], Path], weights: dict[str, float]) -> pl.DataFrame:
    """One line per token row of every shard, in config order, ids left on disk."""
    import polars as pl

    columns = ["row_id", "conversation", "prompt_key", "length", "completion_tokens", "prompt_text"]
    rank = {name: number for number, name in enumerate(weights)}
    frames = []
    for (dataset, shard), path in sorted(shards.items(), key=lambda item: (rank.get(item[0][0], -1), item[0][1])):
        if dataset not in rank:
            raise EyrieError(f"{path}: belongs to dataset {dataset!r}, which the config does not name; leave it out")
        frame = read_tokens(path, columns).with_columns(
            dataset=pl.lit(dataset),
            shard=pl.lit(shard),
            row=pl.int_range(pl.len(), dtype=pl.Int32),
            rank=pl.lit(rank[dataset], pl.Int32),
            weight=pl.lit(weights[dataset], pl.Float32),
        )
        frames.append(frame)
    rows = pl.concat(frames)
    for name in weights:
        if rows.filter(pl.col("dataset") == name).is_empty():
            raise EyrieError(
                f"dataset {name}: none of its token shards holds a row; mend it or take it out of the config"
            )
    return rows


def _with_splits(rows: pl.DataFrame, options: Merge) -> pl.DataFrame:
    import polars as pl

    names = rows["conversation"].unique().to_list()
    splits = pl.DataFrame({"conversation": names, "split": [split_of(name, options) for name in names]})
    return rows.join(splits, on="conversation", how="left", maintain_order="left")


def _with_reasons(rows: pl.DataFrame, options: Merge, suites: dict[str, Prompts]) -> pl.DataFrame:
    """Adds ``reason``: why a row is left out, or an empty string. The first reason of the order below counts."""
    import polars as pl

    first = pl.col("rank").min().over("prompt_key")
    rows = rows.with_columns(
        reason=pl.when(pl.col("rank") > first).then(pl.lit("cross_dataset_duplicate")).otherwise(pl.lit(""))
    )
    for prompts in suites.values():
        rows = _marked(rows, prompts, "benchmark_prompt", pl.col("reason") == "")
    test = rows.filter((pl.col("reason") == "") & (pl.col("split") == "test"))
    held_out = Prompts(test["prompt_key"].to_list(), test["prompt_text"].to_list(), options.decontamination_ngram)
    return _marked(rows, held_out, "held_out_prompt", (pl.col("reason") == "") & (pl.col("split") != "test"))


def _marked(rows: pl.DataFrame, prompts: Prompts, reason: str, among: pl.Expr) -> pl.DataFrame:
    """Gives ``reason`` to the rows of ``among`` that share a prompt or an n-gram with ``prompts``."""
    import polars as pl

    shared = prompts.shared_with(rows.select("prompt_key", "prompt_text"))
    return rows.with_columns(reason=pl.when(among & shared).then(pl.lit(reason)).otherwise(pl.col("reason")))


def _suites(suites: dict[str, Any], options: Merge) -> dict[str, Prompts]:
    """The prompts of every configured external suite."""
    from eyrie.datasets import suite_prompts

    found = {}
    for name, suite in suites.items():
        conversations = suite_prompts(suite["dataset"], suite.get("options", {}))
        keys = [prompt_key([m.to_dict() for m in conversation.messages]) for conversation in conversations]
        texts = [conversation.messages[-1].content for conversation in conversations]
        found[name] = Prompts(keys, texts, options.decontamination_ngram)
    return found


def _token_counts(shards: dict[tuple[str, str], Path], left: pl.DataFrame, vocab_size: int) -> pl.DataFrame:
    """Supervised tokens by dataset, split and id: columns dataset, split, token (i32), count (i64)."""
    import polars as pl

    frames = []
    for (dataset, shard), path in shards.items():
        wanted = left.filter((pl.col("dataset") == dataset) & (pl.col("shard") == shard)).select("row", "split")
        rows = (
            read_tokens(path, ["input_ids", "spans"])
            .with_row_index("row")
            .with_columns(pl.col("row").cast(pl.Int32))
            .join(wanted, on="row", how="inner")
        )
        counted = (
            rows.explode("spans")
            .unnest("spans")
            .select("split", token=pl.col("input_ids").list.slice(pl.col("start"), pl.col("end") - pl.col("start")))
            .explode("token")
            .drop_nulls("token")
            .group_by("split", "token")
            .agg(count=pl.len().cast(pl.Int64))
        )
        worst = counted["token"].max()
        if isinstance(worst, int) and worst >= vocab_size:
            raise EyrieError(f"{path}: holds token id {worst}, the target has {vocab_size}; rebuild it")
        frames.append(counted.with_columns(dataset=pl.lit(dataset)))
    return pl.concat(frames).group_by("dataset", "split", "token").agg(pl.col("count").sum())


def _draft_vocabulary(counts: pl.DataFrame, size: int, card: TargetCard) -> np.ndarray:
    """Ascending target ids, int64 [size]: specials and stops, then the most frequent supervised training tokens,
    then, when the data has fewer, the lowest ids that are left."""
    import numpy as np
    import polars as pl

    forced = sorted({*card.special_ids, *card.stop_ids})
    if size > card.vocab_size:
        raise EyrieError(
            f"merge.draft_vocab_size is {size}, the target has only {card.vocab_size} tokens; lower it to that or less"
        )
    if size < len(forced):
        raise EyrieError(
            f"merge.draft_vocab_size is {size}, the target has {len(forced)} special tokens that must be in; raise it"
        )
    train = counts.filter(pl.col("split") == "train").group_by("token").agg(pl.col("count").sum())
    frequency = np.zeros(card.vocab_size, np.int64)
    frequency[train["token"].to_numpy()] = train["count"].to_numpy()
    frequency[forced] = np.iinfo(np.int64).max
    order = np.argsort(-frequency, kind="stable")  # ties, and tokens never seen, by ascending id
    return np.sort(order[:size]).astype(np.int64)


def _write_vocabulary(path: Path, kept: np.ndarray, vocab_size: int) -> None:
    """``d2t`` int64 [Dv] offsets (target id = draft id + d2t), ``t2d`` bool [V]."""
    import numpy as np
    from safetensors.numpy import save_file

    t2d = np.zeros(vocab_size, np.bool_)
    t2d[kept] = True
    d2t = kept - np.arange(len(kept), dtype=np.int64)
    save_file({"d2t": d2t, "t2d": t2d}, path)


def _summary(rows: pl.DataFrame, counts: pl.DataFrame, kept: np.ndarray, names: list[str]) -> dict[str, Any]:
    """What the report shows: rows and tokens by dataset and split, reasons, lengths, shares, coverage."""
    import polars as pl

    left = rows.filter(pl.col("reason") == "")
    train_weighted = (pl.col("completion_tokens") * pl.col("weight")).filter(pl.col("split") == "train").sum()
    total = left.select(train_weighted).item() or 1.0
    datasets = {}
    for name in names:
        mine, all_mine = left.filter(pl.col("dataset") == name), rows.filter(pl.col("dataset") == name)
        datasets[name] = {
            "rows": len(mine),
            "conversations": mine["conversation"].n_unique(),
            "left_out": dict(
                all_mine.filter(pl.col("reason") != "")["reason"].value_counts().sort("reason").iter_rows()
            ),
            "splits": _by_split(mine),
            "share": round(mine.select(train_weighted).item() / total, 6),
            "coverage": _coverage(counts.filter(pl.col("dataset") == name), kept),
        }
    bars = left.group_by((pl.col("length") // HISTOGRAM_STEP * HISTOGRAM_STEP).alias("from")).agg(rows=pl.len())
    held_out = counts.filter(pl.col("split") == "test")
    return {
        "rows": {"read": len(rows), "kept": len(left)},
        "splits": _by_split(left),
        "left_out": dict(rows.filter(pl.col("reason") != "")["reason"].value_counts().sort("reason").iter_rows()),
        "datasets": datasets,
        "lengths": {
            "step": HISTOGRAM_STEP,
            "histogram": {str(start): n for start, n in bars.sort("from").iter_rows()},
            "longest": left["length"].max(),
        },
        "draft_vocabulary": {
            "size": len(kept),
            "supervised_ids_in_train": counts.filter(pl.col("split") == "train")["token"].n_unique(),
            "coverage": {
                "all": _coverage(counts, kept),
                "train": _coverage(counts.filter(pl.col("split") == "train"), kept),
                "held_out": _coverage(held_out, kept),
                "held_out_by_dataset": {
                    name: _coverage(held_out.filter(pl.col("dataset") == name), kept) for name in names
                },
            },
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


def _coverage(counts: pl.DataFrame, kept: np.ndarray) -> float | None:
    """Share of supervised tokens that the draft vocabulary holds; null when there are none."""
    import polars as pl

    total = int(counts["count"].sum())
    if not total:
        return None
    inside = counts.filter(pl.col("token").is_in(pl.Series(kept).cast(pl.Int32).implode()))
    return round(int(inside["count"].sum()) / total, 6)
