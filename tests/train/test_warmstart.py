"""The closed-form start of ``fc``."""

from __future__ import annotations

import pytest
import torch

from eyrie.drafters.eagle3 import Eagle3, Eagle3Config
from eyrie.train.data import Row
from eyrie.train.warmstart import fit_features, spread_rows

H = 4


def drafter() -> Eagle3:
    config = Eagle3Config(
        hidden_size=H, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=2, rms_norm_eps=1e-5,
        rope_theta=1e4, max_position_embeddings=64, vocab_size=16, draft_vocab_size=8, layers=(0, 1, 2), ttt_steps=1,
        target_sha="0",
    )  # fmt: skip
    return Eagle3(config)


def row(aux_TA: torch.Tensor) -> Row:
    T = len(aux_TA)
    return Row(torch.zeros(T, dtype=torch.int64), ((1, T),), aux_TA, torch.zeros(T - 1, H), 1.0, True)


def linear_rows(count: int, noise: float = 0.0) -> tuple[list[Row], torch.Tensor]:
    """Rows in which the highest state of column t + 1 is a fixed linear map of all states of column t."""
    g = torch.Generator().manual_seed(0)
    rule_HA = torch.randn(H, 3 * H, generator=g) * 0.3
    rows = []
    for _ in range(count):
        aux_TA = torch.randn(12, 3 * H, generator=g)
        for t in range(11):
            aux_TA[t + 1, 2 * H :] = rule_HA @ aux_TA[t] + noise * torch.randn(H, generator=g)
        rows.append(row(aux_TA))
    return rows, rule_HA


def test_a_linear_rule_is_found() -> None:
    rows, rule_HA = linear_rows(40)
    fresh = drafter()
    share = fit_features(fresh, rows)
    assert torch.allclose(fresh.fc.weight, rule_HA, atol=0.01)
    assert share > 0.99999


def test_it_predicts_the_next_column_and_never_crosses_rows() -> None:
    """Rows of one column hold no pair; were rows joined, their columns would."""
    g = torch.Generator().manual_seed(1)
    fresh = drafter()
    before = fresh.fc.weight.detach().clone()
    assert fit_features(fresh, [row(torch.randn(1, 3 * H, generator=g)) for _ in range(100)]) == 0.0
    assert torch.equal(fresh.fc.weight, before)


def test_too_little_data_leaves_the_start_alone() -> None:
    rows, _ = linear_rows(1)
    fresh = drafter()
    before = fresh.fc.weight.detach().clone()
    assert fit_features(fresh, rows) == 0.0
    assert torch.equal(fresh.fc.weight, before)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_the_share_is_that_of_the_residuals(noise: float) -> None:
    rows, _ = linear_rows(30, noise)
    fresh = drafter()
    share = fit_features(fresh, rows)
    now = torch.cat([r.aux_TA[:-1] for r in rows])
    following = torch.cat([r.aux_TA[1:, 2 * H :] for r in rows])
    left = (following - now @ fresh.fc.weight.detach().t()).square().sum() / following.square().sum()
    assert share == pytest.approx(1 - float(left), abs=1e-4)
    assert 0 < share < 1


def test_a_state_that_is_always_zero_is_no_obstacle() -> None:
    rows, _ = linear_rows(30)
    for r in rows:
        r.aux_TA[:, 0] = 0
    fresh = drafter()
    fit_features(fresh, rows)
    assert torch.isfinite(fresh.fc.weight).all()


@pytest.mark.parametrize("columns", [1, 110, 220, 439, 440, 441, 9999])
def test_rows_are_spread_over_all_and_hold_enough(columns: int) -> None:
    rows = linear_rows(40)[0]
    chosen = spread_rows(rows, columns)
    held = sum(len(one.ids_T) - 1 for one in chosen)
    assert held >= min(columns, 440)
    assert held < 2 * columns + 11 or len(chosen) == 1
    assert chosen[0] is rows[0]


def test_a_part_of_many_rows_is_enough() -> None:
    rows, rule_HA = linear_rows(3000)
    fresh = drafter()
    assert fit_features(fresh, rows) > 0.99999
    assert torch.allclose(fresh.fc.weight, rule_HA, atol=0.01)
