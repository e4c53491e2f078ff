"""Matrix products for any number of rows, from one to a prompt: the bulk of what decoding on a CPU costs.

A library's product is built for many rows. With few it is bound by overheads of its own (four rows of SmolLM2 take it
four times as long as the weights' bytes do), and it picks its kernel by the number of rows, so that a row's last bits
depend on its company. Here each weight matrix is packed into panels of ``LANES`` outputs, ``[P, K, LANES]``, which one
pass over ``K`` reads once, front to back, and every output is one chain of multiply-adds in the order of ``K``: the
bits of a row are its own, whatever else is in the batch and however many threads there are.

Weights stay bfloat16 in memory and are widened in registers: half the traffic of float32, with float32 arithmetic and
no rounding of activations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from eyrie.llama.compiled import exact_kernel

LANES = 16
"""Outputs of a panel: two registers of AVX2 or one of AVX-512."""
ROWS = 6
"""Rows of a tile: six times two accumulators, two weights and a broadcast fill the sixteen registers of AVX2."""
BLOCK = 6
"""Panels that one thread computes at a time."""
AHEAD = 1024
"""Weights are asked for so many numbers before they are used: the hardware's own prefetch ends at each page, and with
four rows or more it cost a fifth to a third."""


def pack(weight: Tensor) -> np.ndarray:
    """Panels of a weight ``[..., N, K]`` (bfloat16 or float32): ``[..., ceil(N / LANES), K, LANES]``.

    bfloat16 is kept as its bits (uint16). The last panel is filled up with zeros.
    """
    *outer, N, K = weight.shape
    panels = -(-N // LANES)
    padded = weight.new_zeros(*outer, panels * LANES, K)
    padded[..., :N, :] = weight
    packed = padded.view(*outer, panels, LANES, K).transpose(-1, -2).contiguous()
    return (packed.view(torch.uint16) if packed.dtype == torch.bfloat16 else packed).numpy()


def _tile(rows: int) -> Any:
    """An intrinsic: ``rows`` rows of x times one panel, every sum in registers from the first product to the last.

    Its arguments: the panels and where the panel begins in them; address of the first row of x and distance of rows,
    in floats; address and distance for y; how many products a sum has.
    """

    @intrinsic
    def tile(_context: Any, w_PKX: Any, begin: Any, x: Any, x_step: Any, y: Any, y_step: Any, K: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panels, begin, x, x_step, y, y_step, K = args
            word, real = ir.IntType(64), ir.FloatType()
            row_type = ir.VectorType(real, LANES)
            data = context.make_array(signature.args[0])(context, builder, panels).data
            panel = builder.gep(data, [begin])

            def row(start: Any, step: Any, r: int, kind: Any) -> Any:
                away = builder.mul(builder.mul(step, word(r)), word(4))
                return builder.inttoptr(builder.add(start, away), kind.as_pointer())

            x_rows = [row(x, x_step, r, real) for r in range(rows)]
            before, loop = builder.block, builder.append_basic_block("loop")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(word)
            sums = [builder.phi(row_type) for _ in range(rows)]
            place = builder.gep(panel, [builder.mul(k, word(LANES))])
            _prefetch(builder, builder.gep(place, [word(AHEAD)]))
            w_X = _weights(builder, place)
            new = []
            for r in range(rows):
                x_X = _splat(builder, builder.load(builder.gep(x_rows[r], [k])))
                product = builder.fmul(x_X, w_X, flags=["contract"])
                new.append(builder.fadd(product, sums[r], flags=["contract"]))
            k_next = builder.add(k, word(1))
            k.add_incoming(word(0), before)
            k.add_incoming(k_next, loop)
            for total, value in zip(sums, new, strict=True):
                total.add_incoming(row_type(None), before)
                total.add_incoming(value, loop)
            done = builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed("<", k_next, K), loop, done)
            builder.position_at_end(done)
            for r in range(rows):
                builder.store(new[r], row(y, y_step, r, row_type), align=4)
            return context.get_dummy_value()

        return types.void(w_PKX, *[types.intp] * 6), codegen

    return tile


def _prefetch(builder: Any, place: Any) -> None:
    """Ask for the cache line at ``place``: a hint, which never faults, even beyond the array's end."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    name = "llvm.prefetch.p0i8"
    hint = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(hint, [builder.bitcast(place, byte), number(0), number(3), number(1)])  # to read, keep, data


def _weights(builder: Any, place: Any) -> Any:
    """One row of a panel as float32: bfloat16 bits are shifted into place."""
    stored = place.type.pointee
    row = builder.load(builder.bitcast(place, ir.VectorType(stored, LANES).as_pointer()), align=2)
    if not isinstance(stored, ir.IntType):
        return row
    bits_type = ir.VectorType(ir.IntType(32), LANES)
    bits = builder.shl(builder.zext(row, bits_type), bits_type([16] * LANES))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), LANES))


def _splat(builder: Any, value: Any) -> Any:
    """``value`` in every lane."""
    index = ir.IntType(32)
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, value, index(0))
    return builder.shuffle_vector(first, nothing, ir.VectorType(index, LANES)([0] * LANES))


tile1, tile2, tile3, tile4, tile5, tile6 = (_tile(rows) for rows in range(1, ROWS + 1))


@exact_kernel
def multiply_panel(w_PKX: Any, p: int, x_MK: Any, y: int, y_step: int) -> None:
    """Panel ``p`` for all rows of x; the first output goes to address ``y``, rows lie ``y_step`` floats apart.

    x may be narrower than the panel is long: its K then is the number of products.
    """
    M, K = x_MK.shape
    begin = p * w_PKX.shape[1] * LANES
    x, x_step = x_MK.ctypes.data, x_MK.strides[0] // 4
    m = 0
    while M - m >= ROWS:
        tile6(w_PKX, begin, x + m * x_step * 4, x_step, y + m * y_step * 4, y_step, K)
        m += ROWS
    x += m * x_step * 4
    y += m * y_step * 4
    if M - m == 5:
        tile5(w_PKX, begin, x, x_step, y, y_step, K)
    elif M - m == 4:
        tile4(w_PKX, begin, x, x_step, y, y_step, K)
    elif M - m == 3:
        tile3(w_PKX, begin, x, x_step, y, y_step, K)
    elif M - m == 2:
        tile2(w_PKX, begin, x, x_step, y, y_step, K)
    elif M - m == 1:
        tile1(w_PKX, begin, x, x_step, y, y_step, K)


@exact_kernel
def multiply_panels(w_PKX: Any, x_MK: Any, y_MN: Any, begin: int, end: int) -> None:
    """Panels ``begin`` to ``end`` of :func:`linear`."""
    M, N = y_MN.shape
    y_step = y_MN.strides[0] // 4
    for p in range(begin, end):
        width = min(LANES, N - p * LANES)
        if width == LANES:
            multiply_panel(w_PKX, p, x_MK, y_MN.ctypes.data + p * LANES * 4, y_step)
        else:  # the last panel reaches beyond y's rows
            whole = np.empty((M, LANES), np.float32)
            multiply_panel(w_PKX, p, x_MK, whole.ctypes.data, LANES)
            for m in range(M):
                for n in range(width):
                    y_MN[m, p * LANES + n] = whole[m, n]


@exact_kernel(parallel=True)
def linear(w_PKX: Any, x_MK: Any, y_MN: Any) -> None:
    """``y = x @ w.T``, panels shared among numba's threads.

    Args:
        w_PKX: packed weight (:func:`pack`).
        x_MK: float32 ``[M, K]``, rows contiguous.
        y_MN: float32 ``[M, N]``, rows contiguous; N may end within the last panel.
    """
    P = w_PKX.shape[0]
    for block in prange((P + BLOCK - 1) // BLOCK):
        multiply_panels(w_PKX, x_MK, y_MN, block * BLOCK, min(P, (block + 1) * BLOCK))
