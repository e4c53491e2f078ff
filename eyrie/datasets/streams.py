"""Rows of a local file, a folder or a hub dataset, one at a time.

The `datasets` library decides which files a name, subset, split and revision stand for. JSON and Parquet files are then
read here, row by row, because the library gives a column the type that its first block shows: a null or an empty list
there makes every later text or struct of that column an error (docs/ingest.md has the figures). What else it can read
(CSV, Arrow) it reads itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyrie.datasets.registry import Hub, Source
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import json_rows, read_jsonl

JSON_NAMES = re.compile(r"\.jsonl?(\.zst|\.gz)?$")
COMMIT = re.compile(r"@([0-9a-f]{40})/")
PARQUET_ROWS = 128  # rows decoded at once; a trajectory may hold 200 kB
BUFFER = 1 << 20  # bytes of a column read at once; with the default a whole row group is


def rows_of(source: Source, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Stream the source's rows in the order of its files.

    Args:
        columns: what a Parquet file is read of, where it has them; empty: everything.

    Raises:
        EyrieError: nothing of that name, a file that is broken, an unreachable hub.
    """
    if source.path is not None and not Path(source.path).is_dir():
        path = Path(source.path)
        if JSON_NAMES.search(path.name):
            yield from read_jsonl(path)
        elif path.suffix == ".parquet":
            yield from _parquet(str(path), columns)
        else:
            raise EyrieError(f"{path}: unknown kind of file; give .jsonl, .json (also .zst, .gz), .parquet or a folder")
        return
    hub = source.hub if source.path is None else _folder(Path(source.path), source.hub)
    if hub.repo is None:
        raise EyrieError("needs `path`, a local file or folder, or `repo`, a dataset of the hub")
    builder, split = resolved(hub)
    files = [str(file) for file in builder.config.data_files[split]]
    if commit := COMMIT.search(files[0] if files else ""):
        source.facts["revision"] = commit[1]
    for key in ("repo", "subset", "files"):
        if source.path is None and getattr(hub, key):
            source.facts[key] = getattr(hub, key)
    source.facts["split"] = split
    if all(JSON_NAMES.search(name) for name in files):
        for name in files:
            with _reading(name), _open(name) as raw:
                yield from json_rows(raw, name)
    elif all(name.endswith(".parquet") for name in files):
        for name in files:
            yield from _parquet(name, columns)
    else:
        with _reading(hub.repo):
            yield from builder.as_streaming_dataset(split=split)


def _folder(path: Path, hub: Hub) -> Hub:
    """The folder in place of the hub; without a card it has no subsets, whatever the hub's dataset has."""
    return Hub(str(path), hub.subset if (path / "README.md").exists() else None, hub.split)


def resolved(hub: Hub) -> tuple[Any, str]:
    """The library's builder for the dataset, its files resolved, and the split to read.

    Raises:
        EyrieError: no such dataset, subset, split or revision, or no way to reach the hub.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from datasets import load_dataset_builder

    with _reading(str(hub.repo)):
        builder = load_dataset_builder(str(hub.repo), hub.subset, revision=hub.revision, data_files=hub.files)
    splits = [str(split) for split in builder.config.data_files or {}]
    if hub.split in splits:
        return builder, str(hub.split)
    if len(splits) == 1 and (hub.split is None or Path(str(hub.repo)).is_dir()):
        return builder, splits[0]
    raise EyrieError(f"{hub.repo}: has no split {hub.split!r}; set `split` to one of: {', '.join(splits) or 'none'}")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """What the libraries raise about a name or a connection, as one line that says what to do."""
    try:
        yield
    except (EyrieError, GeneratorExit):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise EyrieError(
            f"{name}: cannot be read ({type(error).__name__}: {said}); check `repo`, `subset`, `split`, `revision` and "
            "the connection, or download it and give `path`"
        ) from error


def _open(name: str) -> Any:
    """A local or remote file, open for reading bytes."""
    import fsspec

    return fsspec.open(name, "rb").open()


def _parquet(name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of one Parquet file by its own schema: the next file may have another."""
    from pyarrow.parquet import ParquetFile

    with _reading(name), _open(name) as raw:
        file = ParquetFile(raw, buffer_size=BUFFER, pre_buffer=False)
        known = set(file.schema_arrow.names)
        wanted = [column for column in columns if column in known] or None
        for batch in file.iter_batches(PARQUET_ROWS, columns=wanted):
            yield from batch.to_pylist()
