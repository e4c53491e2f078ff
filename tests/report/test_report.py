"""The page and STATUS.md: their numbers are the inputs', they need nothing else, and nothing in them can break out."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_run import FakeRun, bench_figures

from eyrie.report import charts, write_report
from eyrie.report.collect import Point, collect
from eyrie.report.figures import Bench

TIMES = "\N{MULTIPLICATION SIGN}"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|\"'`&amp;"


class Outline(HTMLParser):
    """Tags with attributes, and the visible text; script and style are kept apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(page)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in {"script", "style"}:
            self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self.inside:
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif not self.inside:
            self.words.append(data)

    @property
    def figures(self) -> list[dict[str, Any]]:
        return json.loads(next(text for text in self.scripts if text.startswith("[{")))


def written(fake: FakeRun, name: str = "out") -> tuple[str, str]:
    page, status = fake.root / f"{name}.html", fake.root / f"{name}.md"
    write_report(fake.raw, fake.folder, page, status)
    return page.read_text(encoding="utf-8"), status.read_text(encoding="utf-8")


def traces(figures: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [trace for figure in figures for trace in figure["data"] if trace.get("name") == name]


def test_numbers_on_the_page_are_the_inputs(fake_run: FakeRun) -> None:
    page, status = written(fake_run)
    outline, bench = Outline(page), bench_figures()
    for text in (
        bench["verdict"]["sentence"], "1.86", f"1.37{TIMES}", "1.34 to 1.40", "+0.39", "48.4%", "25.0%", f"1.62{TIMES}",
        "5 of 412 positions", "0.061 apart", "8,192", "91.3%", "812 CPU s", "Intel(R) Xeon(R) Processor @ 2.60GHz",
        "49,152", "24,122", "32 prompts, 3,934 completion tokens",
    ):  # fmt: skip
        assert text in outline.text, text
    figures = outline.figures
    by_dataset = [d["acceptance_length"] for d in bench["datasets"]]
    assert traces(figures, "drafter")[0]["x"] == [*by_dataset, round(bench["acceptance_length"], 3)]
    assert traces(figures, "all")[0]["y"] == bench["per_position"]
    run = collect(fake_run.raw, fake_run.folder)
    assert traces(figures, "budget")[0]["x"] == [d.options.token_budget for d in run.datasets]
    parts = ["train", "validation", "test", "left out", "dropped (cut off, too long)"]
    stacked = [trace for part in parts for trace in traces(figures, part) if trace.get("orientation") == "h"]
    for place, dataset in enumerate(run.datasets):
        total = sum(trace["x"][place] for trace in stacked)
        assert abs(total - dataset.completion_tokens) <= 3, (
            "the stack is all completion tokens (splits are rounded here)"
        )
    assert f"prompt lookup {bench['ngram_acceptance_length']:.2f}" in status
    assert f"| eagle3 | held-out | code | 8 | 2.21 | 1.69 | 1.62{TIMES} |" in status


def test_the_page_needs_nothing_else(fake_run: FakeRun) -> None:
    page, _ = written(fake_run)
    outline = Outline(page)
    for tag, attributes in outline.tags:
        for name in ("src", "href", "srcset", "action", "poster", "data", "background"):
            value = attributes.get(name)
            assert value is None or value == "data:,", f"<{tag} {name}={value}>"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert sum("plotly.js v" in script for script in outline.scripts) == 1, "the library stands inside, once"
    assert len(outline.figures) == sum(attributes.get("class") == "chart" for _, attributes in outline.tags)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path).everything()
    figures = bench_figures()
    figures["datasets"][0]["name"] = HOSTILE
    figures["sample_trace"]["prompt"] = HOSTILE
    figures["sample_trace"]["steps"][0] |= {"bonus": HOSTILE, "refused": HOSTILE}
    figures["verdict"]["sentence"] = HOSTILE
    figures["machine"]["cpu"] = HOSTILE
    fake.bench("eagle3", "held-out", **figures)
    page, status = written(fake)
    outline = Outline(page)
    assert sum(tag == "script" for tag, _ in outline.tags) == 3
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert HOSTILE in outline.text
    assert HOSTILE in [entry.label for entry in charts.legend(charts.survival(Bench.model_validate(figures)))]
    label = traces(outline.figures, html.escape(HOSTILE, quote=False))
    assert label, "in a chart the name is escaped once more, because plotly reads HTML"
    assert HOSTILE.replace("|", "\\|") in status, "a table cell in Markdown stays one cell"


def test_what_the_merge_warns_of_is_said_before_all_else_of_the_data(fake_run: FakeRun) -> None:
    summary = fake_run.folder / "merged" / "summary.json"
    figures = json.loads(summary.read_text())
    figures["warnings"] = ["dataset chat brings 64% of the weighted training tokens"]
    figures["datasets"]["chat"] |= {"share": 0.64, "over_share": True}
    figures["draft_vocabulary"]["kept_from"] = "earlier/model.safetensors"
    summary.write_text(json.dumps(figures))
    page, status = written(fake_run)
    text = Outline(page).text
    assert "Dataset chat brings 64% of the weighted training tokens." in text
    assert "* Dataset chat brings 64% of the weighted training tokens." in status
    assert text.count("over twice its even share") == 1
    assert "It was kept from earlier/model.safetensors." in text
    assert "204 at 50%" in text
    assert "8.1%" in text
    assert "77.4%" in text


def test_without_a_benchmark_the_page_says_so(fake_run: FakeRun) -> None:
    (fake_run.folder / "bench" / "eagle3" / "held-out.json").unlink()
    page, status = written(fake_run)
    text = Outline(page).text
    assert "Not measured yet: no benchmark has run" in text
    assert "snakemake results/demo-135m/bench/eagle3/held-out.json" in text
    assert "1 of 1 benchmark" in text
    assert "Verdict: not measured yet." in status


def test_half_a_run_is_reported(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path)
    fake.shard("code", "s0000")
    page, status = written(fake)
    text = Outline(page).text
    assert "Not trained yet." in text
    assert "12,061" in text
    assert "9 of 10 response shards" in text
    assert "9 of 10 response shards" in status


def test_equal_inputs_give_equal_bytes(fake_run: FakeRun) -> None:
    assert written(fake_run, "one") == written(fake_run, "two")


def test_a_config_file_and_its_content_are_the_same(fake_run: FakeRun) -> None:
    page, status = written(fake_run)
    resolved = fake_run.folder / "config.resolved.yaml"
    resolved.write_text(yaml.safe_dump(fake_run.config.model_dump(mode="json"), sort_keys=False))
    write_report(resolved, fake_run.folder, fake_run.root / "x.html", fake_run.root / "x.md")
    assert (fake_run.root / "x.html").read_text(encoding="utf-8") == page
    assert (fake_run.root / "x.md").read_text(encoding="utf-8") == status


def test_several_drafters_and_suites_are_compared(tmp_path: Path) -> None:
    raw = FakeRun(tmp_path / "a").raw
    raw |= {"drafters": {"deep": {"ttt_steps": 5}, "small": {"ttt_steps": 1}}}
    raw |= {"bench": {"suites": {"held-out": {}, "other": {"dataset": "human-eval"}}}}
    fake = FakeRun(tmp_path / "b", raw).everything()
    page, status = written(fake)
    text = Outline(page).text
    assert "Drafters compared" in text
    for drafter in ("deep", "small"):
        for suite in ("held-out", "other"):
            assert f"{drafter} on {suite}" in text
    assert "External suite human-eval" in text
    assert "3 tokens are drafted, 1 were rehearsed" in status


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lossless_float32": False, "differing_prompts": ["x:1", "y:1"]}, "2 prompts came out otherwise"),
        ({"verdict": {"deploy": False, "sentence": "Do not deploy."}}, "not worth deploying yet"),
        (
            {"acceptance_length": 1.01, "verdict": {"deploy": False, "sentence": "Wiring fault."}},
            "no draft is accepted",
        ),
        ({"draft_tokens": 3, "break_even": 1.7}, "below break-even on writing"),
    ],
)
def test_next_steps_follow_from_the_figures(fake_run: FakeRun, change: dict[str, Any], says: str) -> None:
    fake_run.bench("eagle3", "held-out", **change)
    page, status = written(fake_run)
    assert says in Outline(page).text
    assert says in status


def test_a_wrong_output_is_never_shown_as_good(fake_run: FakeRun) -> None:
    fake_run.bench("eagle3", "held-out", lossless_float32=False, differing_prompts=["x:1"])
    page, _ = written(fake_run)
    outline = Outline(page)
    assert "differs on 1 of 32 prompts" in outline.text
    assert any(attributes.get("class") == "verdict no" for _, attributes in outline.tags)


def test_a_long_training_curve_is_averaged() -> None:
    points = [Point(i, 10 * i, float(i), [0.5], None) for i in range(1, 1001)]
    seen, loss, width = charts.averaged(points)
    assert width == 5
    assert len(seen) == len(loss) == 200
    assert loss[0] == 3.0
    assert seen[-1] == 10_000


def test_no_page_depends_on_the_machine(fake_run: FakeRun) -> None:
    page, status = written(fake_run)
    assert str(fake_run.root) not in page
    assert str(fake_run.root) not in status
    assert not re.search(r"\b20\d\d-\d\d-\d\dT?\d\d:\d\d", Outline(page).text), "no time of writing"


def test_figures_of_the_contract_are_enough() -> None:
    figures = bench_figures()
    for name in (
        "ngram_speedup",
        "near_ties",
        "machine",
        "sample_trace",
        "per_request",
        "max_tokens",
        "step_cost_ratio",
    ):
        del figures[name]
    assert Bench.model_validate(figures).gain == pytest.approx(0.3922)
