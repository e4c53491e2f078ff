"""Atomic publishing: a file and its manifest appear by rename, whole and validated, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyrie.formats.manifest import Manifest, RowCounts, manifest_path, sha256_of, stats_path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it to ``path``, else remove it.

    The temporary file is hidden and named after the process, so a killed job leaves nothing that looks complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Publish a small text file atomically."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Publish a JSON document atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def publish(
    path: Path,
    *,
    stage: str,
    recipe: dict[str, Any],
    inputs: dict[str, str] | None = None,
    identity: dict[str, str] | None = None,
) -> Iterator[Draft]:
    """Write a data file and then its manifest.

    The body writes ``draft.path`` and sets ``draft.rows`` (and, where they apply, ``tokens``, ``facts``, ``stats``).
    The old manifest is removed before the new file takes its place, so no kill can leave a manifest beside bytes that
    it does not describe.
    """
    draft = Draft()
    with atomic(path) as part:
        draft.path = part
        yield draft
        manifest = Manifest(
            stage=stage,
            file=path.name,
            sha256=sha256_of(part),
            bytes=part.stat().st_size,
            rows=draft.rows,
            tokens=draft.tokens,
            inputs=inputs or {},
            recipe=recipe,
            identity=identity or {},
            facts=draft.facts,
        )
        manifest_path(path).unlink(missing_ok=True)
    write_text(manifest_path(path), manifest.dump())
    if draft.stats:
        write_json(stats_path(path), draft.stats)


class Draft:
    """A file in the making; see :func:`publish`."""

    def __init__(self) -> None:
        self.path = Path()
        self.rows = RowCounts(read=0, kept=0)
        self.tokens: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
