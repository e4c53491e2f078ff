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
    import numpy as np
    import polars as pl

SPLITS = ("train", "validation", "test")
REASONS = ("", "over_cap", "cross_dataset_duplicate", "benchmark_prompt", "held_out_prompt")  # "": the row stays
KEPT, OVER_CAP, DUPLICATE, BENCHMARK, HELD_OUT = range(len(REASONS))


@dataclass(frozen=True)
class Shard:
    """A token shard and its place among all rows: ``first`` up to ``first + count``."""

    dataset: str
    name: str
    path: Path
    first: int
    count: int

    @property
    def place(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass
class Rows:
    """What is known of every row at once: fourteen bytes. The rest is read shard by shard where it is needed.

    Attributes:
        shards: in config order, then by name; rows are counted through them.
        split: place in :data:`SPLITS`, int8 ``[N]``.
        reason: place in :data:`REASONS`, int8 ``[N]``.
        conversation: number of the row's conversation, int32 ``[N]``; all its rows lie in one shard.
        length: tokens, int32 ``[N]``.
        completion_tokens: supervised tokens, int32 ``[N]``.
    """

    shards: list[Shard]
    split: np.ndarray
    reason: np.ndarray
    conversation: np.ndarray
    length: np.ndarray
    completion_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.length)

    def of_dataset(self, name: str) -> slice:
        """The places of a dataset's rows."""
        mine = [shard.place for shard in self.shards if shard.dataset == name]
        return slice(mine[0].start, mine[-1].stop)

    def spread(self, shard: Shard, marked: np.ndarray) -> np.ndarray:
        """Marks of the shard's rows (bool ``[count]``), spread to all rows of a conversation with a marked one."""
        import numpy as np

        mine = self.conversation[shard.place]
        return np.isin(mine, mine[marked]) if marked.any() else marked


def split_of(prompt_key: str, options: Merge) -> str:
    """The split of all conversations with a prompt key: a hash of the key, so that no other row or dataset moves them.

    All rows of a conversation have its key, and so have other answers to its prompt: neither stands in two splits.
    """
    point = int.from_bytes(hashlib.sha256(prompt_key.encode()).digest()[:8], "big") / 2**64
    if point < options.test_fraction:
        return "test"
    return "validation" if point < options.test_fraction + options.validation_fraction else "train"


def read_rows(paths: Sequence[Path], datasets: Sequence[str], caps: Mapping[str, int], options: Merge) -> Rows:
    """All rows with their splits and owners, in config order.

    Args:
        paths: token shards, ``.../<dataset>/<shard>.parquet``.
        datasets: names in config order. The first that has a prompt keeps it, unless its cap leaves the row out: then
            the next one does.
        caps: completion tokens that a dataset may bring; a dataset that is not named brings all.

    Raises:
        EyrieError: a shard of a dataset that is not in ``datasets``, a dataset without rows, or a cap that holds no
            conversation.
    """
    import numpy as np

    for path in paths:
        if path.parent.name not in datasets:
            raise EyrieError(
                f"{path}: belongs to dataset {path.parent.name!r}, which the config does not name; leave it out"
            )
    shards: list[Shard] = []
    parts: list[tuple[np.ndarray, ...]] = []
    taken = np.zeros(0, np.uint64)
    first = conversations = 0
    for dataset in datasets:
        read: list[tuple[np.ndarray, ...]] = []
        for path in sorted((path for path in paths if path.parent.name == dataset), key=lambda path: path.stem):
            columns = _columns(path, dataset in caps, options)
            shards.append(Shard(dataset, path.stem, path, first, len(columns[0])))
            columns[1][:] += conversations
            first += len(columns[0])
            conversations = int(columns[1].max(initial=conversations - 1)) + 1
            read.append(columns)
        if not sum(len(columns[0]) for columns in read):
            raise EyrieError(
                f"dataset {dataset}: none of its token shards holds a row; mend it or take it out of the config"
            )
        split, conversation, length, completion, keys, order = map(np.concatenate, zip(*read, strict=True))
        reason = owned(taken, keys)
        if dataset in caps:
            cut_to_cap(reason, order, completion, dataset, caps[dataset])
        taken = np.union1d(taken, keys[reason == KEPT])
        parts.append((split, reason, conversation, length, completion))
    return Rows(shards, *map(np.concatenate, zip(*parts, strict=True)))


def _columns(path: Path, capped: bool, options: Merge) -> tuple[np.ndarray, ...]:
    """Of a shard's rows: split, conversation (numbered from 0), length, completion tokens, key, order under a cap."""
    import numpy as np

    frame = read_tokens(path, ["conversation", "prompt_key", "length", "completion_tokens"])
    codes = {key: SPLITS.index(split_of(key, options)) for key in frame["prompt_key"].unique()}
    names = frame["conversation"]
    return (
        np.fromiter((codes[key] for key in frame["prompt_key"]), np.int8, len(frame)),
        np.unique(names.hash(seed=0).to_numpy(), return_inverse=True)[1].astype(np.int32),
        frame["length"].to_numpy().copy(),
        frame["completion_tokens"].to_numpy().copy(),
        frame["prompt_key"].hash(seed=0).to_numpy().copy(),
        cap_order(names) if capped else np.zeros(0, np.uint64),
    )


def cap_order(conversations: pl.Series) -> np.ndarray:
    """Where each row's conversation stands when a cap is filled: uint64 ``[N]``, a hash of its id.

    It is not the hash that splits are made of, so that all splits shrink alike.
    """
    import numpy as np

    order = {
        name: int.from_bytes(hashlib.sha256(f"cap {name}".encode()).digest()[:8], "big")
        for name in conversations.unique()
    }
    return np.fromiter((order[name] for name in conversations), np.uint64, len(conversations))


def owned(taken: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Reasons (int8 ``[N]``) of a dataset's rows: duplicates are those whose key an earlier dataset has.

    Args:
        taken: keys that earlier datasets keep, uint64 ``[T]``, ascending.
        keys: hashed prompt keys of the rows, uint64 ``[N]``.
    """
    import numpy as np

    if not len(taken):
        return np.zeros(len(keys), np.int8)
    at = np.minimum(np.searchsorted(taken, keys), len(taken) - 1)
    return np.where(taken[at] == keys, np.int8(DUPLICATE), np.int8(KEPT))


def cut_to_cap(reason: np.ndarray, order: np.ndarray, completion: np.ndarray, dataset: str, cap: int) -> None:
    """Keeps the longest run of whole conversations, by :func:`cap_order`, that ``cap`` completion tokens can hold.

    So a raised cap only adds. Rows behind it get their ``reason``; rows that have one already are not counted.

    Raises:
        EyrieError: it holds not one.
    """
    import numpy as np

    mine = np.flatnonzero(reason == KEPT)
    _, conversation = np.unique(order[mine], return_inverse=True)  # numbered in that order
    sizes = np.zeros(int(conversation.max(initial=-1)) + 1, np.int64)
    np.add.at(sizes, conversation, completion[mine])
    held = np.cumsum(sizes) <= cap
    if len(sizes) and not held[0]:
        raise EyrieError(
            f"datasets.{dataset}.token_cap is {cap}, its first conversation alone holds {sizes[0]} completion tokens; "
            "raise it"
        )
    reason[mine[~held[conversation]]] = OVER_CAP
