"""Inner loops of decoding on a CPU, compiled by numba.

Two facts shape them. A decode step with few rows is bound by the bytes of the weights, so these stay bfloat16 in memory
and are widened in registers: half the traffic of float32, with float32 arithmetic and no rounding of activations. And
attention with one query per sequence is bound by the bytes of the cache, so keys are stored transposed, ``[hd, T]``,
which makes scores a sum of scaled contiguous rows.

Every row is computed at its own length and alone, so an answer does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

f32 = np.float32
BLOCK = 96
"""Outputs that one thread computes at a time."""


@intrinsic
def widen(typing_context: Any, x: Any) -> Any:
    """A stored weight as float32: bfloat16 bits (uint16) are shifted into place, float32 passes through."""
    if isinstance(x, types.Float):
        return types.float32(x), lambda context, builder, signature, args: args[0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(types.uint16), codegen


@njit(fastmath=True, error_model="numpy", cache=True)
def linear_part(w_NK: Any, x_MK: Any, y_MN: Any, begin: int, end: int) -> None:
    """Columns ``begin`` to ``end`` of :func:`linear`; each weight is read once per four rows."""
    K = w_NK.shape[1]
    M = x_MK.shape[0]
    m = 0
    while M - m >= 4:
        x0, x1, x2, x3 = x_MK[m], x_MK[m + 1], x_MK[m + 2], x_MK[m + 3]
        for n in range(begin, end):
            w = w_NK[n]
            a = f32(0)
            b = f32(0)
            c = f32(0)
            d = f32(0)
            for k in range(K):
                v = widen(w[k])
                a += v * x0[k]
                b += v * x1[k]
                c += v * x2[k]
                d += v * x3[k]
            y_MN[m, n] = a
            y_MN[m + 1, n] = b
            y_MN[m + 2, n] = c
            y_MN[m + 3, n] = d
        m += 4
    if M - m == 3:
        x0, x1, x2 = x_MK[m], x_MK[m + 1], x_MK[m + 2]
        for n in range(begin, end):
            w = w_NK[n]
            a = f32(0)
            b = f32(0)
            c = f32(0)
            for k in range(K):
                v = widen(w[k])
                a += v * x0[k]
                b += v * x1[k]
                c += v * x2[k]
            y_MN[m, n] = a
            y_MN[m + 1, n] = b
            y_MN[m + 2, n] = c
    elif M - m == 2:
        x0, x1 = x_MK[m], x_MK[m + 1]
        for n in range(begin, end):
            w = w_NK[n]
            a = f32(0)
            b = f32(0)
            for k in range(K):
                v = widen(w[k])
                a += v * x0[k]
                b += v * x1[k]
            y_MN[m, n] = a
            y_MN[m + 1, n] = b
    elif M - m == 1:
        x0 = x_MK[m]
        for n in range(begin, end):
            w = w_NK[n]
            a = f32(0)
            for k in range(K):
                a += widen(w[k]) * x0[k]
            y_MN[m, n] = a


@njit(parallel=True, error_model="numpy", cache=True)
def linear(w_NK: Any, x_MK: Any, y_MN: Any) -> None:
    """``y = x @ w.T`` for few rows, outputs shared among numba's threads.

    Every output is one sum over K by one thread, so its bits do not depend on how many threads there are.
    """
    N = w_NK.shape[0]
    for block in prange((N + BLOCK - 1) // BLOCK):
        linear_part(w_NK, x_MK, y_MN, block * BLOCK, min(N, (block + 1) * BLOCK))


@njit(fastmath=True, error_model="numpy", cache=True)
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


@njit(fastmath=True, error_model="numpy", cache=True)
def rotate(x: Any, cos: Any, sin: Any) -> None:
    """Rotary position embedding in place: halves are rotated against each other (the Llama layout)."""
    half = cos.shape[0]
    for i in range(half):
        a = x[i]
        b = x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@njit(fastmath=True, error_model="numpy", cache=True)
def attend(q: Any, k_DT: Any, v_TD: Any, length: int, out: Any, scores: Any) -> None:
    """Attention of one query head over the first ``length`` positions of its cache."""
    D = q.shape[0]
    scale = f32(1.0 / np.sqrt(D))
    for t in range(length):
        scores[t] = f32(0)
    for d in range(0, D, 8):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        q4, q5, q6, q7 = q[d + 4], q[d + 5], q[d + 6], q[d + 7]
        k0, k1, k2, k3 = k_DT[d], k_DT[d + 1], k_DT[d + 2], k_DT[d + 3]
        k4, k5, k6, k7 = k_DT[d + 4], k_DT[d + 5], k_DT[d + 6], k_DT[d + 7]
        for t in range(length):
            scores[t] += (q0 * k0[t] + q1 * k1[t] + q2 * k2[t] + q3 * k3[t]
                          + q4 * k4[t] + q5 * k5[t] + q6 * k6[t] + q7 * k7[t])  # fmt: skip
    top = scores[0]
    for t in range(1, length):
        top = max(top, scores[t])
    total = f32(0)
    for t in range(length):
        e = np.exp((scores[t] - top) * scale)
        scores[t] = e
        total += e
    share = f32(1) / total
    for d in range(D):
        out[d] = f32(0)
    t = 0
    while t + 8 <= length:
        p0, p1, p2, p3 = scores[t] * share, scores[t + 1] * share, scores[t + 2] * share, scores[t + 3] * share
        p4, p5, p6, p7 = scores[t + 4] * share, scores[t + 5] * share, scores[t + 6] * share, scores[t + 7] * share
        v0, v1, v2, v3 = v_TD[t], v_TD[t + 1], v_TD[t + 2], v_TD[t + 3]
        v4, v5, v6, v7 = v_TD[t + 4], v_TD[t + 5], v_TD[t + 6], v_TD[t + 7]
        for d in range(D):
            out[d] += (p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d]
                       + p4 * v4[d] + p5 * v5[d] + p6 * v6[d] + p7 * v7[d])  # fmt: skip
        t += 8
    while t < length:
        p = scores[t] * share
        v = v_TD[t]
        for d in range(D):
            out[d] += p * v[d]
        t += 1


@njit(fastmath=True, error_model="numpy", cache=True)
def append_row(qkv: Any, position: int, k_GDT: Any, v_GTD: Any, cos_TD: Any, sin_TD: Any) -> None:
    """Rotate one token's queries and keys in place and store keys and values in the cache at ``position``.

    ``qkv`` is ``[(n_heads + 2 * n_kv) * hd]``.
    """
    G, D, _ = k_GDT.shape
    heads = qkv.shape[0] // D - 2 * G
    cos = cos_TD[position]
    sin = sin_TD[position]
    for h in range(heads + G):
        rotate(qkv[h * D : (h + 1) * D], cos, sin)
    for g in range(G):
        for d in range(D):
            k_GDT[g, d, position] = qkv[(heads + g) * D + d]
            v_GTD[g, position, d] = qkv[(heads + G + g) * D + d]


@njit(fastmath=True, error_model="numpy", cache=True)
def attend_batch(
    qkv_BN: Any, slots_B: Any, lengths_B: Any, k_SGDT: Any, v_SGTD: Any, cos_TD: Any, sin_TD: Any, out_BN: Any
) -> None:
    """Append and attend for one token of each of many sequences, each in its own cache slot."""
    G, D = k_SGDT.shape[1], k_SGDT.shape[2]
    heads = qkv_BN.shape[1] // D - 2 * G
    scores = np.empty(k_SGDT.shape[3], np.float32)
    for b in range(slots_B.shape[0]):
        s = slots_B[b]
        append_row(qkv_BN[b], lengths_B[b], k_SGDT[s], v_SGTD[s], cos_TD, sin_TD)
        for h in range(heads):
            part = slice(h * D, (h + 1) * D)
            g = h * G // heads
            attend(qkv_BN[b, part], k_SGDT[s, g], v_SGTD[s, g], lengths_B[b] + 1, out_BN[b, part], scores)


@njit(parallel=True, error_model="numpy", cache=True)
def attend_rows(qkv_MN: Any, start: int, k_GDT: Any, v_GTD: Any, cos_TD: Any, sin_TD: Any, out_MN: Any) -> None:
    """Append ``M`` consecutive tokens of one sequence, then attend, heads shared among numba's threads."""
    G, D, _ = k_GDT.shape
    M = qkv_MN.shape[0]
    heads = qkv_MN.shape[1] // D - 2 * G
    for m in range(M):
        append_row(qkv_MN[m], start + m, k_GDT, v_GTD, cos_TD, sin_TD)
    for item in prange(M * heads):
        m = item // heads
        h = item % heads
        scores = np.empty(start + m + 1, np.float32)
        g = h * G // heads
        attend(
            qkv_MN[m, h * D : (h + 1) * D], k_GDT[g], v_GTD[g], start + m + 1, out_MN[m, h * D : (h + 1) * D], scores
        )


@njit(fastmath=True, error_model="numpy", cache=True)
def swiglu(gate_up_MN: Any, out_MI: Any) -> None:
    """``silu(gate) * up`` for rows that hold gate and up side by side."""
    width = out_MI.shape[1]
    for m in range(out_MI.shape[0]):
        for i in range(width):
            g = gate_up_MN[m, i]
            out_MI[m, i] = g / (f32(1) + np.exp(-g)) * gate_up_MN[m, width + i]


@njit(fastmath=True, error_model="numpy", cache=True)
def decoder_layer(
    x_MH: Any, start: int, attention_norm_H: Any, qkv_NH: Any, o_HN: Any, mlp_norm_H: Any, gate_up_NH: Any,
    down_HI: Any, k_GDT: Any, v_GTD: Any, cos_TD: Any, sin_TD: Any, eps: float,
) -> None:  # fmt: skip
    """One Llama layer, in place, for ``M`` consecutive tokens of one sequence that begin at position ``start``."""
    M, H = x_MH.shape
    normed = np.empty((M, H), np.float32)
    rms_norm(x_MH, attention_norm_H, eps, normed)
    qkv = np.empty((M, qkv_NH.shape[0]), np.float32)
    linear(qkv_NH, normed, qkv)
    mixed = np.empty((M, o_HN.shape[1]), np.float32)
    attend_rows(qkv, start, k_GDT, v_GTD, cos_TD, sin_TD, mixed)
    delta = np.empty((M, H), np.float32)
    linear(o_HN, mixed, delta)
    add(x_MH, delta)
    rms_norm(x_MH, mlp_norm_H, eps, normed)
    gate_up = np.empty((M, gate_up_NH.shape[0]), np.float32)
    linear(gate_up_NH, normed, gate_up)
    hidden = np.empty((M, down_HI.shape[1]), np.float32)
    swiglu(gate_up, hidden)
    linear(down_HI, hidden, delta)
    add(x_MH, delta)


@njit(fastmath=True, error_model="numpy", cache=True)
def add(x_MH: Any, delta_MH: Any) -> None:
    """``x += delta``."""
    for m in range(x_MH.shape[0]):
        for i in range(x_MH.shape[1]):
            x_MH[m, i] += delta_MH[m, i]


@njit(fastmath=True, error_model="numpy", cache=True)
def decoder(
    x_MH: Any, start: int, attention_norm_LH: Any, qkv_LNH: Any, o_LHN: Any, mlp_norm_LH: Any, gate_up_LNH: Any,
    down_LHI: Any, k_LGDT: Any, v_LGTD: Any, cos_TD: Any, sin_TD: Any, eps: float, taps_A: Any, aux_MAH: Any,
) -> None:  # fmt: skip
    """All layers, in place; the residual stream entering layer ``taps_A[a]`` is copied to ``aux_MAH[:, a]``."""
    for layer in range(qkv_LNH.shape[0]):
        for a in range(taps_A.shape[0]):
            if taps_A[a] == layer:
                aux_MAH[:, a] = x_MH
        decoder_layer(
            x_MH, start, attention_norm_LH[layer], qkv_LNH[layer], o_LHN[layer], mlp_norm_LH[layer],
            gate_up_LNH[layer], down_LHI[layer], k_LGDT[layer], v_LGTD[layer], cos_TD, sin_TD, eps,
        )  # fmt: skip
