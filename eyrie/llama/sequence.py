"""One sequence, a few tokens at a time: what plain and speculative decoding both stand on.

The weights stay as stored (bfloat16) and arithmetic is float32, so a step costs what its bytes cost and a verify of
K + 1 tokens costs little more than one token.
"""

from __future__ import annotations

import numpy as np

from eyrie.llama import kernels
from eyrie.llama.weights import LlamaWeights, storage

FloatArray = np.ndarray


class SequenceDecoder:
    """A target with one key-value cache.

    Args:
        weights: the target's weights.
        layers: boundary ids whose residual stream :meth:`extend` returns beside the logits.
        capacity: positions the cache holds.
    """

    def __init__(self, weights: LlamaWeights, layers: tuple[int, ...], capacity: int) -> None:
        c = self.config = weights.config
        self.taps_A = np.array(layers, dtype=np.int64)
        self.embed_VH, self.head_VH = storage(weights.embed_VH), storage(weights.head_VH)
        self.layers = (
            weights.attention_norm_LH.numpy(), storage(weights.qkv_LNH), storage(weights.o_LHN),
            weights.mlp_norm_LH.numpy(), storage(weights.gate_up_LNH), storage(weights.down_LHI),
        )  # fmt: skip
        self.final_norm_H = weights.final_norm_H.numpy()
        self.k_LGDT = np.zeros((c.num_layers, c.num_kv_heads, c.head_dim, capacity), np.float32)
        self.v_LGTD = np.zeros((c.num_layers, c.num_kv_heads, capacity, c.head_dim), np.float32)
        self.cos_TD, self.sin_TD = (table.numpy() for table in weights.rotary(capacity))
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.k_LGDT.shape[3]

    def embed(self, ids: list[int]) -> FloatArray:
        """Token embeddings ``[M, H]`` float32."""
        rows = self.embed_VH[ids]
        return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows

    def extend(self, ids: list[int], *, logits_from: int = 0) -> tuple[FloatArray, FloatArray]:
        """Append ``M`` tokens.

        Returns:
            logits ``[M - logits_from, V]`` of the tokens from ``logits_from`` on, and the auxiliary hidden states
            ``[M, A, H]`` of all; both float32.

        Raises:
            ValueError: the cache has no room for them (the kernels check no bounds).
        """
        c = self.config
        if self.length + len(ids) > self.capacity:
            raise ValueError(f"{self.length} + {len(ids)} tokens do not fit a cache of {self.capacity} positions")
        x_MH = self.embed(ids)
        aux_MAH = np.empty((len(ids), len(self.taps_A), c.hidden_size), np.float32)
        kernels.decoder(
            x_MH, self.length, *self.layers, self.k_LGDT, self.v_LGTD, self.cos_TD, self.sin_TD,
            c.rms_norm_eps, self.taps_A, aux_MAH,
        )  # fmt: skip
        self.length += len(ids)
        tail_MH = x_MH[logits_from:]
        normed_MH = np.empty_like(tail_MH)
        kernels.rms_norm(tail_MH, self.final_norm_H, c.rms_norm_eps, normed_MH)
        logits_MV = np.empty((len(tail_MH), c.vocab_size), np.float32)
        kernels.linear(self.head_VH, normed_MH, logits_MV)
        return logits_MV, aux_MAH

    def rewind(self, length: int) -> None:
        """Forget every token from position ``length`` on (drafted tokens that were not accepted)."""
        self.length = length
