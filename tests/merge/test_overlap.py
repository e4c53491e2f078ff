"""Shared runs of words, against a plain Python count."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.conversation import plain_text
from eyrie.merge.overlap import Runs, rolling, words_of

WORDS = st.lists(st.sampled_from(["a", "B", "cat", "x1", "Ünder", "中文", "かな", "ﬁn"]), max_size=12).map(" ".join)
TEXTS = st.lists(WORDS | st.text(alphabet="ab 中,.\n\u0301", max_size=12), max_size=6)


def words(text: str) -> list[str]:
    """What counts as a word, spelled out: letters, digits, marks; a Han or kana character is one by itself."""
    found, open_word = [], ""
    for character in unicodedata.normalize("NFKC", text).lower() + " ":
        alone = any(script in unicodedata.name(character, "") for script in ("CJK UNIFIED", "HIRAGANA", "KATAKANA"))
        inside = re.match(r"\w", character) or unicodedata.category(character).startswith("M")
        if inside and not alone:
            open_word += character
            continue
        if open_word:
            found.append(open_word)
        open_word = ""
        if alone:
            found.append(character)
    return found


def runs(text: str, size: int) -> set[tuple[str, ...]]:
    listed = words(text)
    return {tuple(listed[i : i + size]) for i in range(len(listed) - size + 1)}


@settings(deadline=None, max_examples=150)
@given(TEXTS, TEXTS, st.integers(1, 5))
def test_shared_rows_are_those_that_share_a_run_of_words(texts: list[str], held: list[str], size: int) -> None:
    row, run, *_ = words_of(pl.Series(texts, dtype=pl.String), size, size)
    hits = row[Runs([words_of(pl.Series(held, dtype=pl.String), size, size).run]).among(run)]
    forbidden = set().union(*(runs(text, size) for text in held))
    assert set(hits.tolist()) == {i for i, text in enumerate(texts) if runs(text, size) & forbidden}
    counted = np.bincount(row, minlength=len(texts)).tolist()
    assert counted == [max(0, len(words(text)) - size + 1) for text in texts]


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 6), st.integers(1, 6))
def test_short_texts_are_compared_as_they_are(texts: list[str], least: int, size: int) -> None:
    found = words_of(pl.Series(texts, dtype=pl.String), size, least)
    places, hashes = found.short_row.tolist(), found.short.tolist()
    assert sorted(places) == [i for i, text in enumerate(texts) if least <= len(words(text)) < size]
    for i, one in zip(places, hashes, strict=True):
        for j, other in zip(places, hashes, strict=True):
            assert (one == other) == (plain_text(texts[i]).lstrip(".") == plain_text(texts[j]).lstrip("."))


def test_the_order_of_words_counts() -> None:
    row, run, *_ = words_of(pl.Series(["one, TWO\nthree!", "three two one"]), 3, 3)
    held = Runs([words_of(pl.Series(["one two three"]), 3, 3).run])
    assert dict(zip(row.tolist(), held.among(run).tolist(), strict=True)) == {0: True, 1: False}


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.integers(1, 40))
def test_rolling_hashes_are_polynomials_of_their_window(values: list[int], size: int) -> None:
    size = min(size, len(values))
    found = rolling(np.array(values, np.uint64), size).tolist()
    for i, value in enumerate(found):
        expected = 0
        for word in values[i : i + size]:
            expected = (expected * 6364136223846793005 + word) % 2**64
        assert value == expected
    assert len(found) == len(values) - size + 1


SETS = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 50), max_size=60)


@given(SETS, SETS)
def test_a_set_of_runs_holds_what_was_put_in_and_nothing_else(inside: list[int], asked: list[int]) -> None:
    middle = len(inside) // 2
    held = Runs([np.array(part, np.uint64) for part in (inside[:middle], inside[middle:])])
    assert len(held) == len(set(inside))
    everything = np.array([*inside, *asked], np.uint64)
    assert held.among(everything).tolist() == [value in set(inside) for value in everything.tolist()]
