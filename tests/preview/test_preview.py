"""The page: real rows of a small run, chosen the same each time, in which nothing can break out."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from eyrie.conversation import prompt_key
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts
from eyrie.formats.publish import publish, write_json
from eyrie.formats.tokens import write_tokens
from eyrie.merge import merge
from eyrie.preview import write_preview
from eyrie.targets import TargetCard, read_card

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e<!--plotly-->\"'`&amp;"


class Outline(HTMLParser):
    """Tags with attributes, and the text by the element that it stands in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.parts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        self.parts.append((self.inside[-1] if self.inside else "", data))

    @property
    def text(self) -> str:
        return "".join(data for tag, data in self.parts if tag not in {"script", "style"})


class SmallRun:
    """Two merged datasets: one answered, one native."""

    def __init__(self, root: Path, target: Path) -> None:
        self.folder, self.target = root / "results" / "small", target
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        facts: dict[str, Any] = dict.fromkeys(
            ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim"), 8,
        )  # fmt: skip
        card = TargetCard(
            model="m", architecture="a", model_type="t", vocab_size=600, rms_norm_eps=1e-5, rope_theta=1e4,
            max_position_embeddings=64, tied_embeddings=True, dtype="bfloat16", stop_ids=[2], special_ids=[0, 1, 2],
            target="T" * 64, tokenizer="K" * 64, template="C" * 64, **facts,
        )  # fmt: skip
        write_json(self.folder / "target.json", card.model_dump())
        self.config = {
            "run": "small",
            "target": {"model": str(target)},
            "datasets": {
                "asked": {"adapter": "human-eval", "token_budget": 100},
                "told": {"adapter": "chitchat", "kind": "native", "token_budget": 100, "weight": 0.5},
            },
        }
        (self.folder / "config.resolved.yaml").write_text(yaml.safe_dump(self.config))

    def shard(self, dataset: str, answers: list[str], finish: str = "stop") -> None:
        rows = []
        for number, answer in enumerate(answers):
            prompt = [1, *self.tokenizer.encode(f"question {number}", add_special_tokens=False), 2, 1]
            ids = [*prompt, *self.tokenizer.encode(answer, add_special_tokens=False), 2]
            text = f"{dataset} {number}"
            rows.append({
                "row_id": f"{dataset}{number}:1", "conversation": f"{dataset}{number}",
                "prompt_key": prompt_key([{"role": "user", "content": text}]), "turn": 1, "input_ids": ids,
                "spans": [{"start": len(prompt), "end": len(ids)}], "length": len(ids),
                "completion_tokens": len(ids) - len(prompt), "finish_reason": finish, "asked": [text],
            })  # fmt: skip
        path = self.folder / "tokens" / dataset / "s0000.parquet"
        identity = read_card(self.folder / "target.json").identity()
        with publish(path, stage="tokenize", recipe={}, identity=identity) as draft:
            write_tokens(draft.path, rows)
            draft.rows = RowCounts(read=len(rows) + 2, kept=len(rows), dropped={"too_long": 2})

    def merge(self, size: int = 600) -> None:
        recipe = {
            "merge": {"draft_vocab_size": size, "test_fraction": 0.1, "validation_fraction": 0.1}, "caps": {},
            "datasets": [["asked", 1.0], ["told", 0.5]], "suites": {},
        }  # fmt: skip
        tokens = sorted(self.folder.glob("tokens/*/*.parquet"))
        merge(recipe, target=self.folder / "target.json", tokens=tokens, out=self.folder / "merged")

    def page(self, rows: int = 4, seed: int = 0) -> str:
        out = self.folder / "preview.html"
        write_preview(
            {"target": {}}, config=self.folder / "config.resolved.yaml", run_dir=self.folder, model=str(self.target),
            out=out, rows=rows, seed=seed,
        )  # fmt: skip
        return out.read_text(encoding="utf-8")


@pytest.fixture
def small(tmp_path: Path, tiny_target: Path) -> SmallRun:
    run = SmallRun(tmp_path, tiny_target)
    run.shard("asked", [f"The answer is {i}." for i in range(9)])
    run.shard("told", ["yes", "no", "maybe"], finish="native")
    run.merge()
    return run


def rows_of(page: str) -> list[str]:
    return [part.split("</code>")[0] for part in page.split('<article class="row">\n<header><b><code>')[1:]]


def test_rows_stand_with_all_that_is_known_of_them(small: SmallRun) -> None:
    page = small.page()
    outline = Outline(page)
    assert len(rows_of(page)) == 4 + 3
    for text in ("4 of 9 rows, seed 0", "3 of 3 rows", "finish_reason native", "finish_reason stop", "weight 0.50",
                 "asked/s0000, row", "turn 1", "answer, 3 tokens"):  # fmt: skip
        assert text in outline.text, text
    coloured = [data for tag, data in outline.parts if tag == "b"]
    assert "maybe" in "".join(coloured)
    assert "question" not in "".join(coloured), "a prompt is never coloured"
    assert [data for tag, data in outline.parts if tag == "kbd"].count("<|im_end|>") == 7, "one ends each question"
    ends = [dict(attrs) for tag, attrs in outline.tags if tag == "b" and attrs.get("class") == "special"]
    assert len(ends) == 7, "and one, a label, each answer"
    assert all(str(end["title"]).endswith("id 2") for end in ends)


def test_equal_inputs_and_seeds_give_equal_bytes_and_another_seed_other_rows(small: SmallRun) -> None:
    page = small.page()
    assert small.page() == page
    assert rows_of(small.page(seed=1))[:4] != rows_of(page)[:4]


def test_more_rows_move_none_of_those_shown_without_need(small: SmallRun) -> None:
    before = rows_of(small.page())
    small.shard("told", ["yes", "no", "maybe", "perhaps"], finish="native")
    small.merge()
    after = rows_of(small.page())
    assert after[:4] == before[:4], "another dataset's rows stay"
    assert set(before[4:]) < set(after[4:])


def test_tokens_outside_the_draft_vocabulary_are_marked(small: SmallRun) -> None:
    def marked() -> int:
        return sum(tag == "b" and "outside" in (attrs.get("class") or "") for tag, attrs in Outline(small.page()).tags)

    assert marked() == 1, "the page's own key"
    small.merge(size=16)
    assert marked() > 1


def test_hostile_rows_stay_text(small: SmallRun) -> None:
    small.shard("asked", [HOSTILE] * 4)
    small.merge()
    page = small.page()
    outline = Outline(page)
    assert sum(tag == "script" for tag, _ in outline.tags) == 3
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert outline.text.count("<script>alert(1)</script>") == 4
    assert "\u202e" not in page, "a mark that turns the direction of writing is named, not obeyed"
    assert page.count("plotly.js v") == 1


def test_the_page_needs_nothing_else(small: SmallRun) -> None:
    page = small.page()
    outline = Outline(page)
    for tag, attributes in outline.tags:
        for name in ("src", "href", "srcset", "action", "data", "background"):
            value = attributes.get(name)
            assert value is None or value == "data:," or value.startswith("#rows-"), f"<{tag} {name}={value}>"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    figures = json.loads(next(data for tag, data in outline.parts if tag == "script" and data.startswith("[{")))
    assert len(figures) == sum(attributes.get("class") == "chart" for _, attributes in outline.tags) == 3
    bars = {trace.get("name") or "shares": trace for figure in figures for trace in figure["data"]}
    assert bars["asked"]["x"] == [2]
    assert bars["asked"]["y"] == ["tokenize: too long"]


def test_a_shard_that_was_not_merged_is_refused(small: SmallRun) -> None:
    small.shard("told", ["something else"])
    with pytest.raises(EyrieError, match=r"told/s0000\.parquet: is not the shard that was merged; run `snakemake"):
        small.page()
