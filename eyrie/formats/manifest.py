"""Manifests: what a data file is, what it was made from, and where every row of its input went.

``<file>.manifest.json`` stands beside every data file and is the dependency edge of the workflow. It is deterministic
(no times, no cost: those stand in ``<file>.stats.json``), so the same bytes made again leave everything downstream
fresh.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from eyrie.errors import EyrieError

SCHEMA_VERSION = 1


class RowCounts(BaseModel):
    """Every row of the input ends as kept or as dropped for a named reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read: int
    kept: int
    dropped: dict[str, int] = {}

    @model_validator(mode="after")
    def _balance(self) -> RowCounts:
        if self.read != self.kept + sum(self.dropped.values()):
            raise ValueError(f"rows do not balance: read {self.read}, kept {self.kept}, dropped {self.dropped}")
        return self


class Manifest(BaseModel):
    """Identity of one published file.

    Attributes:
        stage: the stage that made it, as in :data:`eyrie.recipes.REVISIONS`.
        file: its name, without folder.
        sha256: hash of its bytes.
        rows: where the input's rows went.
        tokens: token counts by kind (``prompt``, ``completion``, ...).
        inputs: file name of each input -> its sha256.
        recipe: the stage's recipe.
        identity: what a consumer must agree on (``target``, ``tokenizer``, ``template``: sha256; ``layers``: ids; ...).
        facts: further deterministic facts worth reporting.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    stage: str
    file: str
    sha256: str
    bytes: int
    rows: RowCounts
    tokens: dict[str, int] = {}
    inputs: dict[str, str] = {}
    recipe: dict[str, Any] = {}
    identity: dict[str, str] = {}
    facts: dict[str, Any] = {}

    def dump(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def manifest_path(data: Path) -> Path:
    """``x.parquet`` -> ``x.parquet.manifest.json``."""
    return data.with_name(data.name + ".manifest.json")


def stats_path(data: Path) -> Path:
    """``x.parquet`` -> ``x.parquet.stats.json`` (times, rates, cost: what may differ between equal runs)."""
    return data.with_name(data.name + ".stats.json")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(data: Path) -> Manifest:
    """The manifest beside ``data``. Raises :class:`EyrieError` when it is missing or malformed."""
    path = manifest_path(data)
    try:
        return Manifest.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise EyrieError(f"{path}: missing; rebuild it with `snakemake -f {data}`") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "top level"
        raise EyrieError(
            f"{path}: not a manifest ({where}: {fault['msg']}); rebuild with `snakemake -f {data}`"
        ) from error


def verified_manifest(data: Path, *, stage: str, identity: Mapping[str, str] | None = None) -> Manifest:
    """Read the manifest of ``data`` and refuse the file unless it is whole and made for the same target.

    Raises:
        EyrieError: the file is missing, its bytes differ from the manifest's hash (truncated, edited), another stage
            made it, or an entry of ``identity`` disagrees. The message says what to rebuild.
    """
    manifest = read_manifest(data)
    if manifest.stage != stage:
        raise EyrieError(f"{data}: was made by stage {manifest.stage!r}, expected {stage!r}; point at a {stage} file")
    if not data.exists():
        raise EyrieError(f"{data}: missing though its manifest is there; rebuild it with `snakemake -f {data}`")
    size = data.stat().st_size
    if size != manifest.bytes:
        raise EyrieError(
            f"{data}: holds {size} bytes, its manifest says {manifest.bytes} (truncated or edited); "
            f"rebuild it with `snakemake -f {data}`"
        )
    if sha256_of(data) != manifest.sha256:
        raise EyrieError(f"{data}: bytes differ from its manifest's hash; rebuild it with `snakemake -f {data}`")
    for key, expected in (identity or {}).items():
        found = manifest.identity.get(key)
        if found != expected:
            raise EyrieError(
                f"{data}: was made for another {key} ({_short(found)}, this run has {_short(expected)}); "
                f"rebuild it with `snakemake -f {data}`"
            )
    return manifest


def _short(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 16 else value[:12]
