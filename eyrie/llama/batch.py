"""Many sequences, one token each: the decode loop of the in-process engine.

An answer must not depend on its company, or a killed and resumed run would differ from an undisturbed one. So each
prompt is prefilled alone, attention reads each cache at its own length, and the matrix products always see a number of
rows for which the machine's library gives each row the same bits (:func:`row_quantum` finds it).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie.llama import kernels
from eyrie.llama.weights import LlamaWeights, rotary, rotate_halves

GROW = 64
"""Cache positions are allocated in steps of this many."""


class BatchDecoder:
    """Caches and steps for up to ``slots`` sequences.

    Args:
        weights: the target's weights.
        slots: how many sequences are decoded together.
        dtype: dtype of the matrix products; attention and norms are float32.
    """

    def __init__(self, weights: LlamaWeights, slots: int, dtype: torch.dtype = torch.float32) -> None:
        config = weights.config
        self.config = config
        self.slots = slots
        self.dtype = dtype
        self.embed_VH = weights.embed_VH.to(dtype)
        self.head_VH = self.embed_VH if config.tied else weights.head_VH.to(dtype)
        self.final_norm_H = weights.final_norm_H
        self.attention_norm_LH = weights.attention_norm_LH
        self.mlp_norm_LH = weights.mlp_norm_LH
        self.qkv = list(weights.qkv_LNH.to(dtype))
        self.o = list(weights.o_LHN.to(dtype))
        self.gate_up = list(weights.gate_up_LNH.to(dtype))
        self.down = list(weights.down_LHI.to(dtype))
        self.capacity = 0
        self.k_LSGDT = self.v_LSGTD = torch.empty(0)
        self.cos_TD = self.sin_TD = torch.empty(0)
        self.lengths_S = torch.zeros(slots, dtype=torch.int64)
        self.quantum = row_quantum([self.qkv[0], self.o[0], self.gate_up[0], self.down[0], self.head_VH], slots)

    def reserve(self, length: int) -> None:
        """Make every slot hold ``length`` positions; what is cached is kept."""
        if length <= self.capacity:
            return
        capacity = -(-length // GROW) * GROW
        c = self.config
        # not cleared: nothing reads a position before it is written, and untouched pages cost neither time nor memory
        k = torch.empty(c.num_layers, self.slots, c.num_kv_heads, c.head_dim, capacity)
        v = torch.empty(c.num_layers, self.slots, c.num_kv_heads, capacity, c.head_dim)
        for slot in self.lengths_S.nonzero()[:, 0].tolist():
            cached = int(self.lengths_S[slot])
            k[:, slot, :, :, :cached] = self.k_LSGDT[:, slot, :, :, :cached]
            v[:, slot, :, :cached] = self.v_LSGTD[:, slot, :, :cached]
        self.k_LSGDT, self.v_LSGTD, self.capacity = k, v, capacity
        self.cos_TD, self.sin_TD = rotary(capacity, c.head_dim, c.rope_theta)

    def prefill(self, slot: int, ids: list[int]) -> Tensor:
        """Fill ``slot`` with a prompt; returns the logits ``[V]`` (float32) after its last token."""
        c = self.config
        T = len(ids)
        x_TH = F.embedding(torch.tensor(ids), self.embed_VH).float()
        cos_TD, sin_TD = self.cos_TD[:T], self.sin_TD[:T]
        heads, groups, D = c.num_heads, c.num_kv_heads, c.head_dim
        for layer in range(c.num_layers):
            normed = F.rms_norm(x_TH, (c.hidden_size,), self.attention_norm_LH[layer], c.rms_norm_eps)
            qkv = (
                F.linear(normed.to(self.dtype), self.qkv[layer]).float().view(T, heads + 2 * groups, D).transpose(0, 1)
            )
            q = rotate_halves(qkv[:heads], cos_TD, sin_TD)
            k = rotate_halves(qkv[heads : heads + groups], cos_TD, sin_TD)
            v = qkv[heads + groups :].contiguous()
            self.k_LSGDT[layer, slot, :, :, :T] = k.transpose(1, 2)
            self.v_LSGTD[layer, slot, :, :T] = v
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            x_TH = x_TH + F.linear(mixed.transpose(0, 1).reshape(T, heads * D).to(self.dtype), self.o[layer]).float()
            x_TH = x_TH + self._mlp(x_TH, layer)
        self.lengths_S[slot] = T
        return self._logits(x_TH[-1:].expand(self.quantum, -1))[0]

    def step(self, slots_B: Tensor, ids_B: Tensor) -> Tensor:
        """Append one token to each slot; returns logits ``[B, V]`` float32.

        Args:
            slots_B: int64 ``[B]``, distinct.
            ids_B: int64 ``[B]``, the tokens to append.
        """
        c = self.config
        B = len(slots_B)
        padded = -(-B // self.quantum) * self.quantum
        lengths_B = self.lengths_S[slots_B]
        x_BH = F.embedding(F.pad(ids_B, (0, padded - B)), self.embed_VH).float()
        mixed_BN = torch.zeros(padded, c.num_heads * c.head_dim)
        slots, lengths, out = slots_B.numpy(), lengths_B.numpy(), mixed_BN.numpy()
        cos, sin = self.cos_TD.numpy(), self.sin_TD.numpy()
        for layer in range(c.num_layers):
            normed = F.rms_norm(x_BH, (c.hidden_size,), self.attention_norm_LH[layer], c.rms_norm_eps)
            qkv = F.linear(normed.to(self.dtype), self.qkv[layer]).float()
            k, v = self.k_LSGDT[layer].numpy(), self.v_LSGTD[layer].numpy()
            kernels.attend_batch(qkv.numpy(), slots, lengths, k, v, cos, sin, out)
            x_BH = x_BH + F.linear(mixed_BN.to(self.dtype), self.o[layer]).float()
            x_BH = x_BH + self._mlp(x_BH, layer)
        self.lengths_S[slots_B] += 1
        return self._logits(x_BH)[:B]

    def _mlp(self, x_BH: Tensor, layer: int) -> Tensor:
        normed = F.rms_norm(x_BH, (self.config.hidden_size,), self.mlp_norm_LH[layer], self.config.rms_norm_eps)
        gate, up = F.linear(normed.to(self.dtype), self.gate_up[layer]).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down[layer]).float()

    def _logits(self, x_BH: Tensor) -> Tensor:
        normed = F.rms_norm(x_BH, (self.config.hidden_size,), self.final_norm_H, self.config.rms_norm_eps)
        return F.linear(normed.to(self.dtype), self.head_VH).float()


def row_quantum(weights: list[Tensor], rows: int) -> int:
    """Smallest q such that batches of q, 2q, 3q, ... rows give each row the bits that a full batch gives it.

    A matrix library picks its kernel by shape, and kernels differ in the order of their sums. Batches are padded to a
    multiple of q, so that a row's bits depend on the row alone. ``rows`` itself when nothing smaller will do.
    """
    for quantum in (4, 8, 16, 32):
        if quantum >= rows:
            break
        full = -(-rows // quantum) * quantum  # what a full batch is padded to
        sizes = sorted({n for n in (quantum, 2 * quantum, 3 * quantum, full - quantum) if 0 < n < full})
        generator = torch.Generator().manual_seed(0)
        probes = []
        for weight in weights:
            x = torch.randn(full, weight.shape[1], generator=generator).to(weight.dtype)
            probes.append((weight, x, F.linear(x, weight)))
        if all(torch.equal(F.linear(x[-n:], w), y[-n:]) for w, x, y in probes for n in sizes):
            return quantum
    return rows
