"""What every capturer offers: token ids in, states out, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

States = tuple["Tensor", "Tensor"]

LEAST_FILLED = 0.9
"""Share of a row's place in a batch that it must fill."""


class Capturer(Protocol):
    """Runs the target.

    Boundary id k names the residual stream entering layer k, which is ``hidden_states[k]`` of transformers.
    """

    def states(self, ids_batch: Sequence[Sequence[int]]) -> Iterator[States]:
        """One batch, computed together: ``(aux_TA [T, 3H], final_TH [T, H])`` of each row, in order and unpadded.

        Both have the storage dtype; ``final_TH`` is the state after the final norm, what the head reads.
        """
        ...

    def alone(self, ids: Sequence[int]) -> States:
        """The same for one row, computed by another path, in compute dtype; :meth:`states` is checked against it."""
        ...

    def best_tokens(self, final_NH: Tensor) -> Tensor:
        """The target's greedy choices ``[N]`` (int64) after these final states."""
        ...


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Row numbers by batch: rows of similar length, at most ``batch_tokens`` tokens a batch, padding included.

    A row longer than that is a batch by itself. Rows much shorter than the longest of a batch wait for the next one:
    a token of padding costs as much as any other. The longest rows come first, so that memory peaks at the start.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= batch_tokens and lengths[row] >= LEAST_FILLED * longest:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
