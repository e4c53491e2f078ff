"""Rows of the merged index with their hidden states, and the order in which they are visited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie.packing import cut_batches
from eyrie.train.loss import Batch, Queries, whole_tiles


@dataclass(frozen=True)
class Row:
    """One supervised assistant turn.

    Shapes: ``ids_T`` int64; ``aux_TA`` (A = 3H) and ``final_FH`` in storage dtype, memory-mapped; ``spans`` are
    half-open ranges of label positions. ``final_FH`` holds one state per supervised label, in order; with ``whole`` one
    per token but the first, and then prompt positions may be learnt from too, at ``prompt_weight`` times ``weight``.
    """

    ids_T: Tensor
    spans: tuple[tuple[int, int], ...]
    aux_TA: Tensor
    final_FH: Tensor
    weight: float
    answered: bool
    whole: bool = False
    prompt_weight: float = 0.0

    @property
    def labels(self) -> int:
        """Labels that a drafter is ever asked for: all but the first of each span."""
        return sum(max(0, end - start - 1) for start, end in self.spans)

    def queries(self) -> RowQueries:
        """Columns that the first draft step asks, those of answers first."""
        inner = [(start, end) for start, end in self.spans if end - start > 1]
        column_Q = torch.cat([torch.arange(start - 1, end - 2) for start, end in inner])
        left_Q = torch.cat([torch.arange(end - start - 1, 0, -1) for start, end in inner])
        if not self.prompt_weight:
            labels = torch.cat([torch.arange(start + 1, end) for start, end in inner])
            return RowQueries(column_Q, left_Q, torch.full((len(column_Q),), self.weight), len(column_Q), labels)
        end = inner[-1][1]  # beyond the last answer nothing is drafted
        asked = torch.zeros(end - 2, dtype=torch.bool)
        asked[column_Q] = True
        prompt = (~asked).nonzero()[:, 0]
        weight_Q = torch.full((end - 2,), self.weight)
        weight_Q[len(column_Q) :] *= self.prompt_weight
        return RowQueries(
            torch.cat([column_Q, prompt]), torch.cat([left_Q, end - 2 - prompt]), weight_Q, len(column_Q),
            torch.arange(2, end),
        )  # fmt: skip

    def finals(self, label_L: Tensor) -> Tensor:
        """The target's states ``[L, H]`` before these label positions (ascending)."""
        if self.whole:
            return self.final_FH[label_L - 1]
        stored = torch.cat([torch.arange(start, end) for start, end in self.spans])
        return self.final_FH[torch.searchsorted(stored, label_L)]


@dataclass(frozen=True)
class RowQueries:
    """What one row asks of a drafter, per column; ``label_L`` are the label positions that any step asks for.

    Attributes:
        column_Q: columns t; step k's label stands at ``t + 2 + k``.
        left_Q: step k asks the columns with ``left > k``.
        weight_Q: loss weights, float32.
        answers: how many columns, from the first on, ask for tokens of an answer.
        label_L: ascending.
    """

    column_Q: Tensor
    left_Q: Tensor
    weight_Q: Tensor
    answers: int
    label_L: Tensor


def collate(rows: Sequence[Row]) -> Batch:
    """Right-pad ``rows`` into one batch; see :class:`eyrie.train.loss.Batch`."""
    T = whole_tiles(max(len(row.ids_T) for row in rows))
    ids_BT = torch.zeros(len(rows), T, dtype=torch.int64)
    aux_BTA = torch.zeros(len(rows), T, rows[0].aux_TA.shape[1])
    finals, labels, queries = [], [], []
    base = 0
    for b, row in enumerate(rows):
        ids_BT[b, : len(row.ids_T)] = row.ids_T
        aux_BTA[b, : len(row.ids_T)] = row.aux_TA
        asked = row.queries()
        Q = len(asked.column_Q)
        finals.append(row.finals(asked.label_L).float())
        labels.append(row.ids_T[asked.label_L])
        queries.append(
            (
                torch.full((Q,), b), asked.column_Q, asked.left_Q,
                base + torch.searchsorted(asked.label_L, asked.column_Q + 2), asked.weight_Q,
                torch.arange(Q) < (asked.answers if row.answered else 0),
            )
        )  # fmt: skip
        base += len(asked.label_L)
    asked_Q = Queries(*(torch.cat(part) for part in zip(*queries, strict=True)))
    return Batch(ids_BT, aux_BTA, torch.cat(finals), torch.cat(labels), asked_Q)


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of row numbers for one epoch: a pure function of its arguments, so a resumed run visits the same.

    Rows are shuffled and cut into batches (:func:`eyrie.packing.cut_batches`), whose order is shuffled again.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = cut_batches(order, lengths, batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
