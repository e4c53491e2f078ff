"""Drafting at inference: the EAGLE-3 layer with its own key-value cache, few rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eyrie.drafters.eagle3 import Eagle3
from eyrie.llama.compiled import kernel
from eyrie.llama.kernels import add, attend_tokens, empty_caches, rms_norm, swiglu
from eyrie.llama.matmul import linear, pack
from eyrie.llama.weights import rotary


@kernel
def draft_rows(
    embedding_MH: Any, feature_MH: Any, slots_M: Any, columns_M: Any, input_norm_H: Any, hidden_norm_H: Any,
    qkv_PKX: Any, o_PKX: Any, mlp_norm_H: Any, gate_up_PKX: Any, down_PKX: Any, k_SGPDX: Any, v_SGWTX: Any, cos_TD: Any,
    sin_TD: Any, eps: float, out_MH: Any,
) -> None:  # fmt: skip
    """One draft layer; ``out_MH`` is the un-normed output."""
    M, H = feature_MH.shape
    width, inner = o_PKX.shape[1], down_PKX.shape[1]
    G, D = k_SGPDX.shape[1], k_SGPDX.shape[3]
    wide = np.empty((M, 2 * H), np.float32)
    rms_norm(embedding_MH, input_norm_H, eps, wide[:, :H])
    rms_norm(feature_MH, hidden_norm_H, eps, wide[:, H:])
    qkv = np.empty((M, width + 2 * G * D), np.float32)
    linear(qkv_PKX, wide, qkv)
    mixed = np.empty((M, width), np.float32)
    attend_tokens(qkv, slots_M, columns_M, k_SGPDX, v_SGWTX, cos_TD, sin_TD, mixed)
    linear(o_PKX, mixed, out_MH)
    add(out_MH, feature_MH)
    normed = np.empty((M, H), np.float32)
    rms_norm(out_MH, mlp_norm_H, eps, normed)
    gate_up = np.empty((M, 2 * inner), np.float32)
    linear(gate_up_PKX, normed, gate_up)
    hidden = np.empty((M, inner), np.float32)
    swiglu(gate_up, hidden)
    delta = np.empty((M, H), np.float32)
    linear(down_PKX, hidden, delta)
    add(out_MH, delta)


class Eagle3Decoder:
    """A drafter ready to draft for one sequence.

    Args:
        drafter: trained module; its matrices are stored as bfloat16, as an export holds them.
        capacity: columns the cache holds.
    """

    def __init__(self, drafter: Eagle3, capacity: int) -> None:
        c = self.config = drafter.config
        layer = drafter.midlayer

        def stored(*linears: torch.nn.Linear) -> np.ndarray:
            return pack(torch.cat([linear.weight.detach() for linear in linears]).bfloat16())

        def norm(module: torch.nn.RMSNorm) -> np.ndarray:
            return module.weight.detach().bfloat16().float().numpy()

        attention = layer.self_attn
        self.fc = stored(drafter.fc)
        self.layer = (
            norm(layer.input_layernorm), norm(layer.hidden_norm),
            stored(attention.q_proj, attention.k_proj, attention.v_proj), stored(attention.o_proj),
            norm(layer.post_attention_layernorm), stored(layer.mlp.gate_proj, layer.mlp.up_proj),
            stored(layer.mlp.down_proj),
        )  # fmt: skip
        self.norm_H = norm(drafter.norm)
        self.head = stored(drafter.lm_head)
        self.target_ids = drafter.target_ids().numpy()
        self.capacity = capacity
        self.k_SGPDX, self.v_SGWTX = (
            caches[0] for caches in empty_caches(1, 1, c.num_key_value_heads, c.head_dim, capacity)
        )
        self.cos_TD, self.sin_TD = (table.numpy() for table in rotary(capacity, c.head_dim, c.rope_theta))

    def fuse(self, aux_MAH: np.ndarray) -> np.ndarray:
        """``fc`` of the auxiliary hidden states ``[M, 3, H]``: the first step's features ``[M, H]``."""
        feature_MH = np.empty((len(aux_MAH), self.config.hidden_size), np.float32)
        linear(self.fc, np.ascontiguousarray(aux_MAH).reshape(len(aux_MAH), -1), feature_MH)
        return feature_MH

    def forward(self, embedding_MH: np.ndarray, feature_MH: np.ndarray, start: int) -> np.ndarray:
        """Un-normed outputs ``[M, H]`` of columns ``start, start + 1, ...``; their keys and values are cached.

        Raises:
            ValueError: the cache has no room for them (the kernels check no bounds).
        """
        rows = len(feature_MH)
        if start + rows > self.capacity:
            raise ValueError(f"column {start + rows} is beyond a cache of {self.capacity} columns")
        out_MH = np.empty_like(feature_MH)
        draft_rows(
            embedding_MH, feature_MH, np.zeros(rows, np.int64), np.arange(start, start + rows), *self.layer,
            self.k_SGPDX, self.v_SGWTX, self.cos_TD, self.sin_TD, self.config.rms_norm_eps, out_MH,
        )  # fmt: skip
        return out_MH

    def best(self, output_1H: np.ndarray) -> int:
        """Target id of the likeliest draft token after one un-normed output ``[1, H]``."""
        normed = np.empty_like(output_1H)
        rms_norm(output_1H, self.norm_H, self.config.rms_norm_eps, normed)
        logits = np.empty((1, self.config.draft_vocab_size), np.float32)
        linear(self.head, normed, logits)
        return int(self.target_ids[int(logits[0].argmax())])
