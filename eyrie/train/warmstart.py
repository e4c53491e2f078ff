"""A first guess for ``fc``, fitted in closed form before the first training step.

The drafter starts as the target's last layer, which turns the state at a column into the next token. The draft is about
the token after that one, so the best thing that ``fc`` can hand to this layer is the state of the *next* column. Ridge
regression finds the linear map that comes closest, from training rows alone, in seconds; training would spend its first
hundred steps on the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyrie.drafters.eagle3 import Eagle3
from eyrie.train.data import Row

COLUMNS_PER_INPUT = 20
"""Columns to fit from, for each input of ``fc``: more tell nothing new, and all of them could be terabytes."""

ROWS = 16
"""Rows whose products are summed in float32 before they join the sums in float64."""

RIDGE = 1e-3
"""Share of each input's own mean square that is added to it: a few dimensions of a residual stream are thousands of
times larger than the others, and one constant for all would be too much for most or too little for those."""


@torch.no_grad()
def fit_features(drafter: Eagle3, rows: Sequence[Row]) -> float:
    """Fit ``fc`` to map the auxiliary states ``[3H]`` of column t to the highest of them ``[H]`` at column t + 1.

    Rows of one token, and so many rows that give fewer columns than ``fc`` has inputs, leave ``fc`` as it is.

    Returns:
        the share of the variance (about zero) that the map explains on the rows that it was fitted from; 0 when nothing
        was fitted.
    """
    H, A = drafter.config.hidden_size, drafter.fc.in_features
    gram_AA = torch.zeros(A, A, dtype=torch.float64)
    cross_AH = torch.zeros(A, H, dtype=torch.float64)
    energy, columns = 0.0, 0
    chosen = spread_rows(rows, COLUMNS_PER_INPUT * A)
    for start in range(0, len(chosen), ROWS):
        auxes = [row.aux_TA.float() for row in chosen[start : start + ROWS]]
        now_CA = torch.cat([aux_TA[:-1] for aux_TA in auxes])
        following_CH = torch.cat([aux_TA[1:, A - H :] for aux_TA in auxes])
        gram_AA += now_CA.t() @ now_CA
        cross_AH += now_CA.t() @ following_CH
        energy += float(following_CH.double().square().sum())
        columns += len(now_CA)
    if columns <= A:
        return 0.0
    power_A = gram_AA.diagonal()
    ridge_A = RIDGE * power_A.clamp(min=1e-9 * float(power_A.mean()))  # a state that is always zero stays solvable
    weights_AH = torch.linalg.solve(gram_AA + ridge_A.diag(), cross_AH)
    drafter.fc.weight.copy_(weights_AH.t())
    return explained(gram_AA, cross_AH, weights_AH, energy)


def spread_rows(rows: Sequence[Row], columns: int) -> Sequence[Row]:
    """Every n-th row, so that they hold ``columns`` columns or a little more; all rows where they hold fewer."""
    held = sum(len(row.ids_T) - 1 for row in rows)
    return rows[:: max(1, held // columns)]


def explained(gram_AA: Tensor, cross_AH: Tensor, weights_AH: Tensor, energy: float) -> float:
    """``1 - |y - xW|^2 / |y|^2`` from the sums of ``x'x``, ``x'y`` and ``|y|^2``."""
    left = energy - 2 * float((weights_AH * cross_AH).sum()) + float((weights_AH * (gram_AA @ weights_AH)).sum())
    return 1.0 - left / energy if energy else 0.0
