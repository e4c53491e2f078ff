"""One sequence, a few tokens at a time: what plain and speculative decoding both stand on.

The weights stay as stored (bfloat16) and arithmetic is float32, so a step costs what its bytes cost and a verify of
K + 1 tokens costs little more than one token.
"""

from __future__ import annotations

import numpy as np

from eyrie.llama import kernels
from eyrie.llama.matmul import linear, pack
from eyrie.llama.weights import LlamaWeights, storage, widened_rows

FloatArray = np.ndarray


def packed_layers(weights: LlamaWeights) -> tuple[np.ndarray, ...]:
    """What :func:`eyrie.llama.kernels.decoder` wants of all layers, in its order."""
    return (
        weights.attention_norm_LH.numpy(), pack(weights.qkv_LNH), pack(weights.o_LHN),
        weights.mlp_norm_LH.numpy(), pack(weights.gate_up_LNH), pack(weights.down_LHI),
    )  # fmt: skip


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
        self.embed_VH, self.head_PKX = storage(weights.embed_VH), pack(weights.head_VH)
        self.layers = packed_layers(weights)
        self.final_norm_H = weights.final_norm_H.numpy()
        self.capacity = capacity
        self.k_LSGPDX, self.v_LSGWTX = kernels.empty_caches(c.num_layers, 1, c.num_kv_heads, c.head_dim, capacity)
        self.cos_TD, self.sin_TD = (table.numpy() for table in weights.rotary(capacity))
        self.length = 0

    def embed(self, ids: list[int]) -> FloatArray:
        """Token embeddings ``[M, H]`` float32."""
        return widened_rows(self.embed_VH, ids)

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
        slots_M, positions_M = np.zeros(len(ids), np.int64), np.arange(self.length, self.length + len(ids))
        kernels.decoder(
            x_MH, slots_M, positions_M, *self.layers, self.k_LSGPDX, self.v_LSGWTX, self.cos_TD, self.sin_TD,
            c.rms_norm_eps, self.taps_A, aux_MAH,
        )  # fmt: skip
        self.length += len(ids)
        tail_MH = x_MH[logits_from:]
        normed_MH = np.empty_like(tail_MH)
        kernels.rms_norm(tail_MH, self.final_norm_H, c.rms_norm_eps, normed_MH)
        logits_MV = np.empty((len(tail_MH), c.vocab_size), np.float32)
        linear(self.head_PKX, normed_MH, logits_MV)
        return logits_MV, aux_MAH

    def rewind(self, length: int) -> None:
        """Forget every token from position ``length`` on (drafted tokens that were not accepted)."""
        self.length = length
