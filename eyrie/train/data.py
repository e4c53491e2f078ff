"""Rows of the merged index with their hidden states, and the order in which they are visited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie.train.loss import Batch
from eyrie.train.plan import cut_batches


@dataclass(frozen=True)
class Row:
    """One supervised assistant turn.

    Shapes: ``ids_T`` int64; ``aux_TA`` (A = 3H) and ``final_FH`` in storage dtype, memory-mapped; ``final_FH`` holds
    one state per supervised label, in order; ``spans`` are half-open ranges of label positions.
    """

    ids_T: Tensor
    spans: tuple[tuple[int, int], ...]
    aux_TA: Tensor
    final_FH: Tensor
    weight: float
    answered: bool

    @property
    def labels(self) -> int:
        """Labels that a drafter is ever asked for: all but the first of each span."""
        return sum(max(0, end - start - 1) for start, end in self.spans)


def collate(rows: Sequence[Row]) -> Batch:
    """Right-pad ``rows`` into one batch; see :class:`eyrie.train.loss.Batch`."""
    T = max(len(row.ids_T) for row in rows)
    ids_BT = torch.zeros(len(rows), T, dtype=torch.int64)
    aux_BTA = torch.zeros(len(rows), T, rows[0].aux_TA.shape[1])
    places: list[list[Tensor]] = [[], [], [], []]
    finals, labels, weights, answered = [], [], [], []
    base = 0
    for b, row in enumerate(rows):
        ids_BT[b, : len(row.ids_T)] = row.ids_T
        aux_BTA[b, : len(row.ids_T)] = row.aux_TA
        offset = 0
        for start, end in row.spans:
            n = end - start - 1
            if n > 0:
                steps = torch.arange(n)
                for place, value in zip(
                    places, (torch.full((n,), b), start - 1 + steps, n - steps, base + steps), strict=True
                ):
                    place.append(value)
                finals.append(row.final_FH[offset + 1 : offset + 1 + n])
                labels.append(row.ids_T[start + 1 : end])
                weights.append(torch.full((n,), row.weight))
                answered.append(torch.full((n,), row.answered))
                base += n
            offset += end - start
    row_Q, column_Q, left_Q, first_Q = (torch.cat(place) for place in places)
    return Batch(
        ids_BT, aux_BTA, row_Q, column_Q, left_Q, first_Q,
        torch.cat(finals).float(), torch.cat(labels), torch.cat(weights), torch.cat(answered),
    )  # fmt: skip


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of row numbers for one epoch: a pure function of its arguments, so a resumed run visits the same.

    Rows are shuffled and cut into batches (:func:`eyrie.train.plan.cut_batches`), whose order is shuffled again.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = cut_batches(order, lengths, batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
