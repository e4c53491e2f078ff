"""All that a report says, read from what the stages left: manifests, summary, metrics, bench figures, times.

No data file is opened, so a report over terabytes takes a second. What is missing is None or counted as missing: the
report of half a run is a report too.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from eyrie.config import Config, Dataset, Drafter, Suite, load_config, parse_config
from eyrie.errors import EyrieError
from eyrie.formats.manifest import Manifest, manifest_path, read_manifest, stats_path
from eyrie.report.figures import Bench, Figures, Merged, MergedDataset
from eyrie.targets.card import TargetCard, read_card


@dataclass
class Step:
    """One stage over some files, summed.

    Attributes:
        expected, missing: files that the config asks for, and those of them that have no manifest.
        read, kept, dropped: rows.
        cpu_seconds: of the jobs that made the files last; None when none of them recorded it.
    """

    expected: int = 0
    missing: list[Path] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    cpu_seconds: float | None = None
    manifests: list[Manifest] = field(default_factory=list)

    @property
    def files(self) -> int:
        return self.expected - len(self.missing)

    @property
    def complete(self) -> bool:
        return not self.missing

    def add(self, data: Path, times: Path | None) -> None:
        """Count ``data`` in; ``times`` is Snakemake's own record of its job, for stages that keep no stats."""
        self.expected += 1
        if not manifest_path(data).exists():
            self.missing.append(data)
            return
        manifest = read_manifest(data)
        self.manifests.append(manifest)
        self.read += manifest.rows.read
        self.kept += manifest.rows.kept
        self.dropped.update(manifest.rows.dropped)
        self.tokens.update(manifest.tokens)
        self.facts.update({name: n for name, n in manifest.facts.items() if type(n) is int})
        self.bytes += manifest.bytes
        spent = cpu_seconds(data, times)
        if spent is not None:
            self.cpu_seconds = (self.cpu_seconds or 0.0) + spent

    @classmethod
    def total(cls, steps: Iterable[Step]) -> Step:
        whole = cls()
        for step in steps:
            whole.expected += step.expected
            whole.missing += step.missing
            whole.read += step.read
            whole.kept += step.kept
            whole.dropped += step.dropped
            whole.tokens += step.tokens
            whole.facts += step.facts
            whole.bytes += step.bytes
            whole.manifests += step.manifests
            if step.cpu_seconds is not None:
                whole.cpu_seconds = (whole.cpu_seconds or 0.0) + step.cpu_seconds
        return whole


@dataclass(frozen=True)
class DatasetRun:
    """One dataset on its way; ``responses`` is None for a native one."""

    name: str
    options: Dataset
    prompts: Step
    responses: Step | None
    rows: Step
    hidden: Step
    merged: MergedDataset | None

    @property
    def completion_tokens(self) -> int:
        """What counts against the budget: all answers, cut ones too; for a native dataset the rows' own."""
        return (self.rows if self.responses is None else self.responses).tokens["completion"]

    @property
    def truncated_tokens(self) -> int:
        """Completion tokens that were answered but gave no token row."""
        made = self.rows.tokens["completion"]
        return max(0, self.completion_tokens - made) if self.rows.complete and made else 0

    @property
    def left_out_tokens(self) -> int:
        """Completion tokens of token rows that the index leaves out."""
        if self.merged is None:
            return 0
        return max(0, self.rows.tokens["completion"] - sum(s.completion_tokens for s in self.merged.splits.values()))


@dataclass(frozen=True)
class Point:
    """One line of ``metrics.parquet``; ``accuracy[k]`` is the top-1 agreement of TTT step k."""

    step: int
    tokens_seen: int
    loss: float
    accuracy: list[float | None]
    acceptance_length: float | None


@dataclass(frozen=True)
class SuiteRun:
    """A suite of a drafter; ``figures`` is None while it is not measured."""

    name: str
    options: Suite
    path: Path
    figures: Bench | None


@dataclass(frozen=True)
class DrafterRun:
    name: str
    options: Drafter
    weights: Step
    export: Step
    train: list[Point]
    validation: list[Point]
    suites: list[SuiteRun]

    @property
    def trained(self) -> Manifest | None:
        return self.weights.manifests[0] if self.weights.manifests else None

    @property
    def best(self) -> Point | None:
        """The validation whose weights were published: the first of the highest simulated acceptance length."""
        scored = [point for point in self.validation if point.acceptance_length is not None]
        return max(scored, key=lambda point: point.acceptance_length or 0.0, default=None)


@dataclass(frozen=True)
class Run:
    config: Config
    folder: Path
    card: TargetCard | None
    datasets: list[DatasetRun]
    merged: Merged | None
    index: Step
    drafters: list[DrafterRun]
    bench_cpu_seconds: float | None

    @property
    def name(self) -> str:
        return self.config.run

    @property
    def measured(self) -> list[tuple[DrafterRun, SuiteRun, Bench]]:
        """Every suite with figures, in config order."""
        return [
            (drafter, suite, suite.figures)
            for drafter in self.drafters
            for suite in drafter.suites
            if suite.figures is not None
        ]

    @property
    def headline(self) -> tuple[DrafterRun, SuiteRun, Bench] | None:
        """The drafter to speak of first: on the first suite measured, one to deploy, then the fastest."""
        if not self.measured:
            return None
        first = self.measured[0][1].name
        same = [entry for entry in self.measured if entry[1].name == first]
        return max(same, key=lambda entry: (entry[2].verdict.deploy, entry[2].speedup.median))

    def step(self, name: str) -> Step:
        """A stage over all datasets: ``prompts``, ``responses``, ``rows`` or ``hidden``."""
        return Step.total(step for d in self.datasets if (step := getattr(d, name)) is not None)


def collect(config: Path | dict[str, Any], folder: Path) -> Run:
    """Read the run in ``folder`` (``results/<run>``); prompt shards stand in ``data/prompts`` two levels up.

    Raises:
        EyrieError: the config is at fault, or a file that is there is malformed.
    """
    checked = load_config(config) if isinstance(config, Path) else parse_config(config)
    merged_folder = folder / "merged"
    index = Step()
    for name in ("index.parquet", "vocab.safetensors", "summary.json"):  # one job makes the three
        index.add(merged_folder / name, folder / "benchmarks" / "merge.tsv" if name == "index.parquet" else None)
    datasets, merged = collect_data(checked, folder)
    card = folder / "target.json"
    spent = [
        seconds
        for drafter in checked.drafters
        for suite in checked.bench.suites
        if (seconds := _recorded(folder / "benchmarks" / "bench" / drafter / f"{suite}.tsv")) is not None
    ]
    return Run(
        config=checked,
        folder=folder,
        card=read_card(card) if card.exists() else None,
        datasets=datasets,
        merged=merged,
        index=index,
        drafters=[_drafter(folder, name, options, checked) for name, options in checked.drafters.items()],
        bench_cpu_seconds=sum(spent) if spent else None,
    )


def collect_data(config: Config, folder: Path) -> tuple[list[DatasetRun], Merged | None]:
    """The part of :func:`collect` that concerns data: every dataset on its way, and the merge's summary."""
    summary = folder / "merged" / "summary.json"
    merged = _parse(Merged, summary) if manifest_path(summary).exists() else None
    return [_dataset(folder, name, options, merged) for name, options in config.datasets.items()], merged


def _dataset(folder: Path, name: str, options: Dataset, merged: Merged | None) -> DatasetRun:
    def step(base: Path, stage: str, suffix: str) -> Step:
        made = Step()
        for shard in options.shards:
            made.add(base / name / f"{shard}{suffix}", folder / "benchmarks" / stage / name / f"{shard}.tsv")
        return made

    answered = options.kind == "answered"
    return DatasetRun(
        name=name,
        options=options,
        prompts=step(folder.parent.parent / "data" / "prompts", "ingest", ".jsonl.zst"),
        responses=step(folder / "responses", "generate", ".jsonl.zst") if answered else None,
        rows=step(folder / "tokens", "tokenize", ".parquet"),
        hidden=step(folder / "hidden", "hidden", ".safetensors"),
        merged=merged.datasets.get(name) if merged else None,
    )


def _drafter(folder: Path, name: str, options: Drafter, config: Config) -> DrafterRun:
    weights, export = Step(), Step()
    weights.add(folder / "drafters" / name / "model.safetensors", folder / "benchmarks" / "train" / f"{name}.tsv")
    export.add(
        folder / "export" / name / "sglang" / "model.safetensors", folder / "benchmarks" / "export" / f"{name}.tsv"
    )
    points = _metrics(folder / "drafters" / name / "metrics.parquet")
    suites = []
    for suite, chosen in config.bench.suites.items():
        path = folder / "bench" / name / f"{suite}.json"
        suites.append(SuiteRun(suite, chosen, path, _parse(Bench, path) if path.exists() else None))
    return DrafterRun(name, options, weights, export, points["train"], points["validation"], suites)


def _metrics(path: Path) -> dict[str, list[Point]]:
    import polars as pl

    points: dict[str, list[Point]] = {"train": [], "validation": []}
    if not path.exists():
        return points
    try:
        table = pl.read_parquet(path)
        steps = [name for name in table.columns if name.startswith("accuracy_")]
        for row in table.sort("step", maintain_order=True).iter_rows(named=True):
            accuracy = [row[name] for name in steps]
            length = row["simulated_acceptance_length"]
            points[row["split"]].append(Point(row["step"], row["tokens_seen"], row["loss"], accuracy, length))
    except (pl.exceptions.PolarsError, KeyError) as error:
        why = " ".join(str(error).split())[:120]
        raise EyrieError(f"{path}: no readable metrics ({why}); rebuild it with `snakemake -f {path}`") from error
    return points


Parsed = TypeVar("Parsed", bound=Figures)


def _parse(kind: type[Parsed], path: Path) -> Parsed:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EyrieError(
            f"{path}: missing though its manifest is there; rebuild it with `snakemake -f {path}`"
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        fault = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, fault["loc"])) or "top level"
        raise EyrieError(f"{path}: {where}: {fault['msg']}; rebuild it with `snakemake -f {path}`") from error


def cpu_seconds(data: Path, times: Path | None) -> float | None:
    """What the job that made ``data`` spent, by its own clock, else by Snakemake's sampling, else None."""
    stats = stats_path(data)
    if stats.exists():
        try:
            spent = json.loads(stats.read_text()).get("cpu_seconds")
        except (ValueError, AttributeError):
            spent = None  # times are a courtesy: a broken record costs its figure, not the report
        if isinstance(spent, int | float):
            return float(spent)
    return _recorded(times) if times else None


def _recorded(times: Path) -> float | None:
    """``cpu_time`` of a Snakemake benchmark file; None when the file or the figure is not there."""
    if not times.exists():
        return None
    with times.open(encoding="utf-8", newline="") as file:
        rows: Sequence[dict[str, str]] = list(csv.DictReader(file, delimiter="\t"))
    try:
        return sum(float(row["cpu_time"]) for row in rows) if rows else None
    except (KeyError, TypeError, ValueError):
        return None
