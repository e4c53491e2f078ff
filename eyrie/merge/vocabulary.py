"""The draft vocabulary: how often each token is supervised, which tokens the drafter may propose, what that covers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eyrie.errors import EyrieError
from eyrie.formats.tokens import read_tokens
from eyrie.merge.rows import KEPT, SPLITS, Rows
from eyrie.targets.card import TargetCard

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

CHUNK = 1 << 22  # ids counted at a time: bincount widens them to int64


@dataclass(frozen=True)
class Vocabulary:
    """The target tokens that the drafter can propose.

    Attributes:
        ids: target ids, int64 ``[Dv]``, ascending.
        kept_from: the file that it was taken from, or None when it was counted here.
        missing_specials: special and stop ids that are not in it; only a given vocabulary can lack any.
    """

    ids: np.ndarray
    kept_from: Path | None = None
    missing_specials: list[int] = field(default_factory=list)


def token_counts(rows: Rows, vocab_size: int) -> dict[str, np.ndarray]:
    """Supervised tokens of the rows that stay, by dataset: int64 ``[3, V]``, one line per split.

    Raises:
        EyrieError: a token id that the target does not have.
    """
    import numpy as np

    counts: dict[str, np.ndarray] = {}
    for shard in rows.shards:
        mine = counts.setdefault(shard.dataset, np.zeros((len(SPLITS), vocab_size), np.int64))
        table = read_tokens(shard.path, ["input_ids", "spans"])
        left = rows.reason[shard.place] == KEPT
        for number in range(len(SPLITS)):
            chosen = np.flatnonzero(left & (rows.split[shard.place] == number))
            if not len(chosen):
                continue
            ids = supervised_ids(table[chosen] if len(chosen) < len(table) else table)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise EyrieError(f"{shard.path}: holds token id {wrong}, the target has {vocab_size}; rebuild it")
            add_counts(mine[number], ids)
    return counts


def supervised_ids(table: pl.DataFrame) -> np.ndarray:
    """int32 ``[N]``: all ids of ``table`` (columns ``input_ids``, ``spans``) that stand inside a span."""
    import numpy as np

    lengths = table["input_ids"].list.len().to_numpy().astype(np.int64)
    ids = table["input_ids"].filter(table["input_ids"].list.len() > 0).explode().to_numpy()
    starts = np.cumsum(lengths) - lengths
    spans = table.select("spans").with_row_index("row").explode("spans").drop_nulls("spans").unnest("spans")
    first = starts[spans["row"].to_numpy()]
    edges = np.zeros(len(ids) + 1, np.int8)
    np.add.at(edges, first + spans["start"].to_numpy(), 1)  # spans may touch, so two edges may share a place
    np.subtract.at(edges, first + spans["end"].to_numpy(), 1)
    return ids[np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)]


def add_counts(counts: np.ndarray, ids: np.ndarray) -> None:
    """Adds the occurrences of ``ids`` (``[N]``, all within range) to ``counts`` (int64 ``[V]``)."""
    import numpy as np

    for start in range(0, len(ids), CHUNK):
        counts += np.bincount(ids[start : start + CHUNK], minlength=len(counts))


def choose(frequency: np.ndarray, size: int, card: TargetCard) -> Vocabulary:
    """Specials and stops, then the most frequent ids, then, when the data has fewer, the lowest that are left.

    Args:
        frequency: supervised training tokens by id, int64 ``[V]``.
        size: ids to keep.

    Raises:
        EyrieError: more ids than the target has, or fewer than must be in.
    """
    import numpy as np

    forced = _forced(card)
    if size > card.vocab_size:
        raise EyrieError(
            f"merge.draft_vocab_size is {size}, the target has only {card.vocab_size} tokens; lower it to that or less"
        )
    if size < len(forced):
        raise EyrieError(
            f"merge.draft_vocab_size is {size}, the target has {len(forced)} special tokens that must be in; raise it"
        )
    weight = frequency.copy()
    weight[forced] = np.iinfo(np.int64).max
    order = np.argsort(-weight, kind="stable")  # ties, and tokens never seen, by ascending id
    return Vocabulary(np.sort(order[:size]).astype(np.int64))


def keep(path: Path, card: TargetCard) -> Vocabulary:
    """The vocabulary of an earlier drafter, so that its head can be trained on.

    Args:
        path: safetensors file with ``d2t`` (integer offsets ``[Dv]``) and ``t2d`` (bool ``[V]``).

    Raises:
        EyrieError: it cannot be read, holds no such pair, or one that does not fit the target or itself.
    """
    import numpy as np

    d2t, t2d = _read_pair(path)
    if t2d.shape != (card.vocab_size,) or t2d.dtype != np.bool_:
        raise EyrieError(
            f"{path}: its t2d is {t2d.dtype} {list(t2d.shape)}, the target has {card.vocab_size} tokens; "
            "set merge.draft_vocab_from to a drafter of this target"
        )
    whole = d2t.ndim == 1 and np.issubdtype(d2t.dtype, np.integer) and len(d2t) > 0
    ids = d2t.astype(np.int64) + np.arange(len(d2t)) if whole else np.zeros(0, np.int64)
    if not whole or ids[0] < 0 or ids[-1] >= card.vocab_size or (np.diff(ids) <= 0).any():
        raise EyrieError(
            f"{path}: its d2t is no map of offsets into {card.vocab_size} target tokens (draft id + d2t must ascend); "
            "set merge.draft_vocab_from to a drafter of this target"
        )
    if not np.array_equal(np.flatnonzero(t2d), ids):
        raise EyrieError(
            f"{path}: d2t and t2d name different tokens; mend the file, or leave merge.draft_vocab_from out"
        )
    return Vocabulary(ids, path, sorted(set(_forced(card)) - set(ids.tolist())))


def _read_pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            missing = {"d2t", "t2d"} - set(file.keys())
            if missing:
                raise EyrieError(
                    f"{path}: holds no {' and no '.join(sorted(missing))}; "
                    "set merge.draft_vocab_from to the weights of a drafter with a draft vocabulary"
                )
            return file.get_tensor("d2t"), file.get_tensor("t2d")
    except FileNotFoundError:
        raise EyrieError(f"{path}: no such file; mend merge.draft_vocab_from") from None
    except (SafetensorError, OSError) as error:
        raise EyrieError(f"{path}: no safetensors file ({error}); mend merge.draft_vocab_from") from error


def write_vocabulary(path: Path, vocabulary: Vocabulary, vocab_size: int) -> None:
    """``d2t`` int64 ``[Dv]`` offsets (target id = draft id + d2t), ``t2d`` bool ``[V]``."""
    import numpy as np
    from safetensors.numpy import save_file

    ids = vocabulary.ids
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    save_file({"d2t": ids - np.arange(len(ids), dtype=np.int64), "t2d": t2d}, path)


def coverage(frequency: np.ndarray, vocabulary: Vocabulary) -> float | None:
    """Share of the tokens counted in ``frequency`` (int64 ``[V]``) that are in the vocabulary; null without tokens."""
    total = int(frequency.sum())
    return round(int(frequency[vocabulary.ids].sum()) / total, 6) if total else None


def _forced(card: TargetCard) -> list[int]:
    return sorted({*card.special_ids, *card.stop_ids})
