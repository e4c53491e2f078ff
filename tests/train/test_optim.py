"""Muon, AdamW and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eyrie.config import Drafter
from eyrie.train.optim import QUINTICS, DrafterOptimizer, orthogonalised, orthogonalised_blocks

HEAD_DIM = 2


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.fc = nn.Linear(6, 4, bias=False)
        self.tall = nn.Linear(3, 12, bias=False)
        self.norm = nn.RMSNorm(5)
        self.lm_head = nn.Linear(4, 7, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g)


def give_gradients(module: nn.Module, seed: int, scale: float = 1e-3) -> None:
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=g) * scale


def polynomial(value: float) -> float:
    for a, b, c in QUINTICS:
        value = a * value + b * value**3 + c * value**5
    return value


def test_every_singular_value_above_a_thousandth_comes_near_one() -> None:
    """The bounds that the docstring promises, on the scalar polynomial; those below it grow, and never past them."""
    large = [polynomial(i / 10_000) for i in range(10, 10_001)]
    assert min(large) > 0.13
    assert max(large) < 1.87
    small = [polynomial(i / 100_000) for i in range(100)]
    assert small == sorted(small)
    assert small[0] == 0


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16), (64, 8), (1, 10)])
@pytest.mark.parametrize("scale", [1e-3, 37.0])
def test_orthogonalised_moves_singular_values_and_keeps_the_vectors(shape: tuple[int, int], scale: float) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double() * scale
    u, values, vt = torch.linalg.svd(update, full_matrices=False)
    mapped = torch.tensor([polynomial(float(value)) for value in values / (1.02 * update.norm() + 1e-7)])
    expected = u @ mapped.double().diag() @ vt
    found = orthogonalised(update.float())
    assert found.shape == shape
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_orthogonalised_in_bfloat16_is_near_and_comes_back_as_float32() -> None:
    update = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(1))
    exact, rounded = orthogonalised(update), orthogonalised(update, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.06


def test_who_is_trained_by_what() -> None:
    optimizer = DrafterOptimizer(Toy(), Drafter(), 10, HEAD_DIM)
    assert set(optimizer.matrices) == {"fc.weight", "tall.weight"}
    assert set(optimizer.others) == {"norm.weight", "lm_head.weight"}
    only_adam = DrafterOptimizer(Toy(), Drafter(muon_learning_rate=0.0), 10, HEAD_DIM)
    assert not only_adam.matrices
    assert len(only_adam.others) == 4


@pytest.mark.parametrize(("total", "warmup"), [(100, 10), (7, 1), (1, 1), (40, 40)])
def test_schedule_rises_and_falls_linearly(total: int, warmup: int) -> None:
    optimizer = DrafterOptimizer(Toy(), Drafter(warmup_fraction=warmup / total), total, HEAD_DIM)
    rates = [optimizer.rate(step) for step in range(total)]
    assert rates[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    falling = total - warmup
    assert rates[warmup:] == pytest.approx([1 - i / falling for i in range(falling)])
    assert all(0 < rate <= 1 for rate in rates)
    assert optimizer.rate(total) == 0 or warmup == total


def test_rate_is_a_function_of_the_step() -> None:
    used, fresh = (DrafterOptimizer(Toy(), Drafter(), 30, HEAD_DIM) for _ in range(2))
    for step in range(5):
        used.rate(step)
    assert [used.rate(step) for step in range(30)] == [fresh.rate(step) for step in range(30)]


def test_adam_equals_torch() -> None:
    options = Drafter(muon_learning_rate=0.0, learning_rate=1e-2, warmup_fraction=0.5, max_grad_norm=1e9)
    ours, theirs = Toy(), Toy()
    optimizer = DrafterOptimizer(ours, options, 6, HEAD_DIM)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        give_gradients(ours, step, scale=1.0)
        give_gradients(theirs, step, scale=1.0)
        optimizer.step(step)
        reference.param_groups[0]["lr"] = 1e-2 * optimizer.rate(step)
        reference.step()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), name


def test_muon_moves_by_the_orthogonalised_update() -> None:
    options = Drafter(muon_learning_rate=0.1, warmup_fraction=0.0, max_grad_norm=1e9)
    toy = Toy()
    before = {name: p.detach().clone() for name, p in toy.named_parameters()}
    give_gradients(toy, 3, scale=1.0)
    gradient = toy.tall.weight.grad.clone()
    DrafterOptimizer(toy, options, 10, HEAD_DIM).step(0)
    moved = before["tall.weight"] - toy.tall.weight.detach()
    # tall matrices move farther, by the root of their aspect ratio (12 / 3)
    assert torch.allclose(moved, 0.1 * 2 * orthogonalised(gradient), atol=1e-5)


def test_blocks_are_orthogonalised_each_by_itself() -> None:
    update = torch.randn(12, 5, generator=torch.Generator().manual_seed(2))
    found = orthogonalised_blocks(update, 4)
    for start in range(0, 12, 4):
        assert torch.allclose(found[start : start + 4], orthogonalised(update[start : start + 4]), atol=1e-4)
    assert torch.allclose(orthogonalised_blocks(update, 12), orthogonalised(update), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "rows", "inward"),
    [
        ("midlayer.self_attn.q_proj.weight", (6, 10), HEAD_DIM, False),
        ("midlayer.self_attn.o_proj.weight", (5, 6), HEAD_DIM, True),
        ("midlayer.mlp.gate_proj.weight", (386, 3), 2, False),  # 386 = 2 * 193: no divisor fits but 2
        ("midlayer.mlp.down_proj.weight", (3, 384), 192, True),
        ("fc.weight", (192, 9), 192, False),
    ],
)
def test_blocks_lie_along_heads_and_units(name: str, shape: tuple[int, int], rows: int, inward: bool) -> None:
    """A block never mixes two heads, and the side that faces the residual stream is never cut."""
    optimizer = DrafterOptimizer(Toy(), Drafter(), 10, HEAD_DIM)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    side = update.t() if inward else update
    expected = orthogonalised_blocks(side, rows)
    assert torch.equal(optimizer._orthogonalised(name, update), expected.t() if inward else expected)


def test_gradients_are_clipped_and_gone_after_the_step() -> None:
    toy = Toy()
    optimizer = DrafterOptimizer(toy, Drafter(max_grad_norm=0.5), 10, HEAD_DIM)
    give_gradients(toy, 1, scale=10.0)
    expected = torch.cat([p.grad.flatten() for p in toy.parameters()]).norm()
    assert optimizer.step(0) == pytest.approx(expected.item(), rel=1e-5)
    assert all(p.grad is None for p in toy.parameters())
    first = torch.cat([t.flatten() for t in [*optimizer.first.values(), *optimizer.momentum.values()]])
    assert 0 < first.norm() < 0.5


def test_state_round_trip_continues_exactly() -> None:
    one, two = Toy(), Toy()
    a = DrafterOptimizer(one, Drafter(), 20, HEAD_DIM)
    for step in range(4):
        give_gradients(one, step)
        a.step(step)
    b = DrafterOptimizer(two, Drafter(), 20, HEAD_DIM)
    two.load_state_dict(one.state_dict())
    b.restore({name: tensor.clone() for name, tensor in a.state().items()})
    assert len(a.state()) == 2 + 2 * 2
    for step in range(4, 8):
        for toy, optimizer in ((one, a), (two, b)):
            give_gradients(toy, step)
            optimizer.step(step)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name
    for name, tensor in a.state().items():
        assert torch.equal(tensor, b.state()[name]), name
