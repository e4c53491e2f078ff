"""Rows to batches, by their lengths alone: training cuts them so, and the merge foretells how full they will be."""

from __future__ import annotations

from collections.abc import Sequence

GROUP_BATCHES = 8  # rows are sorted by length within groups of this many batches


def cut_batches(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of row numbers, rows taken in ``order``.

    Rows are sorted by length within groups of eight batches, so that padding is small and order stays random. A batch
    holds at most ``batch_tokens`` padded tokens, and at least one row.
    """
    batches: list[list[int]] = []
    group: list[int] = []
    tokens = 0
    for row in order:
        group.append(row)
        tokens += lengths[row]
        if tokens >= GROUP_BATCHES * batch_tokens:
            batches += _cut(group, lengths, batch_tokens)
            group, tokens = [], 0
    return batches + _cut(group, lengths, batch_tokens)


def _cut(rows: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: (lengths[row], row)):
        if batch and lengths[row] * (len(batch) + 1) > batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(row)
    return [*batches, batch] if batch else batches
