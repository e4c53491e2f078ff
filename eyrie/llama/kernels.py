"""Inner loops of decoding on a CPU, compiled by numba; the matrix products stand in :mod:`eyrie.llama.matmul`.

Attention is two matrix products with the cache as weights, so the cache is stored in panels as weights are: keys in
panels of positions, ``[P, hd, LANES]``, values in panels of the head's dimensions, ``[W, T, LANES]``. The query heads
that share keys are the rows, and each cached byte is read once for all of them.

A row is one token: it has a cache slot and a position. Consecutive tokens of one sequence (a prompt, a verify) and one
token of each of many sequences (a batch) are the same thing here. Every row is computed at its own length and alone, so
an answer does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from eyrie.llama.compiled import exact_kernel, kernel
from eyrie.llama.matmul import LANES, linear, multiply_panels

f32 = np.float32


@kernel
def rms_norm(x_MH: Any, weight_H: Any, eps: float, y_MH: Any) -> None:
    """Root-mean-square norm of each row, float32."""
    for m in range(x_MH.shape[0]):
        x = x_MH[m]
        square = f32(0)
        for i in range(x.shape[0]):
            square += x[i] * x[i]
        scale = f32(1.0 / np.sqrt(square / x.shape[0] + eps))
        for i in range(x.shape[0]):
            y_MH[m, i] = x[i] * scale * weight_H[i]


@kernel
def rotate(x: Any, cos: Any, sin: Any) -> None:
    """Rotary position embedding in place: halves are rotated against each other (the Llama layout)."""
    half = cos.shape[0]
    for i in range(half):
        a = x[i]
        b = x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@intrinsic
def float_of_bits(_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the int32 ``bits``."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@kernel
def exponential(x: Any) -> Any:
    """``exp(x)`` in float32 to two units in the last place, in plain arithmetic, so that loops of it use all lanes.

    x is two's power n times a rest within half a power: the rest by a polynomial (Cephes' ``expf``), n by its bits.
    """
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = np.floor(x * f32(1.44269504) + f32(0.5))
    r = x - n * f32(0.693359375) - n * f32(-2.12194440e-4)
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + f32(5.0000001201e-1)
    y = y * r * r + r + f32(1.0)
    return y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@kernel
def softmax(scores: Any, scale: float) -> None:
    """Softmax of ``scale * scores``, in place."""
    top = scores[0]
    for t in range(1, scores.shape[0]):
        top = max(top, scores[t])
    total = f32(0)
    for t in range(scores.shape[0]):
        scores[t] = exponential((scores[t] - top) * scale)
        total += scores[t]
    share = f32(1) / total
    for t in range(scores.shape[0]):
        scores[t] *= share


@kernel
def attend(q_RD: Any, k_PDX: Any, v_WTX: Any, length: int, out_RD: Any) -> None:
    """Attention of the query heads that share one key-value head, over the first ``length`` positions."""
    R, D = q_RD.shape
    panels = (length + LANES - 1) // LANES
    scores = np.empty((R, panels * LANES), np.float32)
    multiply_panels(k_PDX, q_RD, scores, 0, panels)
    for r in range(R):
        softmax(scores[r, :length], f32(1.0 / np.sqrt(D)))
    multiply_panels(v_WTX, scores[:, :length], out_RD, 0, v_WTX.shape[0])


@kernel
def append_row(qkv: Any, position: int, k_GPDX: Any, v_GWTX: Any, cos_TD: Any, sin_TD: Any) -> None:
    """Rotate one token's queries and keys in place and store keys and values in the cache at ``position``.

    ``qkv`` is ``[(n_heads + 2 * n_kv) * hd]``.
    """
    G, _, D, _ = k_GPDX.shape
    heads = qkv.shape[0] // D - 2 * G
    cos = cos_TD[position]
    sin = sin_TD[position]
    for h in range(heads + G):
        rotate(qkv[h * D : (h + 1) * D], cos, sin)
    for g in range(G):
        for d in range(D):
            k_GPDX[g, position // LANES, d, position % LANES] = qkv[(heads + g) * D + d]
            v_GWTX[g, d // LANES, position, d % LANES] = qkv[(heads + G + g) * D + d]


@exact_kernel(parallel=True)
def attend_tokens(
    qkv_MN: Any, slots_M: Any, positions_M: Any, k_SGPDX: Any, v_SGWTX: Any, cos_TD: Any, sin_TD: Any, out_MN: Any
) -> None:
    """Append every row to its slot's cache, then attend up to its own position; heads are shared among threads."""
    G, D = k_SGPDX.shape[1], k_SGPDX.shape[3]
    M = qkv_MN.shape[0]
    R = qkv_MN.shape[1] // D // G - 2  # query heads of a group
    for m in range(M):
        append_row(qkv_MN[m], positions_M[m], k_SGPDX[slots_M[m]], v_SGWTX[slots_M[m]], cos_TD, sin_TD)
    for item in prange(M * G):
        m = item // G
        g = item % G
        heads = slice(g * R * D, (g + 1) * R * D)
        attend(
            qkv_MN[m, heads].reshape(R, D), k_SGPDX[slots_M[m], g], v_SGWTX[slots_M[m], g], positions_M[m] + 1,
            out_MN[m, heads].reshape(R, D),
        )  # fmt: skip


@kernel
def swiglu(gate_up_MN: Any, out_MI: Any) -> None:
    """``silu(gate) * up`` for rows that hold gate and up side by side."""
    width = out_MI.shape[1]
    for m in range(out_MI.shape[0]):
        for i in range(width):
            g = gate_up_MN[m, i]
            out_MI[m, i] = g / (f32(1) + exponential(-g)) * gate_up_MN[m, width + i]


@kernel
def add(x_MH: Any, delta_MH: Any) -> None:
    """``x += delta``."""
    for m in range(x_MH.shape[0]):
        for i in range(x_MH.shape[1]):
            x_MH[m, i] += delta_MH[m, i]


@kernel
def decoder_layer(
    x_MH: Any, slots_M: Any, positions_M: Any, attention_norm_H: Any, qkv_PKX: Any, o_PKX: Any, mlp_norm_H: Any,
    gate_up_PKX: Any, down_PKX: Any, k_SGPDX: Any, v_SGWTX: Any, cos_TD: Any, sin_TD: Any, eps: float,
) -> None:  # fmt: skip
    """One Llama layer, in place."""
    M, H = x_MH.shape
    G, D = k_SGPDX.shape[1], k_SGPDX.shape[3]
    width = o_PKX.shape[1]  # heads * hd
    inner = down_PKX.shape[1]
    normed = np.empty((M, H), np.float32)
    rms_norm(x_MH, attention_norm_H, eps, normed)
    qkv = np.empty((M, width + 2 * G * D), np.float32)
    linear(qkv_PKX, normed, qkv)
    mixed = np.empty((M, width), np.float32)
    attend_tokens(qkv, slots_M, positions_M, k_SGPDX, v_SGWTX, cos_TD, sin_TD, mixed)
    delta = np.empty((M, H), np.float32)
    linear(o_PKX, mixed, delta)
    add(x_MH, delta)
    rms_norm(x_MH, mlp_norm_H, eps, normed)
    gate_up = np.empty((M, 2 * inner), np.float32)
    linear(gate_up_PKX, normed, gate_up)
    hidden = np.empty((M, inner), np.float32)
    swiglu(gate_up, hidden)
    linear(down_PKX, hidden, delta)
    add(x_MH, delta)


@kernel
def decoder(
    x_MH: Any, slots_M: Any, positions_M: Any, attention_norm_LH: Any, qkv_LPKX: Any, o_LPKX: Any, mlp_norm_LH: Any,
    gate_up_LPKX: Any, down_LPKX: Any, k_LSGPDX: Any, v_LSGWTX: Any, cos_TD: Any, sin_TD: Any, eps: float, taps_A: Any,
    aux_MAH: Any,
) -> None:  # fmt: skip
    """All layers, in place; the residual stream entering layer ``taps_A[a]`` is copied to ``aux_MAH[:, a]``."""
    for layer in range(qkv_LPKX.shape[0]):
        for a in range(taps_A.shape[0]):
            if taps_A[a] == layer:
                for m in range(x_MH.shape[0]):  # slices take ten times as long to compile
                    for i in range(x_MH.shape[1]):
                        aux_MAH[m, a, i] = x_MH[m, i]
        decoder_layer(
            x_MH, slots_M, positions_M, attention_norm_LH[layer], qkv_LPKX[layer], o_LPKX[layer], mlp_norm_LH[layer],
            gate_up_LPKX[layer], down_LPKX[layer], k_LSGPDX[layer], v_LSGWTX[layer], cos_TD, sin_TD, eps,
        )  # fmt: skip


def empty_caches(layers: int, slots: int, groups: int, head_dim: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Caches for at least ``length`` positions: keys ``[L, S, G, P, hd, LANES]``, values ``[L, S, G, W, T, LANES]``.

    Not cleared: nothing that a position holds counts before it is written, and untouched pages cost neither time nor
    memory.
    """
    panels, widths = -(-length // LANES), -(-head_dim // LANES)
    k = np.empty((layers, slots, groups, panels, head_dim, LANES), np.float32)
    return k, np.empty((layers, slots, groups, widths, panels * LANES, LANES), np.float32)
