"""Splits, caps, and who keeps a shared prompt."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import Merge
from eyrie.errors import EyrieError
from eyrie.merge.rows import with_owners, with_splits

NAMES = ("first", "second", "third")

# dataset, conversation, prompt, completion tokens of one row; a conversation has one prompt and one dataset
ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=40)
CAPS = st.dictionaries(st.sampled_from(NAMES), st.integers(9, 60))


def frame(rows: list[tuple[int, int, int]], prompts: int = 5) -> pl.DataFrame:
    listed = [
        {
            "dataset": NAMES[rank], "rank": rank, "conversation": f"{NAMES[rank]} {number}",
            "prompt_key": str(number % prompts), "completion_tokens": tokens,
        }
        for rank, number, tokens in sorted(rows, key=lambda row: row[0])
    ]  # fmt: skip
    return pl.DataFrame(listed, schema_overrides={"rank": pl.Int32, "completion_tokens": pl.Int32})


def owners(rows: pl.DataFrame, caps: Mapping[str, int]) -> pl.DataFrame:
    """``with_owners``; a cap that holds not one conversation is raised until it does."""
    while True:
        try:
            return with_owners(rows, caps)
        except EyrieError as error:
            name = str(error).split(".")[1]
            caps = {**caps, name: caps[name] + 20}


@settings(deadline=None)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=30, unique=True), st.data())
def test_a_split_depends_on_the_prompt_alone(names: list[str], data: st.DataObject) -> None:
    options = Merge(test_fraction=0.3, validation_fraction=0.3)
    whole = with_splits(pl.DataFrame({"prompt_key": names}), options)
    part = data.draw(st.lists(st.sampled_from(names), min_size=1))
    shown = with_splits(pl.DataFrame({"prompt_key": part}), options)
    assert shown["prompt_key"].to_list() == part
    assert set(shown.iter_rows()) <= set(whole.iter_rows())


@settings(deadline=None, max_examples=60)
@given(ROWS, CAPS)
def test_a_cap_is_never_exceeded_and_cuts_whole_conversations(
    rows: list[tuple[int, int, int]], caps: dict[str, int]
) -> None:
    made = owners(frame(rows), caps)
    assert made.equals(owners(frame(rows), caps))
    for name in NAMES:
        mine = made.filter(pl.col("dataset") == name)
        over = mine.filter(pl.col("reason") == "over_cap")
        assert not len(over) or name in caps
        kept = mine.filter(pl.col("reason") == "")
        assert not set(kept["conversation"]) & set(over["conversation"])


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(9, 40), st.integers(0, 40))
def test_a_raised_cap_only_adds(rows: list[tuple[int, int, int]], cap: int, more: int) -> None:
    rows = [(0, number, tokens) for _, number, tokens in rows]
    low = frame(rows)
    try:
        low = with_owners(low, {"first": cap})
    except EyrieError:
        return
    high = with_owners(frame(rows), {"first": cap + more})
    sizes = [made.filter(pl.col("reason") == "")["completion_tokens"].sum() for made in (low, high)]
    assert sizes[0] <= cap
    assert sizes[1] <= cap + more
    assert not ((low["reason"] == "") & (high["reason"] != "")).any()


@settings(deadline=None, max_examples=60)
@given(ROWS, CAPS)
def test_a_prompt_has_one_owner_the_first_that_has_room(rows: list[tuple[int, int, int]], caps: dict[str, int]) -> None:
    made = owners(frame(rows), caps)
    for _, mine in made.group_by("prompt_key"):
        kept = mine.filter(pl.col("reason") == "")
        assert kept["dataset"].n_unique() <= 1
        open_rows = mine.filter(pl.col("reason") != "over_cap")
        if len(open_rows):
            assert kept["rank"].min() == open_rows["rank"].min()
            assert (open_rows.filter(pl.col("rank") == open_rows["rank"].min())["reason"] == "").all()


def test_a_prompt_that_a_cap_leaves_out_goes_to_the_next_dataset() -> None:
    rows = frame([(0, number, 5) for number in range(10)] + [(1, number, 5) for number in range(10)], prompts=10)
    made = with_owners(rows, {"first": 20})
    assert made.filter(pl.col("dataset") == "first")["reason"].value_counts().sort("reason").rows() == [("", 4), ("over_cap", 6)]  # fmt: skip  # noqa: E501
    second = made.filter(pl.col("dataset") == "second")["reason"].value_counts().sort("reason").rows()
    assert second == [("", 6), ("cross_dataset_duplicate", 4)]


def test_a_cap_cannot_be_smaller_than_a_conversation() -> None:
    with pytest.raises(EyrieError, match=r"datasets\.first\.token_cap is 3, .* holds 5 completion tokens; raise it"):
        with_owners(frame([(0, 1, 5), (0, 2, 5)]), {"first": 3})
