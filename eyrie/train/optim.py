"""Optimiser of a drafter: Muon for matrices, AdamW for the head and the norms; a step-indexed schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyrie.config import Drafter

# Newton-Schulz polynomials of Polar Express (Amsel et al., 2025, arXiv 2505.16932): each iteration has the coefficients
# that are best for what the ones before it left. Three leave a wider spread of singular values than five of Muon's
# fixed quintic, but cost 40% less and trained better here (docs/measurements/training.md)
QUINTICS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
)


LARGEST_BLOCK = 192
"""Rows of a matrix outside attention that are orthogonalised together; attention takes each head by itself."""


def orthogonalised(update_BMN: Tensor, compute: torch.dtype = torch.float32) -> Tensor:
    """About the closest semi-orthogonal matrix to each of ``update_BMN`` ``[..., m, n]``, found in dtype ``compute``.

    Singular vectors stay; singular values above a thousandth of the norm come within 0.13 to 1.87.
    """
    # the polynomials must not see a singular value above 1
    x = (update_BMN / (torch.linalg.matrix_norm(update_BMN, keepdim=True) * 1.02 + 1e-7)).to(compute)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for a, b, c in QUINTICS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(update_BMN.dtype)


def orthogonalised_blocks(update_MN: Tensor, rows: int, compute: torch.dtype = torch.float32) -> Tensor:
    """:func:`orthogonalised` of each block of ``rows`` rows by itself.

    The cost of a matrix is proportional to its smaller side, so blocks cost a fraction of the whole, and what they
    leave undone, equal steps across blocks, did not help training (docs/measurements/training.md).
    """
    return orthogonalised(update_MN.unflatten(0, (-1, rows)), compute).flatten(0, 1)


class DrafterOptimizer:
    """Two rules in one step.

    Args:
        drafter: every 2-D parameter but the head is a matrix for Muon; all else is AdamW's.
        options: learning rates, clipping.
        total_steps: the schedule rises linearly over ``warmup_fraction`` of them, then falls linearly to zero.
        head_dim: width of an attention head.
        compute: dtype of Muon's matrix products; parameters, moments and updates are float32.
    """

    MOMENTUM = 0.95
    BETAS = (0.9, 0.95)
    EPS = 1e-8

    def __init__(
        self, drafter: nn.Module, options: Drafter, total_steps: int, head_dim: int,
        compute: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.options, self.total_steps, self.head_dim, self.compute = options, total_steps, head_dim, compute
        muon = options.muon_learning_rate > 0
        self.matrices: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        for name, parameter in drafter.named_parameters():
            chosen = self.matrices if muon and parameter.dim() == 2 and not name.startswith("lm_head") else self.others
            chosen[name] = parameter
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.others.items()}

    def rate(self, step: int) -> float:
        """Factor on both learning rates at ``step`` (0-based); a function of the step alone, so resume is exact."""
        warmup = max(1, round(self.options.warmup_fraction * self.total_steps))
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (self.total_steps - step) / max(1, self.total_steps - warmup))

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Apply the gradients; returns their global norm before clipping."""
        parameters = [*self.matrices.values(), *self.others.values()]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm))
        rate = self.rate(step)
        for name, parameter in self.matrices.items():
            gradient = _gradient(parameter)
            momentum = self.momentum[name].lerp_(gradient, 1 - self.MOMENTUM)
            update = self._orthogonalised(name, gradient.lerp(momentum, self.MOMENTUM))
            shape = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.sub_(update, alpha=rate * self.options.muon_learning_rate * shape)
        beta1, beta2 = self.BETAS
        for name, parameter in self.others.items():
            gradient = _gradient(parameter)
            first = self.first[name].lerp_(gradient, 1 - beta1)
            second = self.second[name].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (1 - beta2 ** (step + 1)) ** 0.5 / (1 - beta1 ** (step + 1))
            parameter.addcdiv_(first, second.sqrt().add_(self.EPS), value=-rate * self.options.learning_rate * scale)
        for parameter in parameters:
            parameter.grad = None
        return norm

    def _orthogonalised(self, name: str, update_MN: Tensor) -> Tensor:
        """Blocks lie along the side that does not face the residual stream: heads, or units of the MLP."""
        inward = "o_proj" in name or "down_proj" in name
        side = update_MN.t() if inward else update_MN
        rows = self.head_dim if "self_attn" in name else _largest_divisor(side.shape[0], LARGEST_BLOCK)
        found = orthogonalised_blocks(side, rows, self.compute)
        return found.t() if inward else found

    def state(self) -> dict[str, Tensor]:
        """Every buffer by name, for a checkpoint."""
        return {
            **{f"momentum.{name}": t for name, t in self.momentum.items()},
            **{f"first.{name}": t for name, t in self.first.items()},
            **{f"second.{name}": t for name, t in self.second.items()},
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
