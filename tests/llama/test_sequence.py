"""One sequence, a few tokens at a time, against the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyrie.llama.sequence import SequenceDecoder
from eyrie.llama.weights import LlamaWeights

LAYERS = (0, 2, 5)
IDS = torch.randint(3, 600, (45,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def weights(tiny_target: Path) -> LlamaWeights:
    return LlamaWeights.load(tiny_target)


@pytest.fixture(scope="module")
def expected(tiny_library) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        out = tiny_library(torch.tensor([IDS]), output_hidden_states=True)
    return out.logits[0].numpy(), torch.stack([out.hidden_states[k][0] for k in LAYERS], 1).numpy()


def test_chunks_of_every_size_equal_the_library(weights: LlamaWeights, expected: tuple[np.ndarray, np.ndarray]) -> None:
    decoder = SequenceDecoder(weights, LAYERS, capacity=len(IDS))
    logits, aux, start = [], [], 0
    for size in range(1, 10):
        part_logits, part_aux = decoder.extend(IDS[start : start + size])
        start += size
        assert decoder.length == start
        assert part_logits.shape == (size, 600)
        assert part_aux.shape == (size, 3, 64)
        logits.append(part_logits)
        aux.append(part_aux)
    assert start == len(IDS)
    np.testing.assert_allclose(np.concatenate(logits), expected[0], atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(aux), expected[1], atol=2e-4, rtol=1e-4)


def test_auxiliary_states_are_the_library_s_hidden_states(
    weights: LlamaWeights, expected: tuple[np.ndarray, np.ndarray]
) -> None:
    """``hidden_states[k]`` is the stream entering layer k; another layer's must not do."""
    _, aux = SequenceDecoder(weights, (5, 0, 2), capacity=64).extend(IDS)
    for column, k in ((0, 2), (1, 0), (2, 1)):
        np.testing.assert_allclose(aux[:, column], expected[1][:, k], atol=2e-4, rtol=1e-4)
    assert np.abs(aux[:, 0] - expected[1][:, 1]).max() > 0.1


def test_only_the_asked_logits_come_back(weights: LlamaWeights, expected: tuple[np.ndarray, np.ndarray]) -> None:
    logits, aux = SequenceDecoder(weights, LAYERS, capacity=64).extend(IDS, logits_from=len(IDS) - 1)
    assert logits.shape == (1, 600)
    assert len(aux) == len(IDS)
    np.testing.assert_allclose(logits[0], expected[0][-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", [0, 1, 10, 19])
def test_rewind_then_extend_equals_fresh(weights: LlamaWeights, keep: int) -> None:
    used, fresh = (SequenceDecoder(weights, LAYERS, capacity=64) for _ in range(2))
    used.extend(IDS[:keep] + IDS[::-1][: 20 - keep])
    used.rewind(keep)
    if keep:
        fresh.extend(IDS[:keep])
    for found, wanted in zip(used.extend(IDS[keep : keep + 6]), fresh.extend(IDS[keep : keep + 6]), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_more_tokens_than_the_cache_holds_are_refused(weights: LlamaWeights) -> None:
    decoder = SequenceDecoder(weights, LAYERS, capacity=8)
    decoder.extend(IDS[:6])
    with pytest.raises(ValueError, match="8 positions"):
        decoder.extend(IDS[6:9])
    decoder.extend(IDS[6:8])


def test_a_float32_folder_decodes_the_same(
    weights: LlamaWeights, expected: tuple[np.ndarray, np.ndarray], tmp_path: Path, tiny_library
) -> None:  # type: ignore[no-untyped-def]
    tiny_library.save_pretrained(tmp_path)
    wide = LlamaWeights.load(tmp_path)
    assert wide.qkv_LNH.dtype == torch.float32
    logits, _ = SequenceDecoder(wide, LAYERS, capacity=64).extend(IDS)
    np.testing.assert_allclose(logits, expected[0], atol=2e-4, rtol=1e-4)
