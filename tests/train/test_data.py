"""Rows to batches, and the order of visits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.train.data import Row, collate, plan_epoch

H = 4

LENGTHS = st.lists(st.integers(2, 300), max_size=120)


@given(LENGTHS, st.integers(16, 700), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_row_once_in_bounded_batches(
    lengths: list[int], batch_tokens: int, seed: int, epoch: int
) -> None:
    batches = plan_epoch(lengths, batch_tokens, seed, epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[row] for row in batch) * len(batch)
        assert padded <= batch_tokens or len(batch) == 1
    assert batches == plan_epoch(lengths, batch_tokens, seed, epoch)


def test_seed_and_epoch_change_the_order() -> None:
    lengths = [10 + i % 7 for i in range(200)]
    plans = [plan_epoch(lengths, 100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])


def test_padding_is_small() -> None:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 200, (2000,), generator=g).tolist()
    batches = plan_epoch(lengths, 2000, 0, 0)
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)
    assert sum(lengths) / padded > 0.85
    # and yet no batch is long only because its place in the epoch is: the order of batches is shuffled
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert longest != sorted(longest)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row with up to three spans that do not touch the first token; spans of one label too."""
    spans, position = [], 0
    for _ in range(draw(st.integers(1, 3))):
        start = position + draw(st.integers(1, 4))
        position = start + draw(st.integers(1, 6))
        spans.append((start, position))
    length = position + draw(st.integers(0, 3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    whole = draw(st.booleans())
    finals = length - 1 if whole else sum(end - start for start, end in spans)
    return Row(
        ids_T=torch.randint(1000, (length,), generator=g),
        spans=tuple(spans),
        aux_TA=torch.randn(length, 3 * H, generator=g).bfloat16(),
        final_FH=torch.randn(finals, H, generator=g).bfloat16(),
        weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        answered=draw(st.booleans()),
        whole=whole,
        prompt_weight=draw(st.sampled_from([0.0, 0.5])) if whole else 0.0,
    )


def states_of_labels(row: Row) -> dict[int, torch.Tensor]:
    """The state before each label position whose state is kept."""
    places = range(1, len(row.ids_T)) if row.whole else [p for start, end in row.spans for p in range(start, end)]
    return {place: state.float() for place, state in zip(places, row.final_FH, strict=True)}


def columns_of(row: Row) -> list[tuple[int, int, float, bool]]:
    """``(column, labels left, loss weight, answered)`` of every column that is asked."""
    # serving has emitted token column + 1 and asks for column + 2
    asked = [
        (column, end - (column + 2), row.weight, row.answered)
        for start, end in row.spans
        for column in range(start - 1, end - 2)
    ]
    if row.prompt_weight:
        last = max(end for start, end in row.spans if end - start > 1)
        answers = {column for column, *_ in asked}
        asked += [
            (column, last - (column + 2), row.weight * row.prompt_weight, False)
            for column in range(last - 2)
            if column not in answers
        ]
    return asked


@given(st.lists(rows(), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_collate_against_a_slow_oracle(given_rows: list[Row]) -> None:
    """Column by column: which token a column's first draft is held against, and how many labels follow it."""
    chosen = [row for row in given_rows if row.labels]
    if not chosen:
        return
    batch = collate(chosen)
    T = -(-max(len(row.ids_T) for row in chosen) // 16) * 16
    assert batch.ids_BT.shape == (len(chosen), T)
    assert batch.aux_BTA.dtype == batch.final_LH.dtype == torch.float32
    q = 0
    for b, row in enumerate(chosen):
        padding = T - len(row.ids_T)
        assert torch.equal(batch.ids_BT[b, : len(row.ids_T)], row.ids_T)
        assert torch.equal(batch.aux_BTA[b, : len(row.ids_T)], row.aux_TA.float())
        assert not padding or not batch.aux_BTA[b, -padding:].any()
        state_of_label = states_of_labels(row)
        for column, left, weight, answered in columns_of(row):
            assert (int(batch.asked.row_Q[q]), int(batch.asked.column_Q[q]), int(batch.asked.left_Q[q])) == (
                b,
                column,
                left,
            )
            assert float(batch.asked.weight_Q[q]) == weight
            assert bool(batch.asked.answered_Q[q]) == answered
            for k in range(left):
                place = int(batch.asked.first_Q[q]) + k
                assert int(batch.label_L[place]) == int(row.ids_T[column + 2 + k])
                assert torch.equal(batch.final_LH[place], state_of_label[column + 2 + k])
            q += 1
    assert q == len(batch.asked.row_Q) == sum(len(columns_of(row)) for row in chosen)


@given(rows())
@settings(max_examples=40, deadline=None)
def test_labels_are_all_but_the_first_of_each_span(row: Row) -> None:
    assert row.labels == sum(end - start - 1 for start, end in row.spans)
