"""The charts, as plotly figures.

Each takes figures and draws them; nothing is computed here but sums. Ink (text, axes, grids) is left to the page's
style sheet, so that the same figure serves a light and a dark page; the colours of data are mid-tones that hold on
both.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from eyrie.report.collect import DatasetRun, Point
from eyrie.report.figures import SPLITS, Bench, Lengths

BLUE, TEAL, OCHRE, RED, VIOLET, OLIVE, SKY, BROWN = (
    "#3d7fd6", "#2a9d8f", "#d08a2e", "#cf5766", "#9a68c4", "#7f8f3c", "#5aa9c9", "#a07a5c",
)  # fmt: skip
GREY, PALE = "#8b929c", "#b4bac3"
CATEGORICAL = (TEAL, OCHRE, VIOLET, RED, OLIVE, SKY, BROWN)
STEPS = (BLUE, TEAL, OCHRE, RED, VIOLET, OLIVE, SKY, BROWN)
DRAFTER, NGRAM, PLAIN = BLUE, OCHRE, GREY
SPLIT_COLOUR = {"train": BLUE, "validation": SKY, "test": TEAL}
MOST_POINTS = 240  # of a training curve; more are averaged

BAR, FRAME = 34, 62  # pixels per horizontal bar, and of what stands around them


def escaped(text: str) -> str:
    """Plotly reads a subset of HTML in every text, so names are escaped like anywhere else."""
    return html.escape(text, quote=False)


def tokens_against_budget(datasets: Sequence[DatasetRun]) -> go.Figure:
    """Completion tokens of each dataset, stacked by what became of them, with its budget as a mark."""
    names = [escaped(dataset.name) for dataset in datasets]
    parts: dict[str, tuple[str, list[int]]] = {}
    for split in SPLITS:
        tokens = [d.merged.splits[split].completion_tokens if d.merged else 0 for d in datasets]
        parts[split] = (SPLIT_COLOUR[split], tokens)
    unmerged = [0 if d.merged else d.completion_tokens - d.truncated_tokens for d in datasets]
    parts["not merged yet"] = (PALE, unmerged)
    parts["left out"] = (OCHRE, [d.left_out_tokens for d in datasets])
    parts["dropped (cut off, too long)"] = (PALE, [d.truncated_tokens for d in datasets])
    figure = _figure(FRAME + BAR * len(names))
    for label, (colour, tokens) in parts.items():
        if any(tokens):
            figure.add_bar(
                y=names, x=tokens, name=label, orientation="h", marker={"color": colour, "line": {"width": 0}},
                hovertemplate="%{y}: %{x:,} tokens<extra>" + label + "</extra>",
            )  # fmt: skip
    figure.add_scatter(
        y=names, x=[d.options.token_budget for d in datasets], name="budget", mode="markers",
        marker={"symbol": "line-ns", "size": BAR - 10, "color": RED, "line": {"width": 2.5, "color": RED}},
        hovertemplate="%{y}: budget %{x:,} tokens<extra></extra>",
    )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="completion tokens", rangemode="tozero")
    return figure


def row_lengths(lengths: Lengths) -> go.Figure:
    """Rows of the index by length, prompt included."""
    step = lengths.step
    edges = range(0, max(lengths.histogram, default=0) + step, step)
    figure = _figure(260)
    figure.add_bar(
        x=[edge + step / 2 for edge in edges], y=[lengths.histogram.get(edge, 0) for edge in edges], width=step * 0.94,
        marker={"color": BLUE}, customdata=[f"{edge} to {edge + step - 1}" for edge in edges],
        hovertemplate="%{customdata} tokens: %{y:,} rows<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(
        title_text="tokens per row, prompt included", range=[0, edges[-1] + step if edges else step], dtick=step
    )
    if len(edges) > 12:
        figure.update_xaxes(dtick=None, nticks=8)
    figure.update_yaxes(title_text="rows", rangemode="tozero")
    return figure


def training_shares(datasets: Sequence[DatasetRun]) -> go.Figure:
    """Share of the weighted training tokens by dataset, with an even share and what is too much of it."""
    shown = [(escaped(d.name), d.merged) for d in datasets if d.merged]
    figure = _figure(FRAME + BAR * len(shown))
    figure.add_bar(
        y=[name for name, _ in shown], x=[_rounded(merged.share) for _, merged in shown], orientation="h",
        marker={"color": [RED if merged.over_share else BLUE for _, merged in shown]},
        hovertemplate="%{y}: %{x:.1%} of the training tokens<extra></extra>",
    )  # fmt: skip
    even = 1 / max(1, len(shown))
    for factor in (1, 2):
        if factor * even < 1:
            _mark_x(figure, factor * even)
    figure.update_layout(bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    most = max((merged.share for _, merged in shown), default=0.0)
    figure.update_xaxes(
        title_text="training tokens times weight", tickformat=".0%", range=[0, max(most, 2 * even) * 1.08]
    )
    return figure


def left_out(reasons: Sequence[tuple[str, str, str, list[int]]], names: Sequence[str]) -> go.Figure:
    """Rows left out by stage and reason, stacked by dataset."""
    labels = [f"{stage}: {name.replace('_', ' ')}" for stage, name, _, _ in reasons]
    figure = _figure(FRAME + BAR * len(labels))
    for place, name in enumerate(names):
        rows = [counts[place] for _, _, _, counts in reasons]
        if any(rows):
            figure.add_bar(
                y=labels, x=rows, name=escaped(name), orientation="h",
                marker={"color": CATEGORICAL[place % len(CATEGORICAL)], "line": {"width": 0}},
                hovertemplate="%{y}: %{x:,} rows<extra>" + escaped(name) + "</extra>",
            )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="rows left out", rangemode="tozero")
    return figure


def loss_curve(train: Sequence[Point], validation: Sequence[Point]) -> go.Figure:
    """Loss over completion tokens visited."""
    figure = _figure(280)
    x, y, width = averaged(train)
    figure.add_scatter(
        x=x, y=y, name="train" + (f" (mean of {width} steps)" if width > 1 else ""), mode="lines",
        line={"color": PALE, "width": 1.5}, hovertemplate="%{x:,} tokens: %{y:.3f}<extra>train</extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=[p.tokens_seen for p in validation], y=[_rounded(p.loss) for p in validation], name="validation",
        mode="lines+markers", line={"color": BLUE, "width": 2}, marker={"size": 5},
        hovertemplate="%{x:,} tokens: %{y:.3f}<extra>validation</extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="completion tokens visited", rangemode="tozero")
    figure.update_yaxes(title_text="loss")
    return figure


def accuracy_by_step(validation: Sequence[Point]) -> go.Figure:
    """Validation top-1 agreement with the target, by TTT step."""
    figure = _figure(280)
    for k in range(len(validation[0].accuracy) if validation else 0):
        kept = [(p.tokens_seen, value) for p in validation if (value := p.accuracy[k]) is not None]
        figure.add_scatter(
            x=[seen for seen, _ in kept], y=[_rounded(value) for _, value in kept], name=f"step {k + 1}",
            mode="lines+markers", line={"color": STEPS[k % len(STEPS)], "width": 2}, marker={"size": 5},
            hovertemplate=f"%{{x:,}} tokens: %{{y:.1%}}<extra>step {k + 1}</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="completion tokens visited", rangemode="tozero")
    figure.update_yaxes(title_text="right first guesses", tickformat=".0%", rangemode="tozero")
    return figure


def simulated_acceptance(validation: Sequence[Point], best: Point | None) -> go.Figure:
    """Simulated acceptance length over training, the published weights marked."""
    scored = [(p.tokens_seen, length) for p in validation if (length := p.acceptance_length) is not None]
    figure = _figure(260)
    figure.add_scatter(
        x=[seen for seen, _ in scored], y=[_rounded(length) for _, length in scored], mode="lines+markers",
        line={"color": BLUE, "width": 2}, marker={"size": 5}, hovertemplate="%{x:,} tokens: %{y:.3f}<extra></extra>",
    )  # fmt: skip
    if best is not None and best.acceptance_length is not None:
        figure.add_scatter(
            x=[best.tokens_seen], y=[_rounded(best.acceptance_length)], mode="markers+text",
            marker={"size": 11, "color": "rgba(0,0,0,0)", "line": {"color": RED, "width": 2}},
            text=[f"{best.acceptance_length:.2f} published"], textposition="top left", cliponaxis=False,
            hovertemplate="published: step " + f"{best.step:,}" + "<extra></extra>",
        )  # fmt: skip
    figure.update_layout(margin_t=26)
    figure.update_xaxes(title_text="completion tokens visited", rangemode="tozero")
    figure.update_yaxes(title_text="simulated acceptance length")
    return figure


def acceptance_by_dataset(bench: Bench) -> go.Figure:
    """Acceptance length of drafter and prompt lookup, per dataset, from 1 (plain decoding) on."""
    names = [*(escaped(d.name) for d in bench.datasets), "<b>all</b>"]
    drafter = [*(d.acceptance_length for d in bench.datasets), bench.acceptance_length]
    lookup = [*(d.ngram_acceptance_length for d in bench.datasets), bench.ngram_acceptance_length]
    figure = _figure(FRAME + 40 + BAR * len(names))
    for name, low, high in zip(names, lookup, drafter, strict=True):
        figure.add_scatter(
            x=[low, high], y=[name, name], mode="lines", line={"color": PALE, "width": 2},
            hoverinfo="skip",
        )  # fmt: skip
    for label, colour, values in (("prompt lookup", NGRAM, lookup), ("drafter", DRAFTER, drafter)):
        figure.add_scatter(
            x=[round(value, 3) for value in values], y=names, name=label, mode="markers",
            marker={"size": 12, "color": colour},
            hovertemplate="%{y}: %{x:.2f} tokens per target forward<extra>" + label + "</extra>",
        )  # fmt: skip
    most = max(*drafter, *lookup, bench.break_even)
    edge = most + 0.12 * (most - 0.9)
    figure.update_xaxes(title_text="acceptance length, tokens per target forward", range=[0.96, edge])
    figure.update_yaxes(range=[len(names) + 0.1, -0.5])  # the first on top, and room for a label under the last
    _mark_x(figure, bench.break_even)
    left = bench.break_even > (0.96 + edge) / 2  # the label stands on the side that has room
    figure.add_annotation(
        x=bench.break_even, y=0, yref="paper", yanchor="bottom", text=f"break-even {bench.break_even:.2f}",
        showarrow=False, xanchor="right" if left else "left", xshift=-5 if left else 5,
    )  # fmt: skip
    return figure


def survival(bench: Bench) -> go.Figure:
    """Share of verifies in which the first i drafts were all accepted, per dataset and over all."""
    figure = _figure(280)
    positions = [f"draft {i}" for i in range(1, bench.draft_tokens + 1)]
    for k, dataset in enumerate(bench.datasets):
        figure.add_scatter(
            x=positions, y=[_rounded(value) for value in dataset.per_position], name=escaped(dataset.name),
            mode="lines+markers", line={"color": CATEGORICAL[k % len(CATEGORICAL)], "width": 1.75}, marker={"size": 6},
            hovertemplate="%{x}: %{y:.1%}<extra>" + escaped(dataset.name) + "</extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=positions, y=[_rounded(value) for value in bench.per_position], name="all", mode="lines+markers",
        line={"color": BLUE, "width": 4}, marker={"size": 9}, hovertemplate="%{x}: %{y:.1%}<extra>all</extra>",
    )  # fmt: skip
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(title_text="accepted up to here", tickformat=".0%", rangemode="tozero")
    return figure


def speed(bench: Bench) -> go.Figure:
    """Tokens per second by mode: the median, and the whole spread of the repeats."""
    bars = (
        ("plain decoding", PLAIN, bench.plain_tokens_per_s),
        ("prompt lookup", NGRAM, bench.ngram_tokens_per_s),
        ("drafter", DRAFTER, bench.speculative_tokens_per_s),
    )
    figure = _figure(FRAME + (BAR + 6) * len(bars))
    for label, colour, spread in bars:
        figure.add_bar(
            y=[label], x=[spread.median], orientation="h", marker={"color": colour},
            error_x={
                "type": "data", "symmetric": False, "array": [_rounded(spread.high - spread.median)],
                "arrayminus": [_rounded(spread.median - spread.low)], "color": GREY, "thickness": 1.5, "width": 5,
            },
            hovertemplate=f"%{{y}}: %{{x:.1f}} ({spread.low:.1f} to {spread.high:.1f}) tokens/s<extra></extra>",
        )  # fmt: skip
        figure.add_annotation(
            x=spread.high, y=label, text=f"{spread.median:.1f}", showarrow=False, xanchor="left", xshift=10,
            font={"size": 13},
        )  # fmt: skip
    figure.update_layout(bargap=0.4)
    most = max(spread.high for _, _, spread in bars)
    figure.update_xaxes(title_text="tokens per second, one request", range=[0, 1.14 * most])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    _mark_x(figure, bench.plain_tokens_per_s.median)
    return figure


def averaged(points: Sequence[Point]) -> tuple[list[int], list[float], int]:
    """Tokens seen, mean loss, and how many steps a mean covers, so that at most :data:`MOST_POINTS` are drawn."""
    width = max(1, -(-len(points) // MOST_POINTS))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    losses = [_rounded(sum(p.loss for p in group) / len(group)) for group in groups]
    return [group[-1].tokens_seen for group in groups], losses, width


@dataclass(frozen=True)
class Entry:
    """One entry of a legend, which the page draws itself: text that wraps on a phone and cannot cover a plot.

    ``shape`` is ``square`` (bars), ``line``, ``dot`` or ``tick``.
    """

    label: str
    colour: str
    shape: str


def legend(figure: go.Figure) -> list[Entry]:
    """Entries of all named traces, if there are at least two."""
    found = []
    for trace in figure.data:
        if trace.name is None:
            continue
        if trace.type == "bar":
            shape = "square"
        elif "lines" in trace.mode:
            shape = "line"
        else:
            shape = "tick" if trace.marker.symbol == "line-ns" else "dot"
        colour = trace.line.color if shape == "line" else trace.marker.color
        found.append(Entry(html.unescape(trace.name), colour, shape))
    return found if len(found) > 1 else []


def to_json(figure: go.Figure) -> dict[str, Any]:
    """Data and layout as plain values."""
    plain = figure.to_plotly_json()
    return {"data": list(plain["data"]), "layout": plain["layout"]}


def _figure(height: int) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(), height=height, autosize=True, showlegend=False,
        margin={"l": 8, "r": 12, "t": 10, "b": 8}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 12.5}, hovermode="closest", hoverlabel={"font": {"size": 12.5}},
    )  # fmt: skip
    axis: dict[str, Any] = {"gridcolor": PALE, "zeroline": False, "automargin": True, "fixedrange": True}
    figure.update_xaxes(**axis, title={"standoff": 8, "font": {"size": 12}})
    figure.update_yaxes(**axis, title={"standoff": 8, "font": {"size": 12}}, ticklabelstandoff=5)
    return figure


def _mark_x(figure: go.Figure, x: float) -> None:
    """A dotted vertical line behind the data."""
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="paper", layer="below", line=line)


def _rounded(value: float) -> float:
    return round(value, 4)
