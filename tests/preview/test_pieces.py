"""Rows as pieces: nothing lost, nothing coloured that is no label, nothing hidden."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie.preview import pieces as module
from eyrie.preview.pieces import Piece, pieces, visible

SPECIALS = {0, 1, 2}


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def shown(tokenizer: Any, ids: list[int], spans: list[tuple[int, int]]) -> list[Piece]:
    return list(pieces(tokenizer, ids, spans, SPECIALS))


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Any ids (broken characters and control tokens among them) with up to three spans that may touch."""
    ids = draw(st.lists(st.integers(0, 599), min_size=1, max_size=60))
    edges = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return ids, [(start, end) for start, end in pairs if start < end]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=rows())
def test_every_token_is_shown_once_and_labels_alone_are_supervised(
    tokenizer: Any, row: tuple[list[int], list[tuple[int, int]]]
) -> None:
    ids, spans = row
    found = shown(tokenizer, ids, spans)
    place = 0
    for piece in found:
        assert piece.start == place
        assert piece.ids == tuple(ids[place : place + len(piece.ids)])
        inside = {any(start <= i < end for start, end in spans) for i in range(place, place + len(piece.ids))}
        assert inside <= {piece.supervised}, "no piece reaches across a boundary"
        assert (piece.kind == "special") == (len(piece.ids) == 1 and piece.ids[0] in SPECIALS)
        place += len(piece.ids)
    assert place == len(ids)
    assert [(p.start, p.text) for p in found if p.kind == "answer"] == [(a, str(b - a)) for a, b in spans]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="ab c\n\u00e9\u4e2d\U0001f426\u200d\U0001f525", max_size=30), cut=st.integers(0, 30))
def test_pieces_spell_the_text(tokenizer: Any, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = shown(tokenizer, ids, [(min(cut, len(ids)), len(ids))] if cut < len(ids) else [])
    characters = all("\ufffd" not in piece.text for piece in found)
    if characters:  # a boundary in the middle of a character shows both halves as broken
        assert "".join(piece.text for piece in found if piece.kind == "text") == text


def test_tokens_of_one_character_stay_together(tokenizer: Any) -> None:
    ids = tokenizer.encode("a\U0001f426b", add_special_tokens=False)
    assert len(ids) == 6
    found = shown(tokenizer, ids, [(0, 6)])[1:]
    assert [(piece.text, len(piece.ids)) for piece in found] == [("a", 1), ("\U0001f426", 4), ("b", 1)]


def test_a_control_token_is_told_from_its_characters(tokenizer: Any) -> None:
    quoted = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert len(quoted) > 1
    found = shown(tokenizer, [*quoted, 2], [])
    assert [(p.kind, p.text) for p in found] == [("text", "<|im_end|>"), ("special", "<|im_end|>")]


def test_the_middle_of_a_long_row_is_left_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTEXT_SHOWN", (3, 4))
    monkeypatch.setattr(module, "ANSWER_SHOWN", (5, 2))
    ids = [50] * 40
    found = shown(tokenizer, ids, [(10, 30)])
    assert [(p.start, p.text) for p in found if p.kind == "gap"] == [(3, "3"), (15, "13"), (33, "3")]
    assert sum(len(p.ids) for p in found) == 40 - 19
    assert sum(len(p.ids) for p in found if p.supervised) == 7
    assert not any(p.kind == "gap" for p in shown(tokenizer, ids[:7], []))


@given(st.text(max_size=60))
def test_what_is_visible_is_all_there_is(text: str) -> None:
    page = str(visible(text))
    assert not re.search(r"<(?!/?i>)", page), "no tag but ours"
    spelled = re.sub(r"<i>U\+([0-9A-F]{4,6})</i>", lambda match: f"&#x{match[1]};", page)
    plain = spelled.replace("\u21b5\n", "\n").replace("\u21e5\t", "\t")
    back = re.sub(r"&#x([0-9A-F]{4,6});", lambda match: chr(int(match[1], 16)), plain)
    named = {"&lt;": "<", "&gt;": ">", "&#34;": '"', "&#39;": "'", "&amp;": "&"}
    back = re.sub("|".join(named), lambda match: named[match[0]], back)
    if "\u21b5" not in text and "\u21e5" not in text:
        assert back == text


def test_signs_that_cannot_be_seen_are_named() -> None:
    assert visible("a\u202eb\x00c\u200bd\ufeff") == (
        "a<i>U+202E</i>b<i>U+0000</i>c<i>U+200B</i>d<i>U+FEFF</i>"
    )  # fmt: skip
    assert visible("\U0001f426\u200d\U0001f525") == "\U0001f426\u200d\U0001f525"
    assert html.unescape(str(visible("<b>&</b>"))) == "<b>&</b>"
