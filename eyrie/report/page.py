"""The report for people: one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from eyrie.conversation import REASONS
from eyrie.report import charts, words
from eyrie.report.advice import next_steps, shown
from eyrie.report.collect import DatasetRun, Run, Step, SuiteRun
from eyrie.report.figures import SPLITS, Bench

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    """One box of the pipeline strip."""

    name: str
    step: Step | None
    headline: str
    lines: list[str]
    done: bool


class Page:
    """Collects charts while the page is rendered; ids are numbered, so equal inputs give equal bytes."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []

    def chart(self, figure: go.Figure, label: str) -> Markup:
        """Where the chart goes; ``label`` is what a screen reader says."""
        self.figures.append(charts.to_json(figure))
        entries = Markup("").join(
            Markup('<li class="{}" style="color:{}"><span>{}</span></li>').format(
                entry.shape, entry.colour, entry.label
            )
            for entry in charts.legend(figure)
        )
        return (Markup('<ul class="legend">{}</ul>').format(entries) if entries else Markup("")) + Markup(
            '<div class="chart" id="chart-{}" role="img" aria-label="{}" style="min-height:{}px">'
            "<noscript>This chart needs JavaScript; its figures stand in the tables.</noscript></div>"
        ).format(len(self.figures), label, figure.layout.height)

    def figures_json(self) -> Markup:
        """All charts as one JSON text that cannot end its script element."""
        text = json.dumps(self.figures, separators=(",", ":"), sort_keys=True, allow_nan=False)
        return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))

    def finished(self, body: str) -> str:
        """A rendered template with its charts in it: they are known only once it has been rendered."""
        return (
            body.replace("<!--figures-->", self.figures_json())
            .replace("<!--script-->", (HERE / "page.js").read_text(encoding="utf-8"))
            .replace("<!--plotly-->", get_plotlyjs())
        )


def environment() -> Environment:
    """Templates of this folder. HTML is escaped; every name must be given."""
    templates = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=lambda name: bool(name and ".html" in name),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (words.count, words.short, words.size, words.number, words.times, words.signed, words.share,
                     words.reason, words.plural):  # fmt: skip
        templates.filters[function.__name__] = function
    return templates


def render_page(run: Run) -> str:
    page = Page()
    template = environment().get_template("template.html.jinja")
    body = template.render(
        run=run,
        title=title(run),
        lead=run.headline,
        stages=stages(run),
        chart=page.chart,
        charts=charts,
        reasons=drop_reasons(run.datasets),
        splits=SPLITS,
        steps=next_steps(run),
        held_out=held_out_note,
        chosen=chosen_config(run),
        hashes=hashes(run),
        shown=shown,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
    )
    return page.finished(body)


def title(run: Run) -> str:
    """The target as people call it: the last part of the folder or hub id."""
    return run.config.target.model.rstrip("/").rsplit("/", 1)[-1]


def stages(run: Run) -> list[Stage]:
    """Prompts to benchmark, each with what it made and what it cost."""
    prompts, responses, rows, hidden = (run.step(name) for name in ("prompts", "responses", "rows", "hidden"))
    weights = Step.total(d.weights for d in run.drafters)
    found = [
        _stage("prompts", prompts, words.count(prompts.kept), f"of {words.plural(prompts.read, 'row')} read"),
        _stage("responses", responses, words.count(responses.kept), _tokens(responses, "completion")),
        _stage("rows", rows, words.count(rows.kept), _tokens(rows, "completion")),
        _stage("hidden states", hidden, words.short(hidden.tokens["total"]), "tokens, three layers each"),
        _stage(
            "drafter", weights,
            words.short(sum(m.facts.get("parameters", 0) for m in weights.manifests)) if weights.files else words.NONE,
            f"parameters; {words.short(weights.tokens['seen'])} tokens visited",
        ),
    ]  # fmt: skip
    if not any(d.responses for d in run.datasets):
        found.pop(1)
    measured, asked = len(run.measured), sum(len(d.suites) for d in run.drafters)
    cost = [f"{words.count(run.bench_cpu_seconds)} CPU s"] if run.bench_cpu_seconds is not None else []
    prompts_run = sum(bench.prompts for _, _, bench in run.measured)
    found.append(
        Stage(
            "bench", None, words.count(prompts_run), [f"held-out {'prompt' if prompts_run == 1 else 'prompts'}",
            words.plural(measured, "suite") + ("" if measured == asked else f" of {asked}"), *cost], measured == asked,
        )
    )  # fmt: skip
    return found


def _stage(name: str, step: Step, headline: str, line: str) -> Stage:
    files = words.plural(step.files, "file") + ("" if step.complete else f" of {step.expected}")
    lines = [line, f"{files}, {words.size(step.bytes)}"]
    if step.cpu_seconds is not None:
        lines.append(f"{words.count(step.cpu_seconds)} CPU s")
    return Stage(name, step, headline, lines, step.complete)


def _tokens(step: Step, kind: str) -> str:
    return f"{words.short(step.tokens[kind])} {kind} tokens"


def drop_reasons(datasets: Sequence[DatasetRun]) -> list[tuple[str, str, str, list[int]]]:
    """Where rows went: stage, reason, what it means, and the count of each dataset.

    Rows beyond a budget are no loss and are not in it.
    """
    table: dict[tuple[str, str], list[int]] = {}
    for place, dataset in enumerate(datasets):
        sources: list[tuple[str, dict[str, int]]] = [("ingest", dataset.prompts.dropped)]
        if dataset.responses:
            sources.append(("generate", dataset.responses.dropped))
        sources.append(("tokenize", dataset.rows.dropped))
        if dataset.merged:
            sources.append(("merge", dataset.merged.left_out))
        for stage, dropped in sources:
            for reason, rows in dropped.items():
                if reason not in {"beyond_budget", "over_budget"}:
                    table.setdefault((stage, reason), [0] * len(datasets))[place] += rows
    order = ("ingest", "generate", "tokenize", "merge")
    return [
        (stage, reason, REASONS.get(reason, ""), table[stage, reason])
        for stage, reason in sorted(table, key=lambda key: (order.index(key[0]), key[1]))
    ]


def held_out_note(suite: SuiteRun, bench: Bench) -> str:
    """Which prompts the figures belong to; without that a figure means little."""
    size = f"{words.plural(bench.prompts, 'prompt')}, {bench.tokens:,} completion tokens"
    if suite.options.dataset is None:
        return (
            f"Test split of this run: {size}. Chosen by the hash of the prompt; no drafter saw any answer to them, "
            "but they come from the same sources as the training data. Prompts of other kinds usually score lower."
        )
    return (
        f"External suite {suite.options.dataset}: {size}. Training rows that share a prompt or a long run of words "
        "with it were left out."
    )


def chosen_config(run: Run) -> str:
    """The config without what stands at its default."""
    values = run.config.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def hashes(run: Run) -> list[tuple[str, str]]:
    """What the figures were made of, by content."""
    found = []
    if run.card:
        found += [
            ("target weights", run.card.target),
            ("tokenizer", run.card.tokenizer),
            ("template", run.card.template),
        ]
    found += [(f"merged/{manifest.file}", manifest.sha256) for manifest in run.index.manifests]
    for drafter in run.drafters:
        found += [(f"drafters/{drafter.name}/{m.file}", m.sha256) for m in drafter.weights.manifests]
        found += [(f"export/{drafter.name}/sglang/{m.file}", m.sha256) for m in drafter.export.manifests]
    return found
