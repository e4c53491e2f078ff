"""What is looked at before training: shares, packing, warnings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_desk import recipe, row, run, shard

from eyrie.merge.summary import over_share, packing
from eyrie.train.data import plan_epoch


def test_a_dataset_with_more_than_its_share_is_seen(
    card: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One source of six brings half of all tokens: the log, the summary, and a mend that works."""
    sizes = {"long": 50, "b": 10, "c": 10, "d": 10, "e": 10, "f": 10}
    tokens = [
        shard(tmp_path, name, "s0000", [row(f"{name}{i}", [9] * (size // 5)) for i in range(5)], card)
        for name, size in sizes.items()
    ]
    made = [(name, 1.0) for name in sizes]
    _, summary = run(recipe(made), card, tokens, tmp_path / "merged")
    assert [name for name, figures in summary["datasets"].items() if figures["over_share"]] == ["long"]
    assert summary["datasets"]["long"]["share"] == 0.5
    (warning,) = summary["warnings"]
    assert warning.startswith("dataset long brings 50% of the weighted training tokens, 3.0 times its even share")
    assert f"warning: {warning}" in caplog.text
    caplog.clear()
    index, summary = run(recipe(made, caps={"long": 25}), card, tokens, tmp_path / "merged")
    assert index.filter(pl.col("dataset") == "long")["completion_tokens"].sum() == 20
    assert summary["left_out"] == {"over_cap": 3}
    assert summary["warnings"] == []
    assert caplog.text == ""
    _, summary = run(recipe([("long", 0.2), *made[1:]]), card, tokens, tmp_path / "merged")
    assert summary["warnings"] == [], "a lower weight mends it too"


def test_the_rule_of_shares() -> None:
    assert over_share(0.36, 8)
    assert not over_share(0.36, 5)
    assert not over_share(1.0, 1)
    assert not over_share(0.99, 2)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=150)


@settings(deadline=None, max_examples=40)
@given(LENGTHS)
def test_packing_is_what_training_does(lengths: list[int]) -> None:
    found = packing(np.array(lengths, np.int32), np.ones(len(lengths), np.int32))
    sizes = [int(size) for size in found["batches"]]
    assert max(lengths) <= sizes[0] < 2 * max(lengths) or sizes[0] == 1
    assert sizes == [sizes[0] << k for k in range(5)]
    for size, figures in found["batches"].items():
        batches = len(lengths) / figures["rows_per_batch"]
        assert figures["filled_share"] == pytest.approx(sum(lengths) / (round(batches) * int(size)), rel=0.01, abs=1e-3)
        assert 0 <= figures["padding_share"] < 1
        assert figures["filled_share"] <= 1 - figures["padding_share"] + 1e-3
    values = sorted(lengths)
    percentiles = list(found["tokens_per_row"].values())
    assert percentiles == sorted(percentiles)
    assert set(percentiles) <= set(values)
    assert found["completion_tokens_per_row"]["50"] == 1


def test_packing_agrees_with_an_epoch_of_training() -> None:
    lengths = [10 + (i * 7919) % 400 for i in range(4000)]
    figures = packing(np.array(lengths), np.array(lengths))["batches"]["2048"]
    batches = plan_epoch(lengths, 2048, 3, 0)
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)
    assert figures["padding_share"] == pytest.approx(1 - sum(lengths) / padded, abs=0.01)
    assert figures["rows_per_batch"] == pytest.approx(len(lengths) / len(batches), rel=0.02)


def test_no_training_row_is_no_packing() -> None:
    none = np.zeros(0, np.int32)
    assert packing(none, none) == {"tokens_per_row": {}, "completion_tokens_per_row": {}, "batches": {}}
