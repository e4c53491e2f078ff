"""Many sequences, one token each: the decode loop of the in-process engine.

An answer must not depend on its company, or a killed and resumed run would differ from an undisturbed one. So each
prompt is prefilled alone, attention reads each cache at its own length, and a matrix product gives each row the same
bits in any number of rows: Eyrie's own (:mod:`eyrie.llama.matmul`) does by construction, the library's, which a machine
with bfloat16 units is better served by, at multiples of a number of rows that :func:`row_quantum` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie.llama import kernels
from eyrie.llama.matmul import LANES, linear, pack
from eyrie.llama.sequence import FloatArray, packed_layers
from eyrie.llama.weights import LlamaConfig, LlamaWeights, rotary, storage, widened_rows

GROW = 4 * LANES
"""Cache positions are allocated in steps of this many."""


class Caches:
    """Keys and values of all slots (:func:`eyrie.llama.kernels.empty_caches`), with the rotary tables."""

    def __init__(self, config: LlamaConfig, slots: int) -> None:
        self.config, self.slots, self.capacity = config, slots, 0
        self.k_LSGPDX = self.v_LSGWTX = self.cos_TD = self.sin_TD = np.empty(0, np.float32)

    def reserve(self, length: int, lengths_S: Sequence[int]) -> None:
        """Make every slot hold ``length`` positions; the first ``lengths_S[s]`` of slot s are kept."""
        if length <= self.capacity:
            return
        capacity = -(-length // GROW) * GROW
        c = self.config
        k, v = kernels.empty_caches(c.num_layers, self.slots, c.num_kv_heads, c.head_dim, capacity)
        for slot, cached in enumerate(lengths_S):
            if cached:
                panels = -(-cached // LANES)
                k[:, slot, :, :panels] = self.k_LSGPDX[:, slot, :, :panels]
                v[:, slot, :, :, :cached] = self.v_LSGWTX[:, slot, :, :, :cached]
        self.k_LSGPDX, self.v_LSGWTX, self.capacity = k, v, capacity
        self.cos_TD, self.sin_TD = (table.numpy() for table in rotary(capacity, c.head_dim, c.rope_theta))

    def copy(self, source: int, slot: int, length: int) -> None:
        """Make the first ``length`` positions of ``slot`` those of ``source``."""
        panels = -(-length // LANES)
        self.k_LSGPDX[:, slot, :, :panels] = self.k_LSGPDX[:, source, :, :panels]
        self.v_LSGWTX[:, slot, :, :, :length] = self.v_LSGWTX[:, source, :, :, :length]


class Layers(Protocol):
    """All layers and the head, for rows of any slots and positions.

    ``any_rows`` says whether a row has the same bits in any number of rows, or only at multiples of a quantum.
    """

    any_rows: bool

    def run(self, x_MH: FloatArray, slots_M: FloatArray, positions_M: FloatArray, caches: Caches) -> None:
        """Append the rows to their slots; ``x_MH`` (float32) becomes what enters the final norm."""
        ...

    def logits(self, x_MH: FloatArray) -> Tensor:
        """``[M, V]`` float32 of what :meth:`run` left."""
        ...


class PackedLayers:
    """float32 arithmetic by Eyrie's own loops."""

    any_rows = True

    def __init__(self, weights: LlamaWeights) -> None:
        self.config = weights.config
        self.final_norm_H = weights.final_norm_H.numpy()
        self.layers, self.head_PKX = packed_layers(weights), pack(weights.head_VH)

    def run(self, x_MH: FloatArray, slots_M: FloatArray, positions_M: FloatArray, caches: Caches) -> None:
        no_taps, no_aux = np.empty(0, np.int64), np.empty((len(x_MH), 0, x_MH.shape[1]), np.float32)
        kernels.decoder(
            x_MH, slots_M, positions_M, *self.layers, caches.k_LSGPDX, caches.v_LSGWTX, caches.cos_TD, caches.sin_TD,
            self.config.rms_norm_eps, no_taps, no_aux,
        )  # fmt: skip

    def logits(self, x_MH: FloatArray) -> Tensor:
        normed_MH = np.empty_like(x_MH)
        kernels.rms_norm(x_MH, self.final_norm_H, self.config.rms_norm_eps, normed_MH)
        logits_MV = np.empty((len(x_MH), self.config.vocab_size), np.float32)
        linear(self.head_PKX, normed_MH, logits_MV)
        return torch.from_numpy(logits_MV)


class LibraryLayers:
    """Matrix products in ``dtype`` by torch, which uses the machine's bfloat16 units; the rest in float32."""

    any_rows = False

    def __init__(self, weights: LlamaWeights, slots: int, dtype: torch.dtype) -> None:
        self.config, self.dtype = weights.config, dtype
        self.weights = weights
        self.head_VH = weights.head_VH.to(dtype)
        self.qkv, self.o = list(weights.qkv_LNH.to(dtype)), list(weights.o_LHN.to(dtype))
        self.gate_up, self.down = list(weights.gate_up_LNH.to(dtype)), list(weights.down_LHI.to(dtype))
        self.quantum = row_quantum([self.qkv[0], self.o[0], self.gate_up[0], self.down[0], self.head_VH], slots)

    def run(self, x_MH: FloatArray, slots_M: FloatArray, positions_M: FloatArray, caches: Caches) -> None:
        c, weights = self.config, self.weights
        M = len(x_MH)
        x = self._padded(x_MH)
        mixed = np.zeros((len(x), c.num_heads * c.head_dim), np.float32)
        for layer in range(c.num_layers):
            qkv = self._product(self._norm(x, weights.attention_norm_LH[layer]), self.qkv[layer])
            kernels.attend_tokens(
                qkv.numpy()[:M], slots_M, positions_M, caches.k_LSGPDX[layer], caches.v_LSGWTX[layer],
                caches.cos_TD, caches.sin_TD, mixed[:M],
            )  # fmt: skip
            x = x + self._product(torch.from_numpy(mixed), self.o[layer])
            normed = self._norm(x, weights.mlp_norm_LH[layer])
            gate, up = F.linear(normed.to(self.dtype), self.gate_up[layer]).chunk(2, dim=-1)
            x = x + self._product(F.silu(gate).mul_(up), self.down[layer])
        x_MH[:] = x[:M].numpy()

    def logits(self, x_MH: FloatArray) -> Tensor:
        normed = self._norm(self._padded(x_MH), self.weights.final_norm_H)
        return self._product(normed, self.head_VH)[: len(x_MH)]

    def _padded(self, x_MH: FloatArray) -> Tensor:
        return F.pad(torch.from_numpy(x_MH), (0, 0, 0, -len(x_MH) % self.quantum))

    def _norm(self, x: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight_H, self.config.rms_norm_eps)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight).float()


class BatchDecoder:
    """Caches and steps for up to ``slots`` sequences.

    Args:
        weights: the target's weights.
        slots: how many sequences are decoded together.
        dtype: dtype of the matrix products; attention and norms are float32.
    """

    def __init__(self, weights: LlamaWeights, slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.slots = slots
        self.embed_VH = storage(weights.embed_VH)
        self.layers: Layers = PackedLayers(weights) if dtype == torch.float32 else LibraryLayers(weights, slots, dtype)
        self.caches = Caches(weights.config, slots)
        self.lengths_S = np.zeros(slots, np.int64)
        self.prompts_S: list[list[int]] = [[] for _ in range(slots)]

    @property
    def capacity(self) -> int:
        """Positions that every slot holds."""
        return self.caches.capacity

    def reserve(self, length: int) -> None:
        """Make every slot hold ``length`` positions; what is cached is kept."""
        self.caches.reserve(length, self.lengths_S.tolist())

    def prefill(self, slot: int, ids: list[int]) -> Tensor:
        """Fill ``slot`` with a prompt; returns the logits ``[V]`` (float32) after its last token.

        What the prompt has in common with one that stands in some slot (a system prompt, mostly) is copied from there,
        where that changes no bit.
        """
        T = len(ids)
        self._fits(T)
        shared = 0
        if self.layers.any_rows:
            common, source = max((common_prefix(prompt, ids), s) for s, prompt in enumerate(self.prompts_S))
            shared = min(common, T - 1)  # the last token's logits are asked for
            if source != slot:
                self.caches.copy(source, slot, shared)
        x_MH = widened_rows(self.embed_VH, ids[shared:])
        self.layers.run(x_MH, np.full(T - shared, slot), np.arange(shared, T), self.caches)
        self.lengths_S[slot], self.prompts_S[slot] = T, ids
        return self.layers.logits(x_MH[-1:])[0]

    def step(self, slots_B: Sequence[int], ids_B: Sequence[int]) -> Tensor:
        """Append one token to each slot; returns logits ``[B, V]`` float32.

        Args:
            slots_B: distinct slots.
            ids_B: the tokens to append.
        """
        slots = np.asarray(slots_B, np.int64)
        positions_B = self.lengths_S[slots]
        self._fits(int(positions_B.max()) + 1)
        x_BH = widened_rows(self.embed_VH, ids_B)
        self.layers.run(x_BH, slots, positions_B, self.caches)
        self.lengths_S[slots] += 1
        return self.layers.logits(x_BH)

    def _fits(self, length: int) -> None:
        if length > self.capacity:  # the kernels check no bounds
            raise ValueError(f"{length} tokens do not fit caches of {self.capacity} positions; call reserve first")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens ``a`` and ``b`` begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
