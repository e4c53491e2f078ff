"""The training-time-test loss of EAGLE-3 (arXiv 2503.01840, section 3.2), computed only where a label asks for it.

Columns. A row holds tokens ``x[0..T)`` of which the target wrote ``x[s..e)``. Serving drafts first at column ``s - 1``
(the target has emitted ``x[s]``), so step ``k`` of the unroll has a query at column ``t`` when ``s - 1 <= t`` and its
label ``x[t + 2 + k]`` lies in the span: a position is supervised when its *label* is the target's own token. The
columns of step ``k + 1`` are those of step ``k`` less the last one of each span.

Attention. A query of step ``k`` at column ``t`` sees the first step's keys of all columns up to ``t`` and, of steps
1 to ``k``, only those of its own column, at rotary position ``t + k``. Prompt columns give keys and values in the
first step and cost nothing afterwards.

Loss. Soft cross-entropy against the target's distribution restricted to the draft vocabulary and renormalised; labels
outside the draft vocabulary carry no loss; the mean is over valid labels, so the step size depends neither on padding
nor on prompt length. Step ``k`` weighs ``decay ** k``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie.drafters.eagle3 import Eagle3
from eyrie.llama.weights import rotate_halves

CHUNK = 512
"""Rows of logits that exist at a time; keeps them in cache."""

TILE = 16
"""Columns and query columns are filled up to a multiple of this. The CPU's bfloat16 products are compiled for each
shape, which costs a tenth of a step when every batch brings shapes of its own."""


def whole_tiles(count: int) -> int:
    """``count`` rounded up to a multiple of :data:`TILE`."""
    return count + -count % TILE


@dataclass
class Queries:
    """The query columns of one step, in row-major order.

    Shapes: ``row_Q``, ``column_Q``, ``left_Q`` int64 (labels left in the span: step k uses columns with left > k);
    ``first_Q``: place of step 0's label among the batch's labels, so that step k's label stands at ``first_Q + k``;
    ``weight_Q``: loss weights; ``answered_Q``: whether the target wrote the label (only such columns count in the
    metrics).
    """

    row_Q: Tensor
    column_Q: Tensor
    left_Q: Tensor
    first_Q: Tensor
    weight_Q: Tensor
    answered_Q: Tensor

    def __len__(self) -> int:
        return len(self.row_Q)

    def chosen(self, index_C: Tensor) -> Queries:
        """Those at ``index_C``; one that follows itself only fills a tile, so it bears no loss and goes no further."""
        some = Queries(*(tensor[index_C] for tensor in vars(self).values()))
        real_C = F.pad(index_C.diff() > 0, (1, 0), value=True)
        some.left_Q, some.weight_Q = some.left_Q * real_C, some.weight_Q * real_C
        some.answered_Q = some.answered_Q & real_C
        return some

    def to(self, device: torch.device) -> Queries:
        return Queries(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass
class Batch:
    """Right-padded rows, the padding up to a whole tile.

    Shapes: ``ids_BT`` int64; ``aux_BTA`` float (A = 3H); ``final_LH``: the target's final states of all labels;
    ``label_L``: target ids of the labels; ``asked``: the query columns of step 0.
    """

    ids_BT: Tensor
    aux_BTA: Tensor
    final_LH: Tensor
    label_L: Tensor
    asked: Queries

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device) for part in vars(self).values()))


def in_tiles(index_C: Tensor) -> Tensor:
    """``index_C`` with its last entry repeated up to a multiple of :data:`TILE`."""
    return torch.cat([index_C, index_C[-1:].expand(whole_tiles(len(index_C)) - len(index_C))])


@dataclass
class StepSums:
    """Sums of one TTT step, so that averages over batches are exact."""

    loss: float = 0.0
    weight: float = 0.0
    correct: float = 0.0
    run: float = 0.0
    labels: float = 0.0

    def add(self, other: StepSums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Teacher:
    """The target's distribution over the draft vocabulary: head rows of the kept tokens, exact.

    Args:
        head_DvH: rows of the target's head for the draft vocabulary, in the dtype to compute in.
        target_ids_Dv: target id of each draft id.
        vocab_size: size of the target vocabulary.
    """

    def __init__(self, head_DvH: Tensor, target_ids_Dv: Tensor, vocab_size: int) -> None:
        self.head_DvH = head_DvH
        device = head_DvH.device
        self.draft_id_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
        self.draft_id_V[target_ids_Dv] = torch.arange(len(target_ids_Dv), device=device)

    @torch.no_grad()
    def probabilities(self, final_LH: Tensor) -> Tensor:
        """Softmax over the draft vocabulary, ``[L, Dv]``."""
        out = torch.empty(len(final_LH), len(self.head_DvH))
        for start in range(0, len(final_LH), CHUNK):
            torch.softmax(
                F.linear(final_LH[start : start + CHUNK].to(self.head_DvH), self.head_DvH).float(),
                -1, out=out[start : start + CHUNK],
            )  # fmt: skip
        return out


class SoftCrossEntropy(torch.autograd.Function):
    """Fused head and soft cross-entropy; only ``softmax - teacher`` is ever kept, a chunk at a time.

    Inputs: ``h_NH`` normed outputs, ``w_DvH`` the head, ``teacher_LDv`` probabilities, ``label_N`` rows of the teacher
    to use, ``weight_N`` loss weights, the dtype of the products. Returns the weighted loss sum and the argmax draft ids
    ``[N]``. Everything else is float32.
    """

    @staticmethod
    def forward(ctx, h_NH, w_DvH, teacher_LDv, label_N, weight_N, compute):  # type: ignore[no-untyped-def]
        with_grad = ctx.needs_input_grad[0]
        dh_NH = torch.empty_like(h_NH)
        dw_DvH = torch.zeros_like(w_DvH) if with_grad else w_DvH.new_empty(0)
        best_N = torch.empty(len(h_NH), dtype=torch.int64)
        total = h_NH.new_zeros((), dtype=torch.float64)
        given_NH, head_DvH = h_NH.to(compute), w_DvH.to(compute)
        for start in range(0, len(h_NH), CHUNK):
            part = slice(start, start + CHUNK)
            h, weight = given_NH[part], weight_N[part]
            logits = F.linear(h, head_DvH).float()
            top = logits.max(-1)
            best_N[part] = top.indices
            teacher = teacher_LDv[label_N[part]]
            expected = torch.linalg.vecdot(teacher, logits)
            logits.sub_(top.values[:, None]).exp_()
            mass = logits.sum(-1)
            total += (weight * (mass.log() + top.values - expected)).sum()
            if with_grad:
                scale = weight / mass
                grad = logits.mul_(scale[:, None]).sub_(teacher.mul_(weight[:, None])).to(compute)
                dh_NH[part] = grad @ head_DvH
                dw_DvH += grad.t() @ h
        ctx.save_for_backward(dh_NH, dw_DvH)
        ctx.mark_non_differentiable(best_N)
        return total.float(), best_N

    @staticmethod
    def backward(ctx, dloss, _dbest):  # type: ignore[no-untyped-def]
        dh_NH, dw_DvH = ctx.saved_tensors
        return dh_NH * dloss, dw_DvH * dloss, None, None, None, None


def ttt_loss(
    drafter: Eagle3, batch: Batch, embed_VH: Tensor, teacher: Teacher, cos_TD: Tensor, sin_TD: Tensor,
    steps: int, decay: float,
) -> tuple[Tensor, list[StepSums]]:  # fmt: skip
    """Unroll ``steps`` draft steps over ``batch``.

    Returns:
        the loss (decayed sum over steps of means over valid labels) and the sums of each step.
    """
    c, attention = drafter.config, drafter.midlayer.self_attn
    T = batch.ids_BT.shape[1]
    probabilities_LDv = teacher.probabilities(batch.final_LH)
    valid_L = teacher.draft_id_V[batch.label_L]

    feature_BTH = drafter.fc(batch.aux_BTA)
    # column t reads the embedding of token t + 1; the last column has none and no label either
    next_BTH = F.embedding(F.pad(batch.ids_BT[:, 1:], (0, 1)), embed_VH)
    wide_BT2H = drafter.attention_input(next_BTH, feature_BTH)
    k0_BGTD = rotate_halves(_heads(attention.k_proj(wide_BT2H), c.head_dim), cos_TD[:T], sin_TD[:T])
    v0_BGTD = _heads(attention.v_proj(wide_BT2H), c.head_dim)
    group = c.num_attention_heads // c.num_key_value_heads
    first_keys = _FirstKeys(k0_BGTD.to(drafter.compute), v0_BGTD.to(drafter.compute), batch, group)

    asked = batch.asked.chosen(in_tiles(torch.arange(len(batch.asked))))
    at = (asked.row_Q, asked.column_Q)
    feature_QH, wide_Q = feature_BTH[at], wide_BT2H[at]
    run_Q = torch.ones(len(asked), dtype=torch.bool)
    own: list[tuple[Tensor, Tensor]] = []
    output_QH = feature_QH
    total = feature_QH.new_zeros(())
    sums: list[StepSums] = []
    for k in range(steps):
        if k:
            index = in_tiles((asked.left_Q > k).nonzero()[:, 0])
            if not len(index):
                break
            asked, run_Q = asked.chosen(index), run_Q[index]
            feature_QH = output_QH[index]
            own = [(key[index], value[index]) for key, value in own]
            token_Q = batch.ids_BT[asked.row_Q, asked.column_Q + 1 + k]
            wide_Q = drafter.attention_input(F.embedding(token_Q, embed_VH), feature_QH)
            cos_Q, sin_Q = cos_TD[asked.column_Q + k][:, None], sin_TD[asked.column_Q + k][:, None]
            key = rotate_halves(attention.k_proj(wide_Q).view(len(asked), -1, c.head_dim), cos_Q, sin_Q)
            own.append((key, attention.v_proj(wide_Q).view(len(asked), -1, c.head_dim)))
        cos_Q, sin_Q = cos_TD[asked.column_Q + k][:, None], sin_TD[asked.column_Q + k][:, None]
        query_QND = rotate_halves(attention.q_proj(wide_Q).view(len(asked), -1, c.head_dim), cos_Q, sin_Q)
        mixed_QA = first_keys.attend(query_QND, asked.row_Q, asked.column_Q, own)
        output_QH = drafter.finish(feature_QH, mixed_QA)

        label_Q = asked.first_Q + k
        draft_Q = valid_L[label_Q]
        mass_Q = asked.weight_Q * (draft_Q >= 0)
        loss, best_Q = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            drafter.norm(output_QH), drafter.lm_head.weight, probabilities_LDv, label_Q, mass_Q, drafter.compute
        )
        weight = mass_Q.sum()
        total = total + decay**k * loss / weight.clamp(min=1e-6)
        right_Q = best_Q == draft_Q
        run_Q = run_Q & right_Q
        sums.append(StepSums(float(loss.detach()), float(weight), *_counts(right_Q, run_Q, asked.answered_Q)))
    return total, sums


def _counts(right_Q: Tensor, run_Q: Tensor, answered_Q: Tensor) -> tuple[float, float, float]:
    return float((right_Q & answered_Q).sum()), float((run_Q & answered_Q).sum()), float(answered_Q.sum())


class _FirstKeys:
    """Keys and values of the first step, and how a packed set of queries attends to them."""

    def __init__(self, k_BGTD: Tensor, v_BGTD: Tensor, batch: Batch, group: int) -> None:
        self.k_BND = k_BGTD.repeat_interleave(group, 1)
        self.v_BND = v_BGTD.repeat_interleave(group, 1)
        self.group = group
        self.rows = batch.ids_BT.shape[0]
        self.place_T = torch.arange(batch.ids_BT.shape[1])

    def attend(self, query_QND: Tensor, row_Q: Tensor, column_Q: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention output ``[Q, heads * hd]``; ``own`` holds each later step's keys and values of the same columns."""
        Q, N, D = query_QND.shape
        counts_B = torch.bincount(row_Q, minlength=self.rows)
        width = whole_tiles(int(counts_B.max()))
        starts_B = counts_B.cumsum(0) - counts_B
        place_Q = torch.arange(Q) - starts_B[row_Q]
        query_BNPD = query_QND.new_zeros(self.rows, width, N, D).index_put((row_Q, place_Q), query_QND).transpose(1, 2)
        column_BP = torch.zeros(self.rows, width, dtype=torch.int64).index_put((row_Q, place_Q), column_Q)
        scores_BNPT = ((query_BNPD * D**-0.5).to(self.k_BND) @ self.k_BND.transpose(-1, -2)).float()
        future_BPT = self.place_T > column_BP[:, :, None]
        scores_BNPT = scores_BNPT.masked_fill(future_BPT[:, None], float("-inf"))
        if not own:
            mixed_BNPD = (scores_BNPT.softmax(-1).to(self.v_BND) @ self.v_BND).float()
            return mixed_BNPD.transpose(1, 2)[row_Q, place_Q].reshape(Q, N * D)
        keys_QSND = torch.stack([key.repeat_interleave(self.group, 1) for key, _ in own], 1)
        values_QSND = torch.stack([value.repeat_interleave(self.group, 1) for _, value in own], 1)
        own_QNS = torch.einsum("qnd,qsnd->qns", query_QND * D**-0.5, keys_QSND)
        own_BNPS = own_QNS.new_zeros(self.rows, width, N, len(own)).index_put((row_Q, place_Q), own_QNS).transpose(1, 2)
        share_BNPX = torch.cat([scores_BNPT, own_BNPS], -1).softmax(-1)
        share_BNPT, share_BNPS = share_BNPX.split([scores_BNPT.shape[-1], len(own)], -1)
        first_QND = (share_BNPT.to(self.v_BND) @ self.v_BND).float().transpose(1, 2)[row_Q, place_Q]
        own_QND = torch.einsum("qns,qsnd->qnd", share_BNPS.transpose(1, 2)[row_Q, place_Q], values_QSND)
        return (first_QND + own_QND).reshape(Q, N * D)


def _heads(x_BTA: Tensor, head_dim: int) -> Tensor:
    B, T, _ = x_BTA.shape
    return x_BTA.view(B, T, -1, head_dim).transpose(1, 2)
