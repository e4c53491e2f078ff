"""Splits, caps, and who keeps a shared prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_desk import row

from eyrie.config import Merge
from eyrie.errors import EyrieError
from eyrie.formats.tokens import write_tokens
from eyrie.merge.rows import REASONS, SPLITS, read_rows, split_of

OPTIONS = Merge()
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


def settled(rows: pl.DataFrame, caps: Mapping[str, int], options: Merge = OPTIONS) -> pl.DataFrame:
    """``rows`` with the ``reason`` and ``split`` that reading them as shards, at most seven rows each, gives."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for (dataset,), mine in rows.group_by("dataset", maintain_order=True):
            conversations = mine.partition_by("conversation", maintain_order=True)
            for number in range(0, len(conversations), 3):  # a conversation lies in one shard
                paths.append(Path(folder) / str(dataset) / f"s{number:04d}.parquet")
                paths[-1].parent.mkdir(exist_ok=True)
                part = pl.concat(conversations[number : number + 3])
                write_tokens(paths[-1], [
                    {**row("", [9] * of["completion_tokens"]), "conversation": of["conversation"],
                     "prompt_key": of["prompt_key"]}
                    for of in part.iter_rows(named=True)
                ])  # fmt: skip
        made = read_rows(paths[::-1], list(rows["dataset"].unique(maintain_order=True)), caps, options)
    rows = pl.concat(rows.partition_by("dataset", "conversation", maintain_order=True))  # as the shards have them
    assert made.completion_tokens.tolist() == rows["completion_tokens"].to_list()
    assert (
        len(set(zip(made.conversation.tolist(), rows["conversation"], strict=True))) == rows["conversation"].n_unique()
    )
    return rows.with_columns(
        reason=pl.Series([REASONS[number] for number in made.reason], dtype=pl.String),
        split=pl.Series([SPLITS[number] for number in made.split], dtype=pl.String),
    )


def owners(rows: pl.DataFrame, caps: Mapping[str, int]) -> pl.DataFrame:
    """:func:`settled`; a cap that holds not one conversation is raised until it does."""
    while True:
        try:
            return settled(rows, caps)
        except EyrieError as error:
            name = str(error).split(".")[1]
            caps = {**caps, name: caps[name] + 20}


@settings(deadline=None, max_examples=60)
@given(ROWS, st.data())
def test_a_split_depends_on_the_prompt_alone(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """All rows of a conversation and of a prompt in one split, whatever else there is."""
    options = Merge(test_fraction=0.3, validation_fraction=0.3)
    whole = settled(frame(rows), {}, options)
    part = data.draw(st.lists(st.sampled_from(rows), min_size=1))
    splits = dict(whole.select("prompt_key", "split").iter_rows())
    for made in (whole, settled(frame(part), {}, options)):
        assert [splits[key] for key in made["prompt_key"]] == made["split"].to_list()
    assert whole.group_by("conversation").agg(pl.col("split").n_unique())["split"].max() == 1
    assert splits == {key: split_of(key, options) for key in splits}


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
    try:
        low = settled(frame(rows), {"first": cap})
    except EyrieError:
        return
    high = settled(frame(rows), {"first": cap + more})
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
    made = settled(rows, {"first": 20})
    assert made.filter(pl.col("dataset") == "first")["reason"].value_counts().sort("reason").rows() == [("", 4), ("over_cap", 6)]  # fmt: skip  # noqa: E501
    second = made.filter(pl.col("dataset") == "second")["reason"].value_counts().sort("reason").rows()
    assert second == [("", 6), ("cross_dataset_duplicate", 4)]


def test_a_cap_cannot_be_smaller_than_a_conversation() -> None:
    with pytest.raises(EyrieError, match=r"datasets\.first\.token_cap is 3, .* holds 5 completion tokens; raise it"):
        settled(frame([(0, 1, 5), (0, 2, 5)]), {"first": 3})
