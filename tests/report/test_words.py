"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.6, "1K"), (1000, "1K"), (12_345, "12.3K"), (156_240, "156K"), (999_600, "1M"),
     (1_250_000, "1.25M"), (2.5e9, "2.5B"), (None, words.NONE)],
)  # fmt: skip
def test_short(value: float | None, text: str) -> None:
    assert words.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (93_400_000, "93.4 MB"), (999_900_000, "1 GB"), (4.59e12, "4.59 TB"),
     (5.2e15, "5,200 TB"), (None, words.NONE)],
)  # fmt: skip
def test_size(value: float | None, text: str) -> None:
    assert words.size(value) == text


def test_the_rest() -> None:
    assert words.count(1234.4) == "1,234"
    assert words.times(1.3214) == "1.32\N{MULTIPLICATION SIGN}"
    assert words.signed(-0.351) == "\N{MINUS SIGN}0.35"
    assert words.signed(0.351) == "+0.35"
    assert words.share(0.8741) == "87.4%"
    assert words.plural(1, "row") == "1 row"
    assert words.plural(1200, "row") == "1,200 rows"
    assert words.reason("cross_dataset_duplicate") == "cross dataset duplicate"


@given(st.floats(min_value=0, max_value=1e14))
def test_short_is_within_half_a_percent(value: float) -> None:
    text = words.short(value)
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1])
    read = float(text[:-1]) * scale if scale else float(text)
    assert "e" not in text
    assert abs(read - value) <= max(0.5, 0.006 * value)
