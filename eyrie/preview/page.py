"""The page of the preview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, FileSystemLoader
from markupsafe import Markup

from eyrie.config import Config
from eyrie.preview.pieces import Piece, visible
from eyrie.preview.rows import Shown
from eyrie.report import charts, page
from eyrie.report.collect import DatasetRun
from eyrie.report.figures import Merged

HERE = Path(__file__).parent


def render_preview(
    config: Config,
    datasets: Sequence[DatasetRun],
    merged: Merged | None,
    rows: Mapping[str, Sequence[Shown]],
    seed: int,
) -> str:
    """The HTML. Everything that a row holds is escaped, and what cannot be seen in it is named."""
    made = page.Page()
    templates = page.environment()
    templates.loader = ChoiceLoader([FileSystemLoader(HERE), FileSystemLoader(page.HERE)])
    style = "".join((folder / name).read_text(encoding="utf-8") for folder, name in
                    ((page.HERE, "page.css"), (HERE, "preview.css")))  # fmt: skip
    body = templates.get_template("preview.html.jinja").render(
        config=config,
        datasets=datasets,
        merged=merged,
        rows=rows,
        seed=seed,
        tokens=tokens,
        reasons=page.drop_reasons(datasets),
        names=[dataset.name for dataset in datasets],
        chart=made.chart,
        charts=charts,
        style=Markup(style),
    )
    return made.finished(body)


def tokens(row: Shown) -> Markup:
    """A row's pieces as HTML."""
    return Markup("").join(_html(piece, row.outside) for piece in row.pieces)


def _html(piece: Piece, outside: frozenset[int]) -> Markup:
    if piece.kind == "answer":
        return Markup('<span class="edge">answer, {} tokens</span>').format(f"{int(piece.text):,}")
    if piece.kind == "gap":
        return Markup('<span class="gap">{} tokens not shown</span>').format(f"{int(piece.text):,}")
    text = visible(piece.text)
    if not piece.supervised:
        return Markup("<kbd>{}</kbd>").format(text) if piece.kind == "special" else text
    unknown = any(id in outside for id in piece.ids)
    kind = "special " * (piece.kind == "special") + "outside" * unknown
    title = f"position {piece.start}, id {' '.join(map(str, piece.ids))}" + ", not in the draft vocabulary" * unknown
    return Markup('<b{} title="{}">{}</b>').format(
        Markup(' class="{}"').format(kind.strip()) if kind else "", title, text
    )
