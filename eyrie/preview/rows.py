"""Which rows are shown, and what is said about each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.errors import EyrieError
from eyrie.formats.manifest import verified_manifest
from eyrie.formats.tokens import read_tokens
from eyrie.preview.pieces import Piece, pieces
from eyrie.targets.card import TargetCard


@dataclass(frozen=True)
class Shown:
    """One row of the index on the page.

    Attributes:
        weight: of its dataset in training.
        tokens, labels: of the row, and of it supervised.
        outside: supervised ids that the draft vocabulary does not hold.
        pieces: the row's tokens.
    """

    dataset: str
    shard: str
    row: int
    row_id: str
    split: str
    weight: float
    turn: int
    finish_reason: str
    tokens: int
    labels: int
    outside: frozenset[int]
    pieces: list[Piece]


def chosen_rows(run_dir: Path, tokenizer: Any, card: TargetCard, count: int, seed: int) -> dict[str, list[Shown]]:
    """``count`` rows of each dataset that has any, by hash of seed and row id, so that other rows move none of them.

    Raises:
        EyrieError: a token shard is missing, or is not the one that was merged.
    """
    import polars as pl
    from safetensors.numpy import load_file

    index = pl.read_parquet(run_dir / "merged" / "index.parquet")
    in_draft = load_file(run_dir / "merged" / "vocab.safetensors")["t2d"]
    merged = verified_manifest(run_dir / "merged" / "index.parquet", stage="merge").inputs
    tables: dict[tuple[str, str], pl.DataFrame] = {}
    shown: dict[str, list[Shown]] = {}
    for entry in _drawn(index, count, seed):
        dataset, shard = entry["dataset"], entry["shard"]
        if (dataset, shard) not in tables:
            path = run_dir / "tokens" / dataset / f"{shard}.parquet"
            manifest = verified_manifest(path, stage="tokenize", identity=card.identity())
            if manifest.sha256 != merged.get(f"{dataset}/{path.name}"):
                raise EyrieError(f"{path}: is not the shard that was merged; run `snakemake {run_dir}/preview.html`")
            tables[dataset, shard] = read_tokens(path)
        row = tables[dataset, shard].row(entry["row"], named=True)
        spans = [(span["start"], span["end"]) for span in row["spans"]]
        labels = [id for start, end in spans for id in row["input_ids"][start:end]]
        specials = {*card.special_ids, *card.stop_ids}
        shown.setdefault(dataset, []).append(
            Shown(
                dataset=dataset,
                shard=shard,
                row=entry["row"],
                row_id=row["row_id"],
                split=entry["split"],
                weight=entry["weight"],
                turn=row["turn"],
                finish_reason=row["finish_reason"],
                tokens=row["length"],
                labels=len(labels),
                outside=frozenset(id for id in labels if not in_draft[id]),
                pieces=list(pieces(tokenizer, row["input_ids"], spans, specials)),
            )
        )
    return shown


def _drawn(index: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Lines of the index, datasets in its order."""
    drawn = []
    for _, mine in index.group_by("dataset", maintain_order=True):
        order = sorted(range(len(mine)), key=lambda place: _hash(mine["row_id"][place], seed))
        drawn += [mine.row(place, named=True) for place in order[:count]]
    return drawn


def _hash(row_id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {row_id}".encode()).digest()
