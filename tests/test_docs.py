"""The documents name what exists: files, options, stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyrie.config import Config
from eyrie.config.reference import options
from eyrie.recipes import REVISIONS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
SECTIONS = "|".join(Config.model_fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    known = {path.replace("<name>", "*") for path, _ in options(Config)}
    sections = {path.rsplit(".", depth)[0] for path in known for depth in range(1, path.count(".") + 1)}
    for named in re.findall(rf"`((?:{SECTIONS})\.[a-z_.<>*]+)`", page.read_text(encoding="utf-8")):
        path = re.sub(r"<\w+>", "*", named)
        assert path in known | sections, named


def test_every_stage_has_a_page_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for stage in REVISIONS.keys() - {"convert"}:  # the conversion stands on the target's page
        assert f"({stage}.md)" in index
        text = (ROOT / "docs" / f"{stage}.md").read_text(encoding="utf-8")
        assert "**Makes**" in text
