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
from eyrie.llama.matmul import LANES
from eyrie.llama.weights import rotary


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [8, 16, 40, 64])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 29])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_attend_is_softmax_attention(heads: int, size: int, length: int) -> None:
    query, key, value = randn(heads, size), randn(length, size, seed=1) * 3, randn(length, size, seed=2)
    keys, values = (caches[0, 0, 0] for caches in kernels.empty_caches(1, 1, 1, size, 40))
    keys[:] = values[:] = np.nan  # beyond the length nothing may be read
    for t in range(length):
        keys[t // LANES, :, t % LANES] = key[t]
        for d in range(size):
            values[d // LANES, t, d % LANES] = value[t, d]
    out = np.full((heads, size), np.nan, np.float32)
    kernels.attend(query.numpy(), keys, values, length, out)
    share = (query.double() @ key.double().T / size**0.5).softmax(-1)
    np.testing.assert_allclose(out, (share @ value.double()).numpy(), atol=1e-5)


@given(
    scores=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=40),
    scale=st.sampled_from([0.0625, 0.125, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_softmax_survives_any_scores(scores: list[float], scale: float) -> None:
    found = np.array(scores, np.float32)
    expected = (torch.tensor(scores, dtype=torch.float64) * scale).softmax(-1)
    kernels.softmax(found, scale)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)


@njit
def exponentials(x, out) -> None:  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = kernels.exponential(x[i])


def test_exponential_is_right_to_the_last_places_over_its_whole_range() -> None:
    x = np.linspace(-87.0, 88.0, 400_001, dtype=np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(found - exact) / exact) < 3e-7
    beyond = np.array([-1e30, -1000.0, -0.0, 0.0], np.float32)
    found = np.empty_like(beyond)
    exponentials(beyond, found)
    assert found.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-37)


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
def test_attend_tokens_groups_heads_and_appends_to_the_cache(heads: int, groups: int) -> None:
    size, past, slot = 8, 20, 1
    cos, sin = rotary(past + 1, size, 10_000.0)
    qkv = randn(past + 1, (heads + 2 * groups) * size)
    k, v = (caches[0] for caches in kernels.empty_caches(1, 2, groups, size, past + 1))
    k[:] = v[:] = np.nan
    out = np.empty((past + 1, heads * size), np.float32)
    for rows in (slice(0, 3), slice(3, 4), slice(4, past + 1)):
        part, positions = qkv[rows].clone().numpy(), np.arange(rows.start, rows.stop)
        slots = np.full(len(positions), slot)
        kernels.attend_tokens(part, slots, positions, k, v, cos.numpy(), sin.numpy(), out[rows])
    rotated = qkv.view(past + 1, heads + 2 * groups, size).transpose(0, 1)
    a, b = rotated.chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    expected = F.scaled_dot_product_attention(
        turned[None, :heads], turned[None, heads : heads + groups], rotated[None, heads + groups :],
        is_causal=True, enable_gqa=True,
    )[0]  # fmt: skip
    np.testing.assert_allclose(out, expected.transpose(0, 1).reshape(past + 1, -1).numpy(), atol=1e-5)
    assert np.isnan(k[0]).all(), "another slot was written"


def test_tokens_of_many_sequences_attend_as_each_would_alone() -> None:
    heads, groups, size = 6, 2, 16
    cos, sin = (table.numpy() for table in rotary(40, size, 10_000.0))
    lengths, slots = np.array([0, 33, 5]), np.array([2, 0, 3])
    qkv = randn(3, (heads + 2 * groups) * size).numpy()
    k, v = (caches[0] for caches in kernels.empty_caches(1, 4, groups, size, 40))
    k[:], v[:] = randn(*k.shape, seed=1).numpy(), randn(*v.shape, seed=2).numpy()
    together, alone = (np.empty((3, heads * size), np.float32) for _ in range(2))
    for m in range(3):
        one = slice(m, m + 1)
        kernels.attend_tokens(qkv[one].copy(), slots[one], lengths[one], k.copy(), v.copy(), cos, sin, alone[one])
    kernels.attend_tokens(qkv.copy(), slots, lengths, k, v, cos, sin, together)
    assert np.array_equal(together, alone)
