"""The matrix product of the decoder against torch, and the bits of a row in any company."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.llama.matmul import BLOCK, LANES, ROWS, linear, pack


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 2 * ROWS + 1), outputs=st.integers(1, 70), inputs=st.integers(1, 130), half=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_linear_equals_torch(rows: int, outputs: int, inputs: int, half: bool, seed: int) -> None:
    x, w = randn(rows, inputs, seed=seed), randn(outputs, inputs, seed=seed + 1)
    if half:
        w = w.bfloat16()
    room = np.full((rows + 1, outputs), np.nan, np.float32)
    linear(pack(w), x.numpy(), room[:rows])
    np.testing.assert_allclose(room[:rows], F.linear(x.double(), w.double()).numpy(), atol=1e-4, rtol=1e-4)
    assert np.isnan(room[rows]).all(), "written beyond the last row"


def test_widening_is_exact_for_every_finite_bfloat16() -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.float().isfinite()]
    found = np.empty((1, len(values)), np.float32)
    linear(pack(values[:, None]), np.ones((1, 1), np.float32), found)
    assert np.array_equal(found[0], values.float().numpy())


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rows", range(1, 3 * ROWS))
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_place(rows: int, half: bool) -> None:
    """Verify steps of different widths and batches of different sizes must agree, or nothing would be lossless."""
    most, inputs, outputs = 3 * ROWS, 96, 50
    x, w = randn(most, inputs).numpy(), randn(outputs, inputs, seed=1)
    packed = pack(w.bfloat16() if half else w)
    whole = np.empty((most, outputs), np.float32)
    linear(packed, x, whole)
    for start in range(most - rows + 1):
        part = np.empty((rows, outputs), np.float32)
        linear(packed, x[start : start + rows], part)
        assert np.array_equal(part, whole[start : start + rows])


def test_threads_change_no_bits() -> None:
    x, packed = randn(7, 64).numpy(), pack(randn(3 * BLOCK * LANES + 5, 64, seed=1))
    found = []
    before = numba.get_num_threads()
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            found.append(np.empty((7, 3 * BLOCK * LANES + 5), np.float32))
            linear(packed, x, found[-1])
    finally:
        numba.set_num_threads(before)
    assert np.array_equal(*found)


def test_pack_stacks_layers_and_fills_the_last_panel() -> None:
    w = randn(2, LANES + 3, 5)
    packed = pack(w)
    assert packed.shape == (2, 2, 5, LANES)
    assert np.array_equal(packed[1, 0, :, 2], w[1, 2].numpy())
    assert np.array_equal(packed[0, 1, :, :3], w[0, LANES:].T.numpy())
    assert not packed[:, 1, :, 3:].any()
