"""Shared prompts and shared runs of words, against a plain Python count."""

from __future__ import annotations

import re

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.overlap import Prompts, ngrams

WORDS = st.lists(st.sampled_from(["a", "B", "cat", "x1"]), max_size=12).map(" ".join)


def runs(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


@settings(deadline=None)
@given(st.lists(WORDS, max_size=6), st.lists(WORDS, max_size=4), st.integers(1, 5))
def test_shared_rows_are_those_that_share_a_run_of_words(texts: list[str], held: list[str], size: int) -> None:
    rows = pl.DataFrame({"prompt_key": ["-"] * len(texts), "prompt_text": texts}, schema={"prompt_key": pl.String, "prompt_text": pl.String})  # fmt: skip  # noqa: E501
    found = Prompts(["?"] * len(held), held, size).shared_with(rows).to_list()
    forbidden = set().union(*(runs(text, size) for text in held))
    assert found == [bool(runs(text, size) & forbidden) for text in texts]
    counted = ngrams(pl.Series(texts, dtype=pl.String), size).group_by("row").len()
    assert dict(counted.iter_rows()) == {
        i: n for i, text in enumerate(texts) if (n := max(0, len(re.findall(r"\w+", text)) - size + 1))
    }


def test_equal_keys_are_shared_however_short_the_text() -> None:
    rows = pl.DataFrame({"prompt_key": ["k", "l"], "prompt_text": ["hi", "hi"]})
    assert Prompts(["k"], ["hi"], 13).shared_with(rows).to_list() == [True, False]


def test_the_order_of_words_counts() -> None:
    rows = pl.DataFrame({"prompt_key": ["", ""], "prompt_text": ["one, TWO\nthree!", "three two one"]})
    assert Prompts([], ["one two three"], 3).shared_with(rows).to_list() == [True, False]
