"""The compiled inner loops against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from eyrie.llama import kernels
from eyrie.llama.weights import rotary, storage


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 9), outputs=st.integers(1, 70), inputs=st.integers(1, 130), half=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_linear_equals_torch(rows: int, outputs: int, inputs: int, half: bool, seed: int) -> None:
    x, w = randn(rows, inputs, seed=seed), randn(outputs, inputs, seed=seed + 1)
    if half:
        w = w.bfloat16()
    y = np.full((rows, outputs), np.nan, np.float32)
    kernels.linear(storage(w), x.numpy(), y)
    np.testing.assert_allclose(y, F.linear(x.double(), w.double()).numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", range(1, 10))
def test_linear_gives_a_row_the_same_value_in_any_number_of_rows(rows: int) -> None:
    """Verify steps of different widths must agree, or speculation would not be lossless."""
    x, w = randn(9, 96), storage(randn(50, 96, seed=1).bfloat16())
    y, all_rows = np.empty((rows, 50), np.float32), np.empty((9, 50), np.float32)
    kernels.linear(w, x.numpy(), all_rows)
    kernels.linear(w, x[:rows].numpy(), y)
    np.testing.assert_allclose(y, all_rows[:rows], atol=1e-5)


@njit
def widened(x, out) -> None:  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = kernels.widen(x[i])


def test_widen_is_exact_for_every_finite_bfloat16() -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    values = bits.view(torch.bfloat16)
    finite = values.float().isfinite()
    out = np.empty(65536, np.float32)
    widened(storage(values), out)
    assert np.array_equal(out[finite.numpy()], values.float()[finite].numpy())
    same = np.empty(100, np.float32)
    widened(randn(100).numpy(), same)
    assert np.array_equal(same, randn(100).numpy())


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 29])
def test_attend_is_softmax_attention(size: int, length: int) -> None:
    capacity = 32
    query, key, value = randn(size), randn(size, capacity, seed=1) * 3, randn(capacity, size, seed=2)
    key[:, length:] = value[length:] = float("nan")  # beyond the length nothing may be read
    out, scores = np.full(size, np.nan, np.float32), np.full(capacity, np.nan, np.float32)
    kernels.attend(query.numpy(), key.numpy(), value.numpy(), length, out, scores)
    share = (query.double() @ key[:, :length].double() / size**0.5).softmax(-1)
    np.testing.assert_allclose(out, (share @ value[:length].double()).numpy(), atol=1e-5)


def test_attend_survives_large_scores() -> None:
    query, key, value = randn(8) * 100, randn(8, 8, seed=1) * 100, randn(8, 8, seed=2)
    out = np.empty(8, np.float32)
    kernels.attend(query.numpy(), key.numpy(), value.numpy(), 8, out, np.empty(8, np.float32))
    expected = (query.double() @ key.double() / 8**0.5).softmax(-1) @ value.double()
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-4)


def test_rotate_norm_and_swiglu() -> None:
    cos, sin = rotary(12, 16, 10_000.0)
    x = randn(16)
    found = x.clone().numpy()
    kernels.rotate(found, cos[11].numpy(), sin[11].numpy())
    a, b = x.chunk(2)
    expected = torch.cat([a * cos[11] - b * sin[11], b * cos[11] + a * sin[11]])
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)

    rows, weight = randn(5, 64) * 3, randn(64, seed=3)
    found = np.empty((5, 64), np.float32)
    kernels.rms_norm(rows.numpy(), weight.numpy(), 1e-5, found)
    np.testing.assert_allclose(found, F.rms_norm(rows, (64,), weight, 1e-5).numpy(), atol=1e-5, rtol=1e-5)

    wide = randn(5, 48) * 4
    found = np.empty((5, 24), np.float32)
    kernels.swiglu(wide.numpy(), found)
    gate, up = wide.chunk(2, -1)
    np.testing.assert_allclose(found, (F.silu(gate) * up).numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_attend_rows_groups_heads_and_appends_to_the_cache(heads: int, groups: int) -> None:
    size, past = 8, 5
    cos, sin = rotary(past + 1, size, 10_000.0)
    qkv = randn(past + 1, (heads + 2 * groups) * size)
    k = np.zeros((groups, size, past + 1), np.float32)
    v = np.zeros((groups, past + 1, size), np.float32)
    out = np.empty((past + 1, heads * size), np.float32)
    for rows in (slice(0, 3), slice(3, 4), slice(4, past + 1)):
        part = qkv[rows].clone().numpy()
        kernels.attend_rows(part, rows.start, k, v, cos.numpy(), sin.numpy(), out[rows])
    rotated = qkv.view(past + 1, heads + 2 * groups, size).transpose(0, 1)
    a, b = rotated.chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    expected = F.scaled_dot_product_attention(
        turned[None, :heads], turned[None, heads : heads + groups], rotated[None, heads + groups :],
        is_causal=True, enable_gqa=True,
    )[0]  # fmt: skip
    np.testing.assert_allclose(out, expected.transpose(0, 1).reshape(past + 1, -1).numpy(), atol=1e-5)
    np.testing.assert_allclose(k, turned[heads : heads + groups].transpose(1, 2).numpy(), atol=1e-6)
